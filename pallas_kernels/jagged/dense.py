"""Between packed rows and dense arrays: copies, a softmax inside rows, and products with a matrix of each row's own.

Plain jnp that XLA fuses and shards. Whatever lies behind the last row is never read: it gives 0, and gets no gradient.
What is not finite stays in its row. Sums over a row have an order of their own: the same bits again, on a GPU too,
where scattered additions would come in any order.

Dimension key: T tokens, B rows, L longest row, D and E features, N tiles of at most R tokens of one row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import row_offsets
from pallas_kernels.jagged.geometry import Tiles, tile_size

_TILES_AT_A_TIME = 64  # of jagged_dense_matmul; bounds the matrices that are copied beside each other


def jagged_to_dense(
  x_TD: jax.Array, offsets: jax.Array, max_length: int, *, fill: float = 0.0
) -> tuple[jax.Array, jax.Array]:
  """Rows side by side, each filled up to `max_length` tokens.

  Args:
    x_TD: [T, ...], any dtype.
    offsets: int32[B + 1], from 0, never decreasing; checked when concrete.
    max_length: L. Longer rows are cut, and the tokens that are left out counted.
    fill: what stands behind a row's end.

  Returns:
    [B, L, ...], and i32[], the number of tokens that did not fit.

  Raises:
    ValueError: a row is longer than max_length, where the offsets are concrete.
  """
  op = "jagged.jagged_to_dense"
  x_TD, offsets = _checked(op, x_TD, offsets)
  lengths_B = jnp.diff(offsets)
  left_out = jnp.sum(jnp.maximum(lengths_B - max_length, 0), dtype=jnp.int32)
  if not isinstance(offsets, jax.core.Tracer) and int(left_out):
    b = int(jnp.argmax(lengths_B))
    raise ValueError(
      f"{op}: row {b} has {int(lengths_B[b])} tokens and max_length={max_length}; give the longest row's"
    )
  token_BL = offsets[:-1, None] + jnp.arange(max_length, dtype=jnp.int32)[None, :]
  inside_BL = jnp.arange(max_length)[None, :] < lengths_B[:, None]
  # Past the end of the array, so that neither a value nor a gradient comes from there.
  token_BL = jnp.where(inside_BL, token_BL, len(x_TD))
  return x_TD.at[token_BL].get(mode="fill", fill_value=fill), left_out


def dense_to_jagged(x_BLD: jax.Array, offsets: jax.Array, num_tokens: int) -> jax.Array:
  """The first tokens of each row, packed: the inverse of `jagged_to_dense`.

  Args:
    x_BLD: [B, L, ...].
    offsets: int32[B + 1]; the tokens of a row beyond L are 0.
    num_tokens: T; tokens from offsets[-1] on are 0.

  Returns:
    [T, ...].

  Raises:
    ValueError: the offsets are concrete, and a row is longer than L or ends behind T.
  """
  op = "jagged.dense_to_jagged"
  x_BLD = jnp.asarray(x_BLD)
  if x_BLD.ndim < 2:
    raise ValueError(f"{op}: x_BLD must be [B, L, ...], got shape {x_BLD.shape}")
  offsets = _checked_offsets(op, offsets, num_tokens)
  if len(offsets) != len(x_BLD) + 1:
    raise ValueError(f"{op}: offsets have {len(offsets) - 1} rows and x_BLD has {len(x_BLD)}")
  if not isinstance(offsets, jax.core.Tracer) and len(x_BLD):
    longest = int(jnp.max(jnp.diff(offsets)))
    if longest > x_BLD.shape[1]:
      raise ValueError(f"{op}: a row has {longest} tokens, and x_BLD only L={x_BLD.shape[1]} of each")
  if x_BLD.size == 0:
    return jnp.zeros((num_tokens, *x_BLD.shape[2:]), x_BLD.dtype)
  row_T, position_T = _places(offsets, num_tokens)
  return x_BLD.at[row_T, position_T].get(mode="fill", fill_value=0)


def jagged_softmax(x_TD: jax.Array, offsets: jax.Array) -> jax.Array:
  """Softmax over the tokens of each row, for every feature alone; in float32, rounded to the dtype of x.

  Reverse-mode derivatives are offered.

  Args:
    x_TD: floating [T, ...].
    offsets: int32[B + 1], from 0, never decreasing; checked when concrete.

  Returns:
    [T, ...]; 0 behind the last row.
  """
  x_TD, offsets = _checked("jagged.jagged_softmax", x_TD, offsets)
  if not jnp.issubdtype(x_TD.dtype, jnp.floating):
    raise TypeError(f"jagged.jagged_softmax: x_TD must be floating, got {x_TD.dtype}{x_TD.shape}")
  return _softmax(x_TD, offsets)


@jax.custom_vjp
def _softmax(x_TD: jax.Array, offsets: jax.Array) -> jax.Array:
  rows = len(offsets)  # one more, of what is in none
  row_T, real_T = _rows_and_real(offsets, x_TD)
  wide_TD = jnp.where(real_T, x_TD, 0).astype(jnp.promote_types(x_TD.dtype, jnp.float32))
  largest_BD = jax.ops.segment_max(wide_TD, row_T, num_segments=rows, indices_are_sorted=True)
  e_TD = jnp.exp(wide_TD - largest_BD[row_T])
  return jnp.where(real_T, e_TD / _row_sums(e_TD, offsets), 0).astype(x_TD.dtype)


def _softmax_forward(x_TD, offsets):
  p_TD = _softmax(x_TD, offsets)
  return p_TD, (p_TD, offsets)


def _softmax_backward(kept, d_p_TD):
  p_TD, offsets = kept
  _, real_T = _rows_and_real(offsets, p_TD)
  wide = jnp.promote_types(p_TD.dtype, jnp.float32)
  p_TD, d_p_TD = p_TD.astype(wide), jnp.where(real_T, d_p_TD, 0).astype(wide)
  d_x_TD = jnp.where(real_T, p_TD * (d_p_TD - _row_sums(p_TD * d_p_TD, offsets)), 0)
  return d_x_TD.astype(kept[0].dtype), np.zeros(offsets.shape, jax.dtypes.float0)


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _rows_and_real(offsets: jax.Array, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The row of every token, and whether it has one, of the rank of x."""
  row_T, _ = _places(offsets, len(x_TD))
  return row_T, (row_T < len(offsets) - 1).reshape(-1, *(1 for _ in x_TD.shape[1:]))


