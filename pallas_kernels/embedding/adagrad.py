"""Row-wise Adagrad on the rows of an embedding table that a batch has looked up, and on no other.

g_r  = sum over the tokens t with ids[t] = r of weights[t] * d_out[bag of t] / divisor of the bag
m_r += mean over D of g_r^2;  table_r -= learning_rate * g_r / (sqrt(m_r) + eps)

The gradients of a repeated id are added first, so that the result is one step on the sum. On a GPU XLA adds them
atomically unless it is compiled with xla_gpu_deterministic_ops, and only there the last bits may differ between runs.
No array of V x D is there beside the table, which a jitted caller should donate.

Dimension key: V table rows, D row width, T ids, B bags.
"""

import functools
from typing import get_args

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, row_offsets
from pallas_kernels.embedding.reference import Mode, divisor_B, place_tokens


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
  scale_T = 1 / divisor_B(offsets, mode).at[bag_T].get(mode="fill", fill_value=1)
  if weights is not None:
    scale_T = scale_T * weights
  # Selects: what belongs to nothing may be NaN.
  terms_TD = jnp.where(exists_T[:, None], d_out_BD.at[bag_T].get(mode="fill", fill_value=0) * scale_T[:, None], 0)

  order_T = jnp.argsort(jnp.where(exists_T, ids, num_rows), stable=True)  # those that do not exist come last
  sorted_T, exists_T = ids[order_T], exists_T[order_T]
  starts_T = (sorted_T[1:] != sorted_T[:-1]) | (exists_T[1:] != exists_T[:-1])
  run_T = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(starts_T, dtype=jnp.int32)])  # of equal ids
  g_TD = jax.ops.segment_sum(terms_TD[order_T], run_T, num_segments=num_tokens, indices_are_sorted=True)

  # The row of each run, and for what is none a place of its own past the end of the table.
  nowhere_T = num_rows + jnp.arange(num_tokens, dtype=jnp.int32)
  row_T = nowhere_T.at[jnp.where(exists_T, run_T, num_tokens)].set(sorted_T, mode="drop")
  read = functools.partial(_rows, row_T=row_T)
  m_T = read(m_V) + jnp.mean(g_TD * g_TD, axis=1)
  rows_TD = read(table_VD).astype(jnp.float32) - learning_rate * g_TD / (jnp.sqrt(m_T) + eps)[:, None]
  return (
    table_VD.at[row_T].set(rows_TD.astype(table_VD.dtype), mode="drop", unique_indices=True),
    m_V.at[row_T].set(m_T, mode="drop", unique_indices=True),
  )


def _rows(array: jax.Array, row_T: jax.Array) -> jax.Array:
  return array.at[row_T].get(mode="fill", fill_value=0, unique_indices=True)


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
