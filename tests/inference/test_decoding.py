"""With a cache as without: the same logits for prompts of any lengths side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.inference.decoding import Decoder, Sequences
from sparse_lm.inference.generation import Generator
from sparse_lm.inference.sampling import Sampling

WARM = Sampling(temperature=1.0)

VARIANTS = {
  "multi_head": {},
  "grouped_query": {"num_kv_heads": 2},
  "one_key_value_head": {"num_kv_heads": 1},
  "not_gated_untied": {"ffn_kind": "relu", "tie_embeddings": False},
  "silu_one_layer": {"ffn_kind": "gated_silu", "num_layers": 1},
  "no_ffn": {"ffn_kind": "none"},
}


@jax.jit
def uncached(model, tokens_BL):
  return model.logits(model(tokens_BL)[0])


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_cached_logits_equal_uncached_ones_for_prompts_of_different_lengths(changes, opened):
  model = opened(**changes).model
  lengths, steps = [1, 5, 9, 10], 6
  rng = np.random.default_rng(0)
  texts_BL = rng.integers(0, 275, (4, 10 + steps)).astype(np.int32)
  wanted_BLV = np.asarray(uncached(model, texts_BL))
  prompts_BL = texts_BL[:, :10].copy()
  for row, length in enumerate(lengths):
    prompts_BL[row, length:] = 7  # what stands behind a prompt is not part of it
  decoder = Decoder(model)
  logits_BV, cache = decoder.prefill(jnp.asarray(prompts_BL), jnp.array(lengths, jnp.int32), slots=16)
  assert np.abs(wanted_BLV).max() > 2  # or a mistake could hide
  for step in range(steps + 1):
    at = np.array(lengths) + step  # tokens read so far
    np.testing.assert_allclose(logits_BV, wanted_BLV[range(4), at - 1], rtol=1e-4, atol=1e-4)
    if step < steps:
      tokens_B = jnp.asarray(texts_BL[range(4), at])
      logits_BV, cache = decoder.step(Sequences(tokens_B, jnp.asarray(at, jnp.int32), cache))


def test_cached_logits_equal_uncached_ones_in_bf16_within_its_rounding(opened):
  exact, rounded = opened().model, opened(precision="bf16").model
  tokens_BL = np.random.default_rng(1).integers(0, 275, (2, 12)).astype(np.int32)
  truth_BV = np.asarray(uncached(exact, tokens_BL))[:, -1]
  loss = np.abs(np.asarray(uncached(rounded, tokens_BL), np.float32)[:, -1] - truth_BV).max()
  decoder = Decoder(rounded)
  _, cache = decoder.prefill(jnp.asarray(tokens_BL[:, :-1]), jnp.full(2, 11, jnp.int32), slots=12)
  logits_BV, _ = decoder.step(Sequences(jnp.asarray(tokens_BL[:, -1]), jnp.full(2, 11, jnp.int32), cache))
  assert logits_BV.dtype == jnp.bfloat16
  assert np.abs(np.asarray(logits_BV, np.float32) - truth_BV).max() < 2 * loss


def test_a_step_past_the_last_slot_writes_nowhere(opened):
  """Sequences that have ended go on beside those that have not."""
  decoder = Decoder(opened().model)
  prompts_BL = jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32)
  _, cache = decoder.prefill(prompts_BL, jnp.array([3, 3], jnp.int32), slots=4)
  before = jax.tree.map(np.asarray, cache)
  _, cache = decoder.step(Sequences(jnp.array([9, 9], jnp.int32), jnp.array([3, 4], jnp.int32), cache))
  for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cache)):
    np.testing.assert_array_equal(new[1], old[1])
    assert (new[0, 3] != old[0, 3]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2])
def test_on_a_gpu_a_long_cached_text_has_the_logits_of_the_uncached_one(groups, opened):
  """cuDNN reads the prompt, XLA the cache; float32 on the same device is the truth."""
  shape = {"model_width": 256, "num_kv_heads": groups, "context_length": 512, "init_std": 0.1}
  exact, rounded = opened(**shape).model, opened(**shape, precision="bf16").model
  tokens_BL = np.random.default_rng(2).integers(0, 275, (3, 300)).astype(np.int32)
  truth_BLV = np.asarray(uncached(exact, tokens_BL))
  loss = np.abs(np.asarray(uncached(rounded, tokens_BL), np.float32) - truth_BLV).max()
  for model, tolerance in ((exact, 1e-3), (rounded, 2 * loss)):
    decoder, at = Decoder(model), 290
    logits_BV, cache = decoder.prefill(jnp.asarray(tokens_BL[:, :at]), jnp.full(3, at, jnp.int32), slots=320)
    while True:
      assert np.abs(np.asarray(logits_BV, np.float32) - truth_BLV[:, at - 1]).max() < tolerance
      if at == 300:
        break
      logits_BV, cache = decoder.step(Sequences(jnp.asarray(tokens_BL[:, at]), jnp.full(3, at, jnp.int32), cache))
      at += 1


@pytest.mark.gpu
def test_on_a_gpu_the_same_seed_gives_the_same_text(opened):
  generator = Generator(opened(precision="bf16", model_width=256, context_length=256))
  run = lambda: [piece.text for piece in generator.stream(["the cat", "m"], max_tokens=99, sampling=WARM, seed=3)]
  assert run() == run()
