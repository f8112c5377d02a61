"""Activations against float64 formulas of their own, their derivatives against differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from pallas_kernels.jagged.activations import ACTIVATIONS

X = np.concatenate([np.linspace(-12, 12, 4801), [-1e4, -100, 100, 1e4]])


def tanh_form(x):
  return x / (1 + np.exp(np.minimum(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3), 700)))


def sigmoid_form(x):
  return x / (1 + np.exp(np.minimum(-x, 700)))


def half_gelu(x):
  return x * special.ndtr(x)


EXPECTED = {
  "raw": lambda x: x,
  "gelu": half_gelu,
  "gelu_approx": tanh_form,
  "fast_gelu": tanh_form,
  "gelu_polynomial": half_gelu,
  "relu": lambda x: np.where(x > 0, x, 0),
  "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
  "relu_square": lambda x: np.where(x > 0, x * x, 0),
  "silu": sigmoid_form,
  "fast_silu": sigmoid_form,
  "hardswish": lambda x: np.where(x > 3, x, np.where(x < -3, 0, x * (x + 3) / 6)),
}
KINKS = {"relu": [0], "leaky_relu": [0], "hardswish": [-3, 3]}


def test_every_activation_has_a_formula_here():
  assert EXPECTED.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_equal_float64(name):
  found = np.asarray(ACTIVATIONS[name].value(jnp.asarray(X, jnp.float32)), np.float64)
  expected = EXPECTED[name](X)
  # Relative to x: a probability of 1e-7 too many counts as much at x = 1e4 as it is worth there.
  limit = 4e-7 * np.maximum(np.abs(X), np.abs(expected)) + (6e-4 if name == "gelu_polynomial" else 1e-7)
  assert np.all(np.abs(found - expected) <= limit)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_equal_differences(name):
  x = X[np.min([np.abs(X - kink) for kink in KINKS.get(name, [1e9])], axis=0) > 1e-3]
  step = 1e-5 * np.maximum(1, np.abs(x))
  expected = (EXPECTED[name](x + step) - EXPECTED[name](x - step)) / (2 * step)
  found = np.asarray(ACTIVATIONS[name].derivative(jnp.asarray(x, jnp.float32)), np.float64)
  limit = 2.4e-3 if name == "gelu_polynomial" else 1e-5 * np.maximum(1, np.abs(expected))
  assert np.all(np.abs(found - expected) <= limit)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_zero_gives_zero(name):
  assert ACTIVATIONS[name].value(jnp.float32(0)) == 0


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_are_those_of_the_values(name):
  """Also of the polynomial, whose derivative is not that of GELU."""
  x = jnp.asarray(np.linspace(-6, 6, 1200), jnp.float32)  # no kink among them
  expected = jax.vmap(jax.grad(ACTIVATIONS[name].value))(x)
  np.testing.assert_allclose(ACTIVATIONS[name].derivative(x), expected, rtol=2e-5, atol=2e-5)


def test_float64_is_exact():
  with jax.enable_x64():
    x = jnp.asarray(X)
    np.testing.assert_allclose(ACTIVATIONS["gelu"].value(x), half_gelu(X), rtol=1e-12, atol=1e-14)
