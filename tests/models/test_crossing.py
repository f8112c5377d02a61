"""Cross layers and pairwise dots against float64, and their operations against XLA's count."""

import interaction_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.models.crossing import CrossNetwork, pairwise_dots, pairwise_dots_flops
from sparse_lm.precision.recipes import RECIPES

FP32 = RECIPES["fp32"]


def make_cross(width, layers, rank=None):
  return lambda rngs: CrossNetwork(width, layers, FP32, rank=rank, rngs=rngs)


@pytest.mark.parametrize(
  ("batch", "width", "layers", "rank"), [(3, 6, 3, None), (3, 6, 2, 2), (1, 5, 1, None), (1, 5, 1, 1), (2, 1, 2, None)]
)
def test_cross_layers_equal_a_float64_oracle_with_their_gradients(batch, width, layers, rank):
  oracle.assert_equals(oracle.built(make_cross(width, layers, rank)), oracle.cross, oracle.inputs(batch, width))


def test_every_cross_layer_raises_the_degree_by_one():
  """Without biases three layers are a polynomial of degree four: its fifth differences are zero, its fourth are not."""
  module = oracle.built(make_cross(3, 3))
  module = jax.tree.map(lambda w: w if w.ndim == 2 else jnp.zeros_like(w), module)
  x_BD = np.linspace(0, 1, 6, dtype=np.float32)[:, None] * oracle.inputs(1, 3)
  y_BD = np.asarray(module(x_BD), np.float64)
  assert np.abs(np.diff(y_BD, 5, axis=0)).max() < 1e-4 * np.abs(np.diff(y_BD, 4, axis=0)).max() + 1e-5
  assert np.abs(np.diff(y_BD, 4, axis=0)).max() > 1e-3


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_dots_of_all_pairs_come_row_by_row_with_their_gradients(tokens):
  x_BND = oracle.inputs(3, tokens, 4)
  y_BP = oracle.jit(lambda x: pairwise_dots(x, FP32))(x_BND)
  exact = np.array([oracle.dots(x) for x in x_BND.astype(np.float64)])
  assert y_BP.shape == exact.shape == (3, tokens * (tokens - 1) // 2)
  np.testing.assert_allclose(y_BP, exact, rtol=1e-5, atol=1e-5)

  d_BP = oracle.inputs(*y_BP.shape)
  (d_x_BND,) = oracle.jit(lambda x, d: jax.vjp(lambda x: pairwise_dots(x, FP32), x)[1](d))(x_BND, d_BP)
  expected_BND = np.zeros(x_BND.shape)
  pairs = [(i, j) for i in range(tokens) for j in range(i + 1, tokens)]
  for p, (i, j) in enumerate(pairs):
    expected_BND[:, i] += d_BP[:, [p]] * x_BND[:, j]
    expected_BND[:, j] += d_BP[:, [p]] * x_BND[:, i]
  np.testing.assert_allclose(d_x_BND, expected_BND, rtol=1e-5, atol=1e-5)


def test_a_batch_may_be_empty():
  oracle.assert_a_batch_of_none_works(oracle.built(make_cross(6, 2, 2)), 6)
  assert pairwise_dots(jnp.zeros((0, 3, 4)), FP32).shape == (0, 3)


def test_nan_stays_in_its_sample():
  oracle.assert_nan_stays_in_its_sample(oracle.built(make_cross(6, 2)), oracle.inputs(3, 6))


def test_operations_are_those_that_xla_counts():
  oracle.assert_flops(make_cross(200, 2), lambda m: m.flops(), 200)
  oracle.assert_flops(make_cross(400, 2, rank=64), lambda m: m.flops(), 400)
  dots = lambda rngs: jax.tree_util.Partial(lambda x: pairwise_dots(x, FP32))
  oracle.assert_flops(dots, lambda _: pairwise_dots_flops(64, 128), 64, 128)
