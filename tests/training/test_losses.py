"""The objective against float64 NumPy, and what padding may not do to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparse_lm.config import DataConfig, LmConfig, ModelConfig, PrecisionConfig, SparsityConfig
from sparse_lm.models.feedforward import Stats
from sparse_lm.models.transformer import Transformer
from sparse_lm.training import losses

MODEL = ModelConfig(
  vocab_size=23, context_length=8, num_layers=2, model_width=16, num_heads=2, ffn_width=24, init_std=0.4
)
FAST = {"xla_backend_optimization_level": 0}


def nats(logits_BLV, targets_BL, weights_BL):
  """Sum of weight * -log softmax(logits)[target] in float64, over the targets that have a weight."""
  total = 0.0
  for row, target, weight in zip(
    np.asarray(logits_BLV, np.float64).reshape(-1, logits_BLV.shape[-1]), targets_BL.ravel(), weights_BL.ravel()
  ):
    if weight > 0:
      total += weight * (np.log(np.sum(np.exp(row - row.max()))) + row.max() - row[target])
  return total


def logits_of(shape, scale=3.0):
  return (scale * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


def targets_of(shape, vocab):
  return np.random.default_rng(1).integers(0, vocab, shape).astype(np.int32)


def weights_of(shape):
  """Some targets do not count, others count by halves."""
  return np.random.default_rng(2).choice(np.float32([0, 0.5, 1]), shape)


@pytest.mark.parametrize("scale", [0.0, 3.0, 300.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cross_entropy_equals_a_float64_oracle_also_for_logits_that_overflow_exp(scale, dtype):
  logits_BLV = jnp.asarray(logits_of((3, 5, 23), scale), dtype)
  targets_BL, weights_BL = targets_of((3, 5), 23), weights_of((3, 5))
  result = losses.cross_entropy(logits_BLV, targets_BL, weights_BL)
  assert result.dtype == jnp.float32
  np.testing.assert_allclose(result, nats(logits_BLV, targets_BL, weights_BL), rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_target_without_weight_reaches_neither_the_loss_nor_a_gradient_even_as_nan(poison):
  """F37: 0 * NaN is NaN, in the backward pass as well."""
  logits_BLV, targets_BL = logits_of((2, 4, 11)), targets_of((2, 4), 11)
  weights_BL = np.float32([[1, 0, 1, 0], [0, 0, 0, 1]])
  expected = nats(logits_BLV, targets_BL, weights_BL)
  logits_BLV[weights_BL == 0] = poison
  value, gradient = jax.value_and_grad(losses.cross_entropy)(jnp.asarray(logits_BLV), targets_BL, weights_BL)
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  counted = logits_BLV[weights_BL > 0].astype(np.float64)
  softmax = np.exp(counted) / np.exp(counted).sum(-1, keepdims=True)
  softmax[np.arange(len(counted)), targets_BL[weights_BL > 0]] -= 1
  np.testing.assert_allclose(gradient[weights_BL > 0], softmax, atol=1e-6)
  np.testing.assert_array_equal(gradient[weights_BL == 0], 0)


def test_a_nan_logit_of_a_target_that_counts_is_not_hidden():
  logits_BLV = logits_of((1, 2, 5))
  logits_BLV[0, 1, 3] = np.nan
  assert np.isnan(losses.cross_entropy(jnp.asarray(logits_BLV), targets_of((1, 2), 5), np.ones((1, 2), np.float32)))


@pytest.mark.parametrize("outside", [-1, 5, 10**6])
def test_a_target_outside_the_vocabulary_is_nan_where_it_counts_and_nothing_where_it_does_not(outside):
  logits_BLV = np.random.default_rng(0).normal(size=(1, 2, 5)).astype(np.float32)
  targets_BL = np.array([[outside, 3]], np.int32)
  wanted = -jax.nn.log_softmax(logits_BLV[0, 1])[3]
  assert np.isnan(losses.cross_entropy(logits_BLV, targets_BL, np.array([[1.0, 1.0]], np.float32)))
  np.testing.assert_allclose(
    losses.cross_entropy(logits_BLV, targets_BL, np.array([[0.0, 1.0]], np.float32)), wanted, rtol=1e-5
  )


def test_the_gradient_of_bf16_logits_is_bf16_and_no_float32_copy_of_them_is_kept():
  """The logits are the largest activation; the backward pass keeps them as they came."""
  logits_BLV = jnp.asarray(logits_of((2, 4, 1024)), jnp.bfloat16)
  loss, backward = jax.vjp(lambda x: losses.cross_entropy(x, targets_of((2, 4), 1024), weights_of((2, 4))), logits_BLV)
  kept = [leaf for leaf in jax.tree.leaves(backward) if getattr(leaf, "size", 0) >= logits_BLV.size]
  assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]
  assert backward(jnp.ones_like(loss))[0].dtype == jnp.bfloat16


def batch_of(padding_rows=1):
  """Three sequences of two documents each; some tokens without target, the last rows padding."""
  rng = np.random.default_rng(3)
  batch = {
    "inputs_BL": rng.integers(0, 23, (3, 8)).astype(np.int32),
    "targets_BL": rng.integers(0, 23, (3, 8)).astype(np.int32),
    "segments_BL": np.tile(np.int32([1, 1, 1, 2, 2, 2, 2, 2]), (3, 1)),
    "weights_BL": (rng.random((3, 8)) < 0.6).astype(np.float32),
  }
  for name in ("segments_BL", "weights_BL"):
    batch[name][3 - padding_rows :] = 0
  return batch


def config_of(**sparsity):
  return LmConfig(model=MODEL, sparsity=SparsityConfig(**sparsity))


@pytest.fixture(scope="module")
def model():
  """In float32, with weights large enough that nothing is near zero."""
  return jax.jit(lambda: Transformer(MODEL, PrecisionConfig("fp32"), rngs=nnx.Rngs(0)), compiler_options=FAST)()


@pytest.fixture(scope="module")
def value_and_grad():
  """Of the objective, compiled once: sizes and coefficient are arguments, the batch's shape never changes."""
  config = config_of(l1_coefficient=1.0)
  function = lambda *args: jax.value_and_grad(losses.objective, has_aux=True)(*args, config)
  return jax.jit(function, compiler_options=FAST)


