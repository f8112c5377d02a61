"""Gradients of the dense block, recomputed in chunks of tokens: the dense route's, and those of rows that do not fit.

Dimension key: M tokens, D model width, F hidden neurons, C chunks.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.twell import reference

_ROWS_OF_A_CHUNK = 8192  # bounds the temporaries

Weights = tuple[jax.Array | None, jax.Array, jax.Array]  # gate, up, down, each [F, D]


def dense(x_MD: jax.Array, weights: Weights, d_y_MD: jax.Array, d_l1: jax.Array) -> tuple[jax.Array, Weights]:
  """(d_x_MD, those of the weights); weight gradients add up in float32, and stay so.

  Args:
    x_MD: tokens.
    weights: of the dtype of x.
    d_y_MD: cotangent of y.
    d_l1: f32[], of the sum of |h|.
  """
  num_rows, width = x_MD.shape
  rows = min(_ROWS_OF_A_CHUNK, max(num_rows, 1))
  chunks = -(-num_rows // rows)
  cut = lambda a_MD: jnp.pad(a_MD, ((0, chunks * rows - num_rows), (0, 0))).reshape(chunks, rows, width)

  def outputs(x_MD, weights):
    y_MD, sums = reference.feedforward(x_MD, *weights, spec=None, hot=0, with_active=False)
    return y_MD, sums.l1

  def chunk(d_weights, parts):
    x_MD, d_y_MD = parts
    d_x_MD, d_parts = jax.vjp(outputs, x_MD, weights)[1]((d_y_MD, d_l1))
    return jax.tree.map(lambda total, part: total + part, d_weights, d_parts), d_x_MD

  zeros = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.promote_types(w.dtype, jnp.float32)), weights)
  d_weights, d_x_CMD = jax.lax.scan(chunk, zeros, (cut(x_MD), cut(d_y_MD)))
  return d_x_CMD.reshape(chunks * rows, width)[:num_rows], d_weights
