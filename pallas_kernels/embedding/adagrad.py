"""Row-wise Adagrad on the rows of an embedding table that a batch has looked up, and on no other.

g_r  = sum over the tokens t with ids[t] = r of weights[t] * d_out[bag of t] / divisor of the bag
m_r += mean over D of g_r^2;  table_r -= learning_rate * g_r / (sqrt(m_r) + eps)

The gradients of a repeated id are added first, so that the result is one step on the sum. Ids are sorted, and the runs
of equal ones are bags of rows of d_out: what adds up rows of a table for the forward pass adds up gradients here, in
the order of the ids. A run is added in pieces first: an id that is in every sample would be one long sum, which one
block computes while all others wait.

No array of V x D is there beside the table, which a jitted caller should donate.

Dimension key: V table rows, D row width, T ids, B bags, R runs of equal ids, P pieces of them; both are upper bounds.
"""

from typing import get_args

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, row_offsets
from pallas_kernels.embedding.api import bag
from pallas_kernels.embedding.reference import Mode, divisor_B, place_tokens

_PIECE = 64  # tokens


def rowwise_adagrad(
  table_VD: jax.Array,
  m_V: jax.Array,
  ids: jax.Array,
  offsets: jax.Array,
  weights: jax.Array | None,
  d_out_BD: jax.Array,
  *,
  learning_rate: float | jax.Array,
  eps: float,
  mode: Mode = "sum",
  implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns (table_VD, m_V) after one step.

  Args:
    table_VD: floating; a row is updated in float32 and rounded once.
    m_V: float32[V], sums of mean squares, zeros at the start.
    ids: int32[T], those of the bag call. An id outside [0, V) updates nothing.
    offsets: int32[B + 1], likewise; what lies behind offsets[-1] updates nothing, even if it is NaN.
    weights: float32[T] of that call, ones if None.
    d_out_BD: float32[B, D], the gradient of the call's sink.
    learning_rate: a number.
    eps: a positive Python number; a row whose gradients have all been zero stays where it is.
    mode: of the bag call.
    implementation: of the sums, as `bag` takes it.

  Raises:
    TypeError: dtypes that do not fit.
    ValueError: shapes or options that do not fit together.
  """
  op = "embedding.rowwise_adagrad"
  table_VD, m_V, ids, offsets, d_out_BD = (jnp.asarray(a) for a in (table_VD, m_V, ids, offsets, d_out_BD))
  weights = None if weights is None else jnp.asarray(weights)
  _check(op, table_VD, m_V, ids, offsets, weights, d_out_BD, eps, mode)
  dispatch.refuse_sharded(op, table_VD=table_VD, m_V=m_V, ids=ids, offsets=offsets, weights=weights, d_out_BD=d_out_BD)
  row_offsets.check(op, "offsets", offsets, len(ids))
  num_rows, num_tokens = len(table_VD), len(ids)
  if 0 in (*table_VD.shape, num_tokens, len(d_out_BD)):
    return table_VD, m_V

  bag_T, exists_T = place_tokens(ids, offsets, num_rows)
  order_T = jnp.argsort(jnp.where(exists_T, ids, num_rows), stable=True)  # those that do not exist come last
  sorted_T, place_T = ids[order_T], jnp.arange(num_tokens, dtype=jnp.int32)
  exists_T = place_T < jnp.sum(exists_T)
  starts_run_T = exists_T & ((place_T == 0) | (sorted_T != jnp.roll(sorted_T, 1)))
  starts_piece_T = exists_T & (starts_run_T | (place_T % _PIECE == 0))
  most_runs = min(num_tokens, num_rows)
  most_pieces = min(num_tokens, most_runs + num_tokens // _PIECE + 1)
  piece_T = jnp.cumsum(starts_piece_T, dtype=jnp.int32) - 1

  nowhere_R = num_rows + jnp.arange(most_runs, dtype=jnp.int32)  # places of their own past the end of the table
  row_R = _taken(sorted_T, starts_run_T, nowhere_R)
  of_pieces = _taken(place_T, starts_piece_T, jnp.full((most_pieces + 1,), jnp.sum(exists_T, dtype=jnp.int32)))
  of_runs = _taken(piece_T, starts_run_T, jnp.full((most_runs + 1,), jnp.sum(starts_piece_T, dtype=jnp.int32)))

  scale_T = _scales(weights, offsets, bag_T, mode)
  scale_T = None if scale_T is None else scale_T[order_T]
  pieces_PD = bag(d_out_BD, bag_T[order_T], of_pieces, scale_T, implementation=implementation)
  g_RD = bag(pieces_PD, jnp.arange(most_pieces, dtype=jnp.int32), of_runs, implementation=implementation)

  m_R = _rows(m_V, row_R) + jnp.mean(g_RD * g_RD, axis=1)
  rows_RD = _rows(table_VD, row_R).astype(jnp.float32) - learning_rate * g_RD / (jnp.sqrt(m_R) + eps)[:, None]
  return (
    table_VD.at[row_R].set(rows_RD.astype(table_VD.dtype), mode="drop", unique_indices=True),
    m_V.at[row_R].set(m_R, mode="drop", unique_indices=True),
  )


def _taken(values_T: jax.Array, chosen_T: jax.Array, rest: jax.Array) -> jax.Array:
  """The chosen values in their order, then what `rest` has at the places that are left."""
  number_T = jnp.cumsum(chosen_T, dtype=jnp.int32) - 1
  # Places past the end differ as well, so that XLA need not sort the writes to know their order.
  at_T = jnp.where(chosen_T, number_T, len(rest) + jnp.arange(len(values_T), dtype=jnp.int32))
  return rest.at[at_T].set(values_T, mode="drop", unique_indices=True)


def _scales(weights: jax.Array | None, offsets: jax.Array, bag_T: jax.Array, mode: Mode) -> jax.Array | None:
  """f32[T], what each token's d_out is multiplied by; None: by 1."""
  if mode == "sum":
    return weights
  scale_T = 1 / divisor_B(offsets, mode).at[bag_T].get(mode="fill", fill_value=1)
  return scale_T if weights is None else scale_T * weights


def _rows(array: jax.Array, row_R: jax.Array) -> jax.Array:
  return array.at[row_R].get(mode="fill", fill_value=0, unique_indices=True)


def _check(op: str, table_VD, m_V, ids, offsets, weights, d_out_BD, eps, mode) -> None:
  if table_VD.ndim != 2 or not jnp.issubdtype(table_VD.dtype, jnp.floating):
    raise TypeError(f"{op}: table_VD must be floating [V, D], got {table_VD.dtype}{table_VD.shape}")
  if ids.ndim != 1 or ids.dtype != jnp.int32:
    raise TypeError(f"{op}: ids must be int32[T], got {ids.dtype}{ids.shape}")
  (num_rows, width), num_bags = table_VD.shape, len(offsets) - 1
  wanted = {"m_V": (m_V, (num_rows,)), "d_out_BD": (d_out_BD, (num_bags, width))}
  wanted |= {} if weights is None else {"weights": (weights, ids.shape)}
  for name, (array, shape) in wanted.items():
    if array.dtype != jnp.float32 or array.shape != shape:
      raise ValueError(f"{op}: {name} must be float32{shape}, got {array.dtype}{array.shape}")
  if mode not in get_args(Mode):
    raise ValueError(f"{op}: mode={mode!r} must be one of {get_args(Mode)}")
  if not eps > 0:
    raise ValueError(f"{op}: eps={eps} must be positive; a row without gradients would become NaN")
  if num_rows + len(ids) >= 2**31:
    raise ValueError(f"{op}: V={num_rows} rows and T={len(ids)} ids together must be less than 2**31; split the ids")