@pytest.mark.parametrize("multiplier", [1.0, 64.0])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_objective_is_cross_entropy_plus_coefficient_times_multiplier_times_mean_over_layers_of_l1(
  model, reduction, multiplier, monkeypatch
):
  """From sums that are written down, so every factor is visible: 2 layers, 24 hidden units, 6 targets, 10 tokens."""
  stats = Stats(l1=jnp.float32([30.0, 50.0]), l0=jnp.float32([7.0, 9.0]), active_F=jnp.zeros((2, 24), bool))
  monkeypatch.setattr(losses, "forward", lambda *args, **options: losses.Sums(jnp.float32(12.0), stats))
  config = config_of(l1_reduction=reduction, l1_multiplier=multiplier)
  sizes = losses.Totals(jnp.float32(6), jnp.float32(10))
  value, sums = losses.objective(model, {}, sizes, jnp.float32(0.25), config)
  l1 = {"sum": (3.0 + 5.0) / 2, "mean": (3.0 / 24 + 5.0 / 24) / 2}[reduction]
  np.testing.assert_allclose(value, 12 / 6 + 0.25 * multiplier * l1, rtol=1e-6)
  assert sums.stats is stats


def test_objective_of_a_model_counts_real_tokens_for_l1_and_weights_for_cross_entropy(model, value_and_grad):
  batch = batch_of()
  (value, sums), _ = value_and_grad(model, batch, losses.totals(batch), 0.5)
  targets, tokens = batch["weights_BL"].sum(), 16
  expected = np.float64(sums.cross_entropy) / targets + 0.5 * np.float64(sums.stats.l1).mean() / tokens
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  x_BLD, _ = model(batch["inputs_BL"])
  logits_BLV = model.logits(x_BLD)
  np.testing.assert_allclose(
    sums.cross_entropy, nats(np.asarray(logits_BLV), batch["targets_BL"], batch["weights_BL"]), rtol=1e-5
  )