def _row_sums(x_TD: jax.Array, offsets: jax.Array) -> jax.Array:
  """Of each token's row, [T, ...]; a scan, as its order of additions is fixed."""
  row_T, _ = _places(offsets, len(x_TD))
  starts_T = (row_T != jnp.roll(row_T, 1)).reshape(-1, *(1 for _ in x_TD.shape[1:]))

  def add(a, b):
    (starts_a, sum_a), (starts_b, sum_b) = a, b
    return starts_a | starts_b, jnp.where(starts_b, sum_b, sum_a + sum_b)

  _, upto_TD = lax.associative_scan(add, (starts_T, x_TD))
  last_B = jnp.append(offsets[1:] - 1, len(x_TD) - 1)
  return upto_TD[last_B[row_T]]


def jagged_dense_matmul(x_TD: jax.Array, w_BDE: jax.Array, offsets: jax.Array) -> jax.Array:
  """y[t] = x[t] @ w[row of t]: a product with a matrix of each row's own, summed in float32.

  Reverse-mode derivatives are offered.

  Args:
    x_TD: floating [T, D].
    w_BDE: of the same dtype.
    offsets: int32[B + 1], from 0, never decreasing; checked when concrete.

  Returns:
    y_TE in the dtype of x; 0 behind the last row.
  """
  op = "jagged.jagged_dense_matmul"
  x_TD, offsets = _checked(op, x_TD, offsets)
  w_BDE = jnp.asarray(w_BDE)
  if x_TD.dtype != w_BDE.dtype or not jnp.issubdtype(x_TD.dtype, jnp.floating):
    raise TypeError(f"{op}: x_TD is {x_TD.dtype} and w_BDE is {w_BDE.dtype}; give one floating dtype")
  if x_TD.ndim != 2 or w_BDE.ndim != 3 or w_BDE.shape[:2] != (len(offsets) - 1, x_TD.shape[1]):
    raise ValueError(
      f"{op}: w_BDE must be [B, D, E] with B={len(offsets) - 1} of the offsets and D of x_TD{x_TD.shape}, got shape"
      f" {w_BDE.shape}"
    )
  return _matmul(x_TD, w_BDE, offsets)


