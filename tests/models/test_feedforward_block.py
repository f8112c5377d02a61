"""The feed-forward block by twell against the dense one with the same parameters: values, statistics, gradients.

The dense block is held against a float64 oracle in test_transformer.py.

Dimension key: B batch, L length, D model width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from sparse_lm.config import LmConfig, ModelConfig, ParallelConfig, PrecisionConfig
from sparse_lm.errors import UserError
from sparse_lm.models.feedforward import make_feedforward
from sparse_lm.models.transformer import Transformer
from sparse_lm.parallel.mesh import make_mesh
from sparse_lm.parallel.sharding import RULES, shard_parameters
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.training import losses

MODEL = ModelConfig(
  vocab_size=50, context_length=12, num_layers=2, model_width=16, num_heads=2, ffn_width=24, init_std=0.4
)
FAST = {"xla_backend_optimization_level": 0}  # to compile
IMPLEMENTATIONS = ("dense", "twell")
both_kinds = pytest.mark.parametrize("kind", ["gated_relu", "relu"])


def assert_close(a, b, tolerance):
  """Each array, by the norm of the difference."""
  for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(a)[0], jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y), jax.tree_util.keystr(path)


def model_of(kind, implementation, recipe, **changes):
  config = dataclasses.replace(MODEL, ffn_kind=kind, ffn_implementation=implementation, **changes)
  return jax.jit(lambda: Transformer(config, PrecisionConfig(recipe), rngs=nnx.Rngs(0)), compiler_options=FAST)()


@both_kinds
def test_a_block_has_the_values_statistics_and_gradients_of_the_dense_block(kind):
  """Padding holds NaN, which is to reach nothing: the dense block gets zeros there."""
  rng = np.random.default_rng(0)
  x_BLD, d_y_BLD = rng.normal(size=(2, 2, 12, 16)).astype(np.float32)
  real_BL = np.ones((2, 12), bool)
  real_BL[0, 10:], real_BL[1, 4] = False, False

  def outputs(block, x_BLD):
    y_BLD, stats = block(x_BLD, real_BL)
    return (y_BLD, stats.l1), stats

  @jax.jit
  def everything(block, padding):
    padded_BLD = jnp.where(real_BL[:, :, None], x_BLD, padding)
    (y_BLD, _), back, stats = jax.vjp(outputs, block, padded_BLD, has_aux=True)
    return y_BLD, stats, back((d_y_BLD, jnp.float32(0.3)))

  def results(implementation, padding):
    config = dataclasses.replace(MODEL, ffn_kind=kind, ffn_implementation=implementation)
    return everything(make_feedforward(config, RECIPES["fp32"], rngs=nnx.Rngs(0)), padding)

  dense, sparse = results("dense", 0.0), results("twell", np.nan)
  assert 0 < sparse[1].l0 < real_BL.sum() * 24
  assert_close(sparse, dense, 1e-6)
  np.testing.assert_array_equal(np.asarray(sparse[0])[~real_BL], 0)


@both_kinds
def test_in_bf16_a_model_gives_the_states_and_statistics_of_the_dense_model(kind):
  tokens_BL = np.random.default_rng(0).integers(0, 50, (2, 12)).astype(np.int32)
  real_BL = np.arange(12)[None, :] < np.array([[12], [7]])
  states, stats = zip(
    *(
      jax.jit(lambda model: model(tokens_BL, real_BL=real_BL), compiler_options=FAST)(
        model_of(kind, implementation, "bf16")
      )
      for implementation in IMPLEMENTATIONS
    )
  )
  assert_close(states[1][real_BL], states[0][real_BL], 0.01)
  assert_close(stats[1], stats[0], 0.01)


def test_a_model_computed_the_other_way_is_that_model_and_the_first_stays_as_it_was():
  dense, twell = (model_of("gated_relu", implementation, "fp32") for implementation in IMPLEMENTATIONS)
  assert jax.tree.structure(dense.with_ffn("twell")) == jax.tree.structure(twell)
  assert dense.blocks.feedforward.implementation == "dense"
  assert jax.tree.structure(dense) != jax.tree.structure(twell)


@pytest.mark.slow
def test_on_eight_devices_the_objective_and_its_gradient_are_those_of_the_dense_model_on_one():
  rng = np.random.default_rng(0)
  segments_BL = np.ones((8, 12), np.int32)
  segments_BL[2, 9:], segments_BL[7] = 0, 0  # the last device has padding only
  tokens_BL = rng.integers(0, 50, (2, 8, 12)).astype(np.int32)
  weights_BL = (segments_BL > 0).astype(np.float32)
  batch = {"inputs_BL": tokens_BL[0], "targets_BL": tokens_BL[1], "segments_BL": segments_BL, "weights_BL": weights_BL}
  results = []
  for implementation, fsdp in zip(IMPLEMENTATIONS, (1, 4)):
    config = LmConfig(parallel=ParallelConfig(data=2 if fsdp == 4 else 1, fsdp=fsdp))
    objective = functools.partial(losses.objective, config=config)
    gradient = jax.jit(jax.value_and_grad(objective, has_aux=True), compiler_options=FAST)
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
      model = shard_parameters(model_of("gated_relu", implementation, "fp32", remat="dots_and_attention"))
      placed = jax.device_put(batch, NamedSharding(mesh, RULES.activations(2)))
      results.append(jax.device_get(gradient(model, placed, losses.totals(batch), jnp.float32(0.01))))
  assert_close(results[1], results[0], 1e-5)


@pytest.mark.parametrize("kind", ["gated_silu", "none"])
def test_a_block_without_relu_cannot_be_computed_by_twell(kind):
  config = dataclasses.replace(MODEL, ffn_kind=kind, ffn_implementation="twell")
  with pytest.raises(
    UserError, match=rf"ffn_implementation='twell' .* model.ffn_kind='{kind}'.*gated_relu or relu, or"
  ):
    config.validate()
