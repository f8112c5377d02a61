"""What is captured is what the blocks of a model read, and weights that give what they answer."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

from pallas_kernels import twell
from sparse_lm.evaluation import feedforward_inputs
from sparse_lm.inference import open_model
from sparse_lm.models import feedforward

TEXTS = ["the cat sat on the mat", "", "cats " * 20, "the mat"]


def seen_by_blocks(opened, contexts_BL, monkeypatch):
  """(input, output) of each feed-forward block as the model calls it, layer after layer without a scan."""
  tokens_BL, seen = jnp.asarray(contexts_BL), []
  for cls in (feedforward.GatedFeedForward, feedforward.FeedForward):

    def call(self, x_BLD, real_BL, original=cls.__call__):
      y_BLD, stats = original(self, x_BLD, real_BL)
      seen.append((x_BLD, y_BLD))
      return y_BLD, stats

    monkeypatch.setattr(cls, "__call__", call)

  @jax.jit
  def run(model):
    x_BLD, angles = model.embed(tokens_BL), model.angles(jnp.arange(tokens_BL.shape[1])[None])
    for n in range(opened.config.num_layers):
      block = jax.tree.map(lambda w, n=n: w[n], model.blocks)
      x_BLD, _ = block(x_BLD, jnp.ones(tokens_BL.shape, bool), None, angles)
    return jax.tree.map(lambda a_BLD: a_BLD.reshape(-1, a_BLD.shape[-1]).astype(jnp.float32), seen)

  return run(opened.model)


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_captured_inputs_fed_to_a_block_give_its_outputs(recipe, trained_once, monkeypatch):
  opened = open_model(trained_once, recipe=recipe, report=pytest.fail)
  contexts_BL = np.arange(5 * 16, dtype=np.int32).reshape(5, 16) % opened.config.vocab_size
  monkeypatch.setattr(feedforward_inputs, "_TOKENS_PER_CALL", 2 * 16)  # three calls, the last with one sequence
  captured = feedforward_inputs.capture(opened, contexts_BL)
  seen = seen_by_blocks(opened, contexts_BL, monkeypatch)
  assert len(captured) == len(seen) == 2
  close = dict(rtol=1e-5, atol=1e-6) if recipe == "fp32" else dict(rtol=0.05, atol=0.05)
  for layer, (x_MD, y_MD) in zip(captured, seen):
    assert {a.dtype for a in layer} == {jnp.dtype(jnp.float32 if recipe == "fp32" else jnp.bfloat16)}
    np.testing.assert_allclose(layer.x_MD.astype(np.float32), x_MD, **close)
    found_MD, _ = twell.gated_feedforward(*map(jnp.asarray, layer))
    np.testing.assert_allclose(np.asarray(found_MD, np.float32), y_MD, **close)


def test_captured_inputs_of_the_non_gated_block(opened, monkeypatch):
  model = opened(ffn_kind="relu", context_length=8, num_layers=3)
  contexts_BL = np.arange(24, dtype=np.int32).reshape(3, 8)
  captured = feedforward_inputs.capture(model, contexts_BL)
  for layer, (_, y_MD) in zip(captured, seen_by_blocks(model, contexts_BL, monkeypatch), strict=True):
    assert layer.w_gate_FD is None
    found_MD, _ = twell.feedforward(*map(jnp.asarray, (layer.x_MD, layer.w_up_FD, layer.w_down_FD)))
    np.testing.assert_allclose(found_MD, y_MD, rtol=1e-4, atol=1e-5)


def test_captured_inputs_fire_the_units_of_a_float64_decoder(opened):
  model = opened(seed=4, context_length=8)
  contexts_BL = feedforward_inputs.contexts(model, TEXTS, max_tokens=40)
  parameters = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model.model)))
  fires_BN = [[fires for _, fires in oracle.decoder(parameters, row, model.config)[2]] for row in contexts_BL]
  for n, layer in enumerate(feedforward_inputs.capture(model, contexts_BL)):
    expected_MF = np.concatenate([fires_N[n] for fires_N in fires_BN])
    np.testing.assert_array_equal(layer.x_MD @ np.asarray(layer.w_gate_FD).T > 0, expected_MF)


def test_contexts_follow_one_another_through_documents_and_stop_at_the_limit(opened):
  model = opened(context_length=8)
  stream = [0]
  for text in TEXTS:
    stream += [*model.tokenizer.encode(text), 0]
  whole_BL = feedforward_inputs.contexts(model, TEXTS, max_tokens=10_000)
  np.testing.assert_array_equal(whole_BL.ravel(), stream[: len(stream) // 8 * 8])
  np.testing.assert_array_equal(feedforward_inputs.contexts(model, TEXTS, max_tokens=17), whole_BL[:2])
  endless = iter(lambda: "the cat", None)
  assert feedforward_inputs.contexts(model, endless, max_tokens=80).shape == (10, 8)


def test_parts_have_one_shape_and_hold_every_context_once(monkeypatch):
  contexts_BL = np.arange(1, 36, dtype=np.int32).reshape(7, 5)
  for tokens_per_call, shape in ((5, (1, 5)), (14, (2, 5)), (15, (3, 5)), (1000, (7, 5)), (3, (1, 5))):
    monkeypatch.setattr(feedforward_inputs, "_TOKENS_PER_CALL", tokens_per_call)
    parts = list(feedforward_inputs.batches(contexts_BL))
    assert {part_BL.shape for part_BL, _ in parts} == {shape}
    np.testing.assert_array_equal(np.concatenate([part_BL[:real] for part_BL, real in parts]), contexts_BL)
    assert not any(part_BL[real:].any() for part_BL, real in parts)
