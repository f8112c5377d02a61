"""The decoder against a float64 oracle, and what holds for it under transforms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

from sparse_lm.config import REMAT_POLICIES, ModelConfig, PrecisionConfig
from sparse_lm.models.feedforward import measure
from sparse_lm.models.transformer import Transformer

SMALL = ModelConfig(
  vocab_size=50, context_length=12, num_layers=2, model_width=16, num_heads=4, ffn_width=24, init_std=0.4
)
FP32 = PrecisionConfig("fp32")
VARIANTS = {
  "gated_relu": {},
  "grouped_query": {"num_kv_heads": 2},
  "one_key_value_head": {"num_kv_heads": 1},
  "non_gated": {"ffn_kind": "relu"},
  "silu": {"ffn_kind": "gated_silu"},
  "no_ffn": {"ffn_kind": "none"},
  "untied_head": {"tie_embeddings": False},
  "other_theta": {"rope_theta": 100_000.0},
  "one_layer_one_head": {"num_layers": 1, "num_heads": 1},
  "large_epsilon": {"norm_epsilon": 0.5},
}


def make(config, precision=FP32, seed=0):
  options = {"xla_backend_optimization_level": 0}  # compiles the random draws in a fifth of the time
  return jax.jit(lambda: Transformer(config, precision, rngs=nnx.Rngs(seed)), compiler_options=options)()


def parameters(model):
  """Nested dicts of float64 arrays, by attribute name."""
  return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model)))


def tokens_of(config, batch=2, length=None):
  rng = np.random.default_rng(1)
  return rng.integers(0, config.vocab_size, (batch, length or config.context_length)).astype(np.int32)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_hidden_states_logits_and_statistics_equal_a_float64_oracle(changes):
  config = dataclasses.replace(SMALL, **changes)
  model, tokens_BL = make(config), tokens_of(config)
  x_BLD, stats = jax.jit(lambda m, t: m(t))(model, tokens_BL)
  logits_BLV = model.logits(x_BLD)
  l1, l0, active = 0.0, 0.0, False
  for b, tokens in enumerate(tokens_BL):
    x, logits, layers = oracle.decoder(parameters(model), tokens, config)
    np.testing.assert_allclose(x_BLD[b], x, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(logits_BLV[b], logits, rtol=2e-4, atol=2e-4)
    l1 = l1 + np.array([np.abs(h).sum() for h, _ in layers])
    fires = np.array([f if config.ffn_kind != "gated_silu" else np.ones_like(f) for _, f in layers])
    l0, active = l0 + fires.sum((1, 2)), active | fires.any(1)
  np.testing.assert_allclose(stats.l1, l1, rtol=1e-4)
  np.testing.assert_array_equal(stats.l0, l0)
  np.testing.assert_array_equal(stats.active_F, active)


def test_documents_do_not_see_each_other_and_each_equals_itself_alone():
  """Rotary scores depend on distances only, so a document in the middle of a block equals the document alone."""
  model = make(SMALL)
  (tokens,) = tokens_of(SMALL, batch=1)
  documents = np.array([1] * 3 + [2] + [3] * 8, np.int32)
  x_BLD, _ = model(tokens[None], segments_BL=documents[None])
  np.testing.assert_allclose(
    x_BLD[0], oracle.decoder(parameters(model), tokens, SMALL, documents)[0], rtol=2e-4, atol=2e-4
  )
  for n in (1, 2, 3):
    alone, _ = model(tokens[None, documents == n])
    np.testing.assert_allclose(x_BLD[0, documents == n], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["auto", "xla"])
def test_no_future_token_influences_an_earlier_loss(attention):
  """By gradient with respect to the embedded tokens: exactly zero for every later one, and not for earlier ones."""
  config = dataclasses.replace(SMALL, attention_implementation=attention)
  model = make(config)
  tokens_BL = np.arange(12, dtype=np.int32)[None]  # all different, so a row of the embedding is one position

  @jax.jit
  @jax.grad
  def gradient_of(model, position):
    x_BLD, _ = model(tokens_BL)
    return jnp.sum(x_BLD[0, position] * jnp.arange(1.0, 17.0))

  for position in (0, 5, 11):
    gradient = np.abs(gradient_of(model, position).embedding_VD[...]).sum(1)[:12]
    assert (gradient[position + 1 :] == 0).all()
    assert (gradient[: position + 1] > 0).all()


@pytest.mark.slow
def test_every_remat_policy_gives_the_same_loss_and_gradients():
  def loss(model, tokens_BL):
    x_BLD, stats = model(tokens_BL)
    return jnp.mean(jnp.square(model.logits(x_BLD))) + jnp.mean(stats.l1)

  tokens_BL = tokens_of(SMALL)
  results = {}
  for policy in REMAT_POLICIES:
    model = make(dataclasses.replace(SMALL, remat=policy))
    text = jax.jit(jax.value_and_grad(loss)).lower(model, tokens_BL).as_text()
    results[policy] = jax.jit(jax.value_and_grad(loss))(model, tokens_BL), text.count("dot_general")
  (value, gradient), dots = results["none"]
  for policy, ((other_value, other_gradient), _) in results.items():
    np.testing.assert_allclose(value, other_value, rtol=1e-6, err_msg=policy)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(other_gradient), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * float(jnp.max(jnp.abs(a))), err_msg=policy)
  assert results["full"][1] > dots, "full recomputation repeats the projections"


def test_layers_start_from_different_weights_and_a_seed_decides_them():
  model = make(SMALL)
  for path, leaf in jax.tree_util.tree_flatten_with_path(model.blocks)[0]:
    if "scale" not in str(path):
      assert not np.array_equal(leaf[0], leaf[1]), path
  again, other = make(SMALL), make(SMALL, seed=1)
  assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(again)))
  assert not np.array_equal(model.embedding_VD[...], other.embedding_VD[...])


def test_matrices_are_drawn_with_the_standard_deviation_of_the_config():
  model = make(
    dataclasses.replace(SMALL, model_width=64, ffn_width=256, vocab_size=512, init_std=0.02, tie_embeddings=False)
  )
  for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
    if "scale" in str(path):
      np.testing.assert_array_equal(leaf, 1)
    else:
      assert abs(np.std(leaf) - 0.02) < 0.001, path
      assert leaf.dtype == jnp.float32, path


def test_tree_map_over_the_model_gives_the_model_back():
  model = make(SMALL)
  copy = jax.tree.map(lambda x: x, model)
  assert jax.tree.structure(copy) == jax.tree.structure(model)
  tokens_BL = tokens_of(SMALL)
  np.testing.assert_array_equal(copy(tokens_BL)[0], model(tokens_BL)[0])


def test_bf16_computes_in_bf16_from_float32_weights_within_its_precision():
  model = make(SMALL, PrecisionConfig("bf16"))
  tokens_BL = tokens_of(SMALL)
  x_BLD, _ = model(tokens_BL)
  assert x_BLD.dtype == jnp.bfloat16
  assert model.logits(x_BLD).dtype == jnp.bfloat16
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model))
  for b, tokens in enumerate(tokens_BL):
    exact = oracle.decoder(parameters(model), tokens, SMALL)[0]
    assert np.linalg.norm(np.asarray(x_BLD[b], np.float64) - exact) < 0.03 * np.linalg.norm(exact)


def test_padding_changes_neither_states_nor_statistics():
  model = make(SMALL)
  tokens_BL = tokens_of(SMALL)
  short_BLD, stats = model(tokens_BL[:, :7])
  x_BLD, padded = model(tokens_BL, real_BL=np.arange(12)[None, :] < np.array([[7], [7]]))
  np.testing.assert_allclose(x_BLD[:, :7], short_BLD, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(padded.l1, stats.l1, rtol=1e-5)
  np.testing.assert_array_equal(padded.l0, stats.l0)
  np.testing.assert_array_equal(padded.active_F, stats.active_F)


def test_statistics_leave_out_padding_even_when_it_is_nan():
  h_BLF = np.array([[[1.0, -2.0, 0.0], [np.nan, np.inf, 5.0]]])
  stats = measure(jnp.asarray(h_BLF), jnp.asarray(h_BLF != 0), jnp.array([[True, False]]))
  assert (stats.l1, stats.l0, stats.active_F.tolist()) == (3.0, 2.0, [True, True, False])


def test_statistics_of_no_real_token_are_zero():
  nothing = jnp.zeros((2, 0, 3))
  stats = measure(nothing, nothing != 0, jnp.zeros((2, 0), bool))
  assert (stats.l1, stats.l0, stats.active_F.tolist()) == (0.0, 0.0, [False] * 3)


def test_an_id_outside_the_vocabulary_is_nan_and_not_another_row():
  x_BLD, _ = make(SMALL)(np.array([[3, SMALL.vocab_size]], np.int32))
  assert np.isnan(x_BLD[0, 1]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
def test_cudnn_attention_equals_xla_attention(documents):
  if jax.default_backend() != "gpu":
    pytest.skip("needs an NVIDIA GPU with cuDNN")
  config = dataclasses.replace(SMALL, model_width=256, num_kv_heads=2, ffn_width=256, context_length=256, init_std=0.05)
  tokens_BL = tokens_of(config, batch=4)
  segments_BL = np.cumsum(np.random.default_rng(0).random(tokens_BL.shape) < 0.02, axis=1).astype(np.int32)

  def run(implementation):
    model = make(dataclasses.replace(config, attention_implementation=implementation), PrecisionConfig("bf16"))

    def loss(model):
      x_BLD, _ = model(tokens_BL, segments_BL=segments_BL if documents else None)
      return jnp.mean(jnp.square(x_BLD.astype(jnp.float32)) * jnp.arange(1.0, 257.0)[None, None, :]), x_BLD

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(model)

  ((_, x), gradient), ((_, y), other) = run("cudnn"), run("xla")
  for a, b in [(x, y), *zip(jax.tree.leaves(gradient), jax.tree.leaves(other), strict=True)]:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.linalg.norm(a - b) <= 0.03 * np.linalg.norm(b)