def test_a_batch_of_padding_only_costs_nothing_and_has_zero_gradients(model, value_and_grad):
  """F37: the mean over no target is 0, not 0 / 0."""
  batch = batch_of(padding_rows=3)
  (value, sums), gradient = value_and_grad(model, batch, losses.totals(batch), 0.5)
  assert (value, sums.cross_entropy) == (0, 0)
  assert not sums.stats.active_F.any()
  for leaf in jax.tree.leaves(gradient):
    np.testing.assert_array_equal(leaf, 0)
  for name, mean in losses.summarize(sums, losses.totals(batch)).items():
    np.testing.assert_array_equal(mean, 24 if name == "dead_per_layer" else 0, err_msg=name)


def test_tokens_without_any_target_still_pay_for_their_activations(model, value_and_grad):
  batch = batch_of(padding_rows=0) | {"weights_BL": np.zeros((3, 8), np.float32)}
  (value, sums), gradient = value_and_grad(model, batch, losses.totals(batch), 0.5)
  np.testing.assert_allclose(value, 0.5 * np.float64(sums.stats.l1).mean() / 24, rtol=1e-6)
  assert value > 0
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_the_document_mask_of_the_config_decides_whether_documents_see_each_other(model):
  """The first document of a block sees the same either way; the second does not."""
  batch = batch_of()
  first = batch | {"weights_BL": batch["weights_BL"] * (batch["segments_BL"] == 1)}
  results = []
  for document_mask in (False, True):
    config = LmConfig(model=MODEL, data=DataConfig(document_mask=document_mask))
    run = jax.jit(lambda m, b, c=config: losses.objective(m, b, losses.totals(b), 0.0, c)[0], compiler_options=FAST)
    results.append((run(model, first), run(model, batch)))
  np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
  assert abs(results[0][1] - results[1][1]) > 1e-3


def test_totals_sum_weights_and_count_tokens_that_are_no_padding_of_any_leading_shape():
  weights, segments = np.float32([[0.5, 1, 0, 0], [0, 0, 0, 0]]), np.int32([[1, 1, 2, 0], [3, 0, 0, 0]])
  for lead in [(), (1,), (2, 1)]:
    batch = {"weights_BL": weights.reshape(*lead, -1, 4), "segments_BL": segments.reshape(*lead, -1, 4)}
    assert losses.totals(batch) == losses.Totals(targets=1.5, tokens=4)


def test_divisors_are_at_least_one_each():
  assert losses.Totals(jnp.float32(0), jnp.float32(5)).divisors() == losses.Totals(1, 5)
  assert losses.Totals(jnp.float32(7), jnp.float32(0)).divisors() == losses.Totals(7, 1)


def test_adding_sums_adds_numbers_and_a_neuron_fired_if_it_fired_in_either_part():
  stats = lambda l1, active: Stats(jnp.float32([l1]), jnp.float32([2 * l1]), jnp.asarray([active], bool))
  a, b = (losses.Sums(jnp.float32(c), s) for c, s in [(1, stats(2, [0, 1, 0, 1])), (10, stats(20, [0, 0, 1, 1]))])
  total = losses.add(a, b)
  assert (total.cross_entropy, total.stats.l1, total.stats.l0) == (11, 22, 44)
  assert total.stats.active_F.dtype == bool
  np.testing.assert_array_equal(total.stats.active_F, [[False, True, True, True]])


def test_summary_gives_nats_a_target_and_activations_a_token_of_each_layer():
  active_F = np.array([[True, False, False], [True, True, True]])
  sums = losses.Sums(jnp.float32(30), Stats(jnp.float32([8, 16]), jnp.float32([4, 12]), active_F))
  summary = losses.summarize(sums, losses.Totals(jnp.float32(5), jnp.float32(8)))
  expected = {"cross_entropy": 6, "l1_per_layer": [1, 2], "l0_per_layer": [0.5, 1.5], "dead_per_layer": [2, 0]}
  assert {name: np.asarray(value).tolist() for name, value in summary.items()} == expected
