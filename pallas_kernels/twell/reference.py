"""The feed-forward block in plain jnp: the oracle of the kernels, the path on CPU, and the dense route on a GPU.

Every neuron of every row is computed. What the format would not hold is counted all the same, so that `overflow_rows`
does not depend on where a call runs. (For at most 64 tokens it does: the kernels then pack nothing; and in a call that
is differentiated they also count tokens whose gradients find no room.)

Dimension key: M tokens, D model width, F hidden neurons.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.twell.format import ROW_CAPACITY, Spec


class Sums(NamedTuple):
  """Of hidden values over the rows of a call; parts of a call add up, `active_F` by or."""

  l1: jax.Array  # f32[], sum of |h|
  l0: jax.Array  # f32[], neurons that fire (their gate is not 0 after ReLU, NaN counts)
  overflow_rows: jax.Array  # i32[], rows that overflow a tile or whose token is not finite
  active_F: jax.Array | None  # bool[F], fired for at least one row; None: nobody asked


def feedforward(
  x_MD: jax.Array,
  w_gate_FD: jax.Array | None,
  w_up_FD: jax.Array,
  w_down_FD: jax.Array,
  *,
  spec: Spec | None,
  hot: int,
  with_active: bool,
) -> tuple[jax.Array, Sums]:
  """y = (relu(x Wg^T) * (x Wu^T)) Wd, or y = relu(x Wu^T) Wd without a gate (TwELL, eq. 1 and appendix C.2).

  Products are summed in float32 and rounded to the dtype of x, as a dense model does.

  Args:
    x_MD: tokens.
    w_gate_FD: None for the non-gated block.
    w_up_FD: of the dtype of x, as the other weights.
    w_down_FD: row n belongs to neuron n.
    spec: whose overflow is counted; None: nothing overflows.
    hot: the first neurons, which are not packed and so never overflow.
    with_active: also say which neurons fired.

  Returns:
    y_MD in the dtype of x, and sums over all rows.
  """
  if w_gate_FD is None:
    gate_MF = h_MF = gate(x_MD, w_up_FD)
  else:
    gate_MF = gate(x_MD, w_gate_FD)
    h_MF = gate_MF * _project("MD,FD->MF", x_MD, w_up_FD)
  y_MD = _project("MF,FD->MD", h_MF, w_down_FD)
  fires_MF = gate_MF != 0
  overflow_rows = jnp.int32(0)
  if spec is not None:
    must_be_finite_MD = None if w_gate_FD is None else x_MD
    overflow_rows = jnp.sum(misfits(must_be_finite_MD, fires_MF[:, hot:], spec), dtype=jnp.int32)
  return y_MD, Sums(
    l1=jnp.sum(jnp.abs(h_MF), dtype=jnp.float32),
    l0=jnp.sum(fires_MF, dtype=jnp.float32),
    overflow_rows=overflow_rows,
    active_F=jnp.any(fires_MF, axis=0) if with_active else None,
  )


def gate(x_MD: jax.Array, w_FD: jax.Array) -> jax.Array:
  """relu(x w^T) in the dtype of x."""
  return jax.nn.relu(_project("MD,FD->MF", x_MD, w_FD))


def misfits(x_MD: jax.Array | None, fires_MF: jax.Array, spec: Spec) -> jax.Array:
  """bool[M]: rows that the sparse route computes densely.

  x_MD is None for the non-gated block, where a neuron that does not fire adds 0 whatever the token is. In the gated one
  it adds 0 * (x . w_up), which is NaN if the token is not finite.
  """
  (num_rows, columns), tiles = fires_MF.shape, spec.tiles(fires_MF.shape[1])
  padded = jnp.pad(fires_MF, ((0, 0), (0, tiles * spec.tile - columns)))
  counts = jnp.sum(padded.reshape(num_rows, tiles, spec.tile), axis=2, dtype=jnp.int32)
  too_many = jnp.any(counts > spec.capacity, axis=1) | (jnp.sum(counts, axis=1) > ROW_CAPACITY)
  return too_many if x_MD is None else too_many | ~jnp.all(jnp.isfinite(x_MD), axis=1)


def _project(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
  # float32 products on a GPU use TF32 unless asked otherwise.
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jnp.einsum(equation, x, w, precision=precision)
