"""Activations of generalised dot-product attention (GDPA), elementwise, each with its derivative.

Every one of them gives 0 for 0. They are written with what Mosaic GPU lowers, so that kernels and the plain reference
share them: no erf there (an approximation good to float32 takes its place), no `jax.nn.relu`.

`softmax` is not among them: it needs a whole row.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Activation(NamedTuple):
  """act(x), and d act(x) / dx."""

  value: Callable[[jax.Array], jax.Array]
  derivative: Callable[[jax.Array], jax.Array]


_SQRT_HALF, _RSQRT_TAU = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)
_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715
_LEAK = 0.01
# Phi(x) - 1/2, odd, as x * P(x^2) up to |x| = 3.6 and constant from there on. Minimax in x * Phi(x) and its derivative:
# off by at most 6e-4 and 2.4e-3. (The series of the same degree is off by 20 at 3.6, and diverges.)
_POLYNOMIAL_END = 3.6
_POLYNOMIAL = (0.39615623, -0.0622749196, 0.00775731207, -0.000606410308, 2.63220318e-05, -4.80463666e-07)
# Abramowitz and Stegun 7.1.26, off by at most 1.5e-7.
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_ERF_P = 0.3275911


def _normal_cdf(x: jax.Array) -> jax.Array:
  if x.dtype == jnp.float64:
    return 0.5 * (1 + jax.lax.erf(x * _SQRT_HALF))
  z = jnp.abs(x) * _SQRT_HALF
  t = 1 / (1 + _ERF_P * z)
  tail = 0.5 * _horner(_ERF, t) * t * jnp.exp(-z * z)  # of the side on which x lies
  return jnp.where(x < 0, tail, 1 - tail)


def _horner(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
  """c0 + c1 x + c2 x^2 + ..."""
  *rest, last = coefficients
  total = last * x
  for c in reversed(rest[1:]):
    total = (total + c) * x
  return total + rest[0]


def _gelu_derivative(x):
  return _normal_cdf(x) + x * (_RSQRT_TAU * jnp.exp(-0.5 * x * x))


def _tanh_of(x):
  return jnp.tanh(_TANH_SCALE * x * (1 + _TANH_CUBIC * x * x))


def _gelu_tanh_derivative(x):
  t = _tanh_of(x)
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (_TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x))


def _gelu_polynomial(x):
  inside = jnp.minimum(jnp.maximum(x, -_POLYNOMIAL_END), _POLYNOMIAL_END)
  # Not below 0, where the last bit would count for x of -1e4.
  return x * jnp.maximum(0.5 + inside * _horner(_POLYNOMIAL, inside * inside), 0)


def _gelu_polynomial_derivative(x):
  inside = jnp.minimum(jnp.maximum(x, -_POLYNOMIAL_END), _POLYNOMIAL_END)
  squared = inside * inside
  slope = _horner(tuple((2 * n + 1) * c for n, c in enumerate(_POLYNOMIAL)), squared)
  return jnp.maximum(0.5 + inside * _horner(_POLYNOMIAL, squared), 0) + jnp.where(inside == x, x * slope, 0)


def _sigmoid(x):
  return 0.5 * (1 + jnp.tanh(0.5 * x))  # one operation of the special function unit; exp and a division are two


def _silu_derivative(x):
  s = _sigmoid(x)
  return s * (1 + x * (1 - s))


def _hardswish(x):
  return x * (jnp.minimum(jnp.maximum(x + 3, 0), 6) * (1 / 6))


def _hardswish_derivative(x):
  return jnp.where(x < -3, 0, jnp.where(x > 3, 1, x * (1 / 3) + 0.5))


_GELU_TANH = Activation(lambda x: 0.5 * x * (1 + _tanh_of(x)), _gelu_tanh_derivative)
_SILU = Activation(lambda x: x * _sigmoid(x), _silu_derivative)

# The names and formulas of the published GDPA kernels. Names with "fast" are for scripts written for those: their
# hardware approximations are what our kernels use under either name.
ACTIVATIONS = {
  "raw": Activation(lambda x: x, lambda x: jnp.ones_like(x)),
  "gelu": Activation(lambda x: x * _normal_cdf(x), _gelu_derivative),
  "gelu_approx": _GELU_TANH,
  "fast_gelu": _GELU_TANH,
  "gelu_polynomial": Activation(_gelu_polynomial, _gelu_polynomial_derivative),
  "relu": Activation(lambda x: jnp.maximum(x, 0), lambda x: jnp.where(x > 0, 1, 0).astype(x.dtype)),
  "leaky_relu": Activation(lambda x: jnp.maximum(x, _LEAK * x), lambda x: jnp.where(x > 0, 1, _LEAK).astype(x.dtype)),
  "relu_square": Activation(lambda x: jnp.maximum(x, 0) * jnp.maximum(x, 0), lambda x: 2 * jnp.maximum(x, 0)),
  "silu": _SILU,
  "fast_silu": _SILU,
  "hardswish": Activation(_hardswish, _hardswish_derivative),
}
