"""Gradients of the dense block, recomputed in chunks of tokens: the dense route's, and those of rows that do not fit.

Dimension key: M tokens, D model width, F hidden neurons.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.twell import reference

_ROWS_OF_A_CHUNK = 4096  # bounds the temporaries

Weights = tuple[jax.Array | None, jax.Array, jax.Array]  # gate, up, down, each [F, D]


def dense(
  x_MD: jax.Array, weights: Weights, d_y_MD: jax.Array, d_l1: jax.Array, *, start: Weights | None = None
) -> tuple[jax.Array, Weights]:
  """(d_x_MD, those of the weights); weight gradients of chunks add up in float32, and stay so.

  Args:
    x_MD: tokens.
    weights: of the dtype of x.
    d_y_MD: cotangent of y.
    d_l1: f32[], of the sum of |h|.
    start: what the weight gradients are added to, None: nothing.
  """

  def outputs(x_MD, weights):
    y_MD, sums = reference.feedforward(x_MD, *weights, spec=None, hot=0, with_active=False)
    return y_MD, sums.l1

  num_rows, total = len(x_MD), start
  parts: list[jax.Array] = []
  if total is None:
    total = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.promote_types(w.dtype, jnp.float32)), weights)
  # Straight-line code, as in `routing.py`; what each chunk waits for keeps the temporaries of two from being alive.
  for first in range(0, max(num_rows, 1), _ROWS_OF_A_CHUNK):
    chunk = x_MD[first : first + _ROWS_OF_A_CHUNK], d_y_MD[first : first + _ROWS_OF_A_CHUNK]
    (x_part, d_y_part), total, parts = jax.lax.optimization_barrier((chunk, total, parts))
    d_x_part, d_weights = jax.vjp(outputs, x_part, weights)[1]((d_y_part, d_l1))
    total = jax.tree.map(jnp.add, total, d_weights)
    parts.append(d_x_part)
  return jnp.concatenate(parts), total


def rounded(d_weights: Weights, weights: Weights) -> Weights:
  """As the weights are."""
  return jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, weights)