@jax.custom_vjp
def _matmul(x_TD: jax.Array, w_BDE: jax.Array, offsets: jax.Array) -> jax.Array:
  if w_BDE.size == 0 or x_TD.size == 0:
    return jnp.zeros((len(x_TD), w_BDE.shape[2]), x_TD.dtype)
  tile = tile_size(len(x_TD), len(w_BDE))
  tiles = Tiles.of(jnp.diff(offsets), len(x_TD), tile)

  def multiply(n):
    row = tiles.row[n]
    token_R = offsets[row] + tiles.block[n] * tile + jnp.arange(tile, dtype=jnp.int32)
    token_R = jnp.where((token_R < offsets[row + 1]) & (n < tiles.number), token_R, len(x_TD))
    x_RD = x_TD.at[token_R].get(mode="fill", fill_value=0)
    return _einsum("rd,de->re", x_RD, w_BDE[row]).astype(x_TD.dtype)

  y_NRE = lax.map(multiply, jnp.arange(len(tiles.row)), batch_size=_TILES_AT_A_TIME)
  row_T, position_T = _places(offsets, len(x_TD))
  first_B = jnp.searchsorted(tiles.row, jnp.arange(len(w_BDE)), side="left")
  tile_T = jnp.append(first_B, len(tiles.row))[row_T] + position_T // tile
  return y_NRE.at[tile_T, position_T % tile].get(mode="fill", fill_value=0)


def _matmul_forward(x_TD, w_BDE, offsets):
  return _matmul(x_TD, w_BDE, offsets), (x_TD, w_BDE, offsets)


def _matmul_backward(kept, d_y_TE):
  x_TD, w_BDE, offsets = kept
  tile = tile_size(len(x_TD), len(w_BDE))
  d_w_BDE = jnp.zeros_like(w_BDE, jnp.promote_types(w_BDE.dtype, jnp.float32))

  def add(n, d_w_BDE):
    """What tile n of each row adds: rows are independent, and so their sums have an order."""

    def of_row(b):
      token_R = offsets[b] + n * tile + jnp.arange(tile, dtype=jnp.int32)
      token_R = jnp.where(token_R < offsets[b + 1], token_R, len(x_TD))
      x_RD, d_y_RE = (a.at[token_R].get(mode="fill", fill_value=0) for a in (x_TD, d_y_TE))
      return _einsum("rd,re->de", x_RD, d_y_RE)

    return d_w_BDE + lax.map(of_row, jnp.arange(len(w_BDE)), batch_size=_TILES_AT_A_TIME)

  if w_BDE.size and x_TD.size:
    d_w_BDE = lax.fori_loop(0, (jnp.max(jnp.diff(offsets)) + tile - 1) // tile, add, d_w_BDE)
  d_x_TD = _matmul(d_y_TE, w_BDE.swapaxes(1, 2), offsets)
  return d_x_TD, d_w_BDE.astype(w_BDE.dtype), np.zeros(offsets.shape, jax.dtypes.float0)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _einsum(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _checked(op: str, x_TD, offsets) -> tuple[jax.Array, jax.Array]:
  x_TD = jnp.asarray(x_TD)
  if x_TD.ndim == 0:
    raise ValueError(f"{op}: x_TD must be [T, ...], got a number")
  return x_TD, _checked_offsets(op, offsets, len(x_TD))


def _checked_offsets(op: str, offsets, num_tokens: int) -> jax.Array:
  offsets = offsets if isinstance(offsets, jax.Array | np.ndarray) else jnp.asarray(offsets)
  row_offsets.check(op, "offsets", offsets, num_tokens)
  return jnp.asarray(offsets)


def _places(offsets: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
  """Row and position of every token; row B for those in none."""
  token_T = jnp.arange(num_tokens, dtype=jnp.int32)
  row_T = jnp.searchsorted(offsets, token_T, side="right").astype(jnp.int32) - 1
  return row_T, token_T - offsets[row_T]
