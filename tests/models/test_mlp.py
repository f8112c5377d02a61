"""MLPs, the gate, and LayerNorm without scale and shift, against float64; counts of operations against XLA's."""

import interaction_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparse_lm.models.gate import Gate
from sparse_lm.models.initial import normal_weight
from sparse_lm.models.layer_norm import layer_norm
from sparse_lm.models.mlp import MLP
from sparse_lm.precision.recipes import RECIPES

FP32 = RECIPES["fp32"]


def make_mlp(*widths, activation="relu", recipe=FP32):
  return lambda rngs: MLP(widths, activation, recipe, rngs=rngs)


def make_gate(width, *hidden):
  return lambda rngs: Gate(width, hidden, "silu", FP32, rngs=rngs)


@pytest.mark.parametrize(
  ("widths", "activation"), [((5, 7, 6, 3), "relu"), ((5, 7, 3), "silu"), ((5, 3), "relu"), ((1, 1, 1), "silu")]
)
def test_an_mlp_equals_a_float64_oracle_with_its_gradients(widths, activation):
  act = {"relu": oracle.relu, "silu": oracle.silu}[activation]
  module = oracle.built(make_mlp(*widths, activation=activation))
  oracle.assert_equals(module, lambda p, x: oracle.mlp(p, x, act), oracle.inputs(4, widths[0]))


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_gate_multiplies_each_token_by_a_sigmoid_of_it(tokens):
  def gate(p, z):
    return np.array([row / (1 + np.exp(-oracle.mlp(p["mlp"], row, oracle.silu))) for row in z])

  module = oracle.built(make_gate(6, 5))
  oracle.assert_equals(module, gate, oracle.inputs(2, tokens, 6))


def test_any_number_of_axes_may_come_before_the_width():
  module, x = oracle.built(make_mlp(5, 7, 3)), oracle.inputs(2, 3, 4, 5)
  np.testing.assert_allclose(module(x), module(x.reshape(24, 5)).reshape(2, 3, 4, 3), rtol=1e-6, atol=1e-6)
  assert module(x[0, 0, 0]).shape == (3,)


def test_a_batch_may_be_empty():
  oracle.assert_a_batch_of_none_works(oracle.built(make_mlp(5, 7, 3)), 5)
  oracle.assert_a_batch_of_none_works(oracle.built(make_gate(6, 5)), 2, 6)


def test_nan_stays_in_its_sample():
  oracle.assert_nan_stays_in_its_sample(oracle.built(make_mlp(5, 7, 3)), oracle.inputs(3, 5))
  oracle.assert_nan_stays_in_its_sample(oracle.built(make_gate(6, 5)), oracle.inputs(3, 2, 6))


def test_operations_are_those_that_xla_counts():
  oracle.assert_flops(make_mlp(100, 300, 200, 10), lambda m: m.flops(), 100)
  oracle.assert_flops(make_gate(128, 256), lambda m: m.flops(tokens=6), 6, 128)


def test_bf16_computes_in_bf16_from_float32_weights():
  module = oracle.built(make_mlp(64, 64, 8, recipe=RECIPES["bf16"]))
  x = jnp.asarray(oracle.inputs(5, 64), jnp.bfloat16)
  y = module(x)
  assert y.dtype == jnp.bfloat16
  assert all(w.dtype == jnp.float32 for w in jax.tree.leaves(module))
  exact = np.array([oracle.mlp(oracle.parameters(module), row) for row in np.asarray(x, np.float64)])
  assert np.linalg.norm(np.asarray(y, np.float64) - exact) < 0.02 * np.linalg.norm(exact)


def test_a_matrix_keeps_the_variance_of_its_input_and_a_bias_starts_at_zero():
  w_FD = np.asarray(normal_weight((200, 400), 400, rngs=nnx.Rngs(0))[...])
  assert w_FD.shape == (200, 400)
  assert abs(w_FD.std() * 20 - 1) < 0.01
  assert (np.asarray(MLP((2, 3), "relu", FP32, rngs=nnx.Rngs(0)).layers[0].b_F[...]) == 0).all()


def test_an_input_of_no_width_gives_the_bias():
  np.testing.assert_array_equal(make_mlp(0, 3)(nnx.Rngs(0))(np.zeros((2, 0), np.float32)), 0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-4), (jnp.bfloat16, 2**-8)])
def test_layer_norm_far_from_zero_is_float64_rounded_once(dtype, tolerance):
  x = jnp.asarray(oracle.inputs(3, 2, 50) + 30, dtype)
  y = oracle.jit(layer_norm)(x)
  assert y.dtype == dtype
  exact = np.array([oracle.standardise(rows) for rows in np.asarray(x, np.float64)])
  np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=tolerance, atol=1e-4)


def test_layer_norm_is_zero_with_zero_gradient_where_all_entries_are_equal():
  value, gradient = jax.value_and_grad(lambda x: jnp.sum(layer_norm(x) * x))(jnp.full((2, 1), 7.0))
  assert value == 0
  np.testing.assert_array_equal(gradient, 0)


def test_what_is_no_mlp_is_refused():
  with pytest.raises(ValueError, match=r"activation='gleu' must be one of relu, silu"):
    make_mlp(2, 3, activation="gleu")(nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"widths=\(2,\) must name at least"):
    make_mlp(2)(nnx.Rngs(0))
