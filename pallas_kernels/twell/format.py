"""The TwELL format: non-zeros of a matrix, packed to the left inside tiles of its columns (TwELL, section 3.2).

`words` is uint32[M, F / tile, tile / compression]. Word 0 of a tile is the true number of its non-zeros, also when they
do not all fit. Every other word is one non-zero: its value in the upper 16 bits, its column in the whole matrix in the
lower 16 (so F ends at 65536). With tile 256, compression 8 and bfloat16 this is the authors' layout, byte for byte.

Words behind the last non-zero hold anything. A tile with more non-zeros than words overflows; the words then hold the
first of them, and the row cannot be restored.

Order inside a tile: by (column mod 8) // 2, then by column. It is the order in which the four lanes that share a row of
a tensor core's result meet it.

Dimension key: M rows (tokens), F columns (hidden neurons).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

MAX_COLUMNS = 1 << 16  # a column is 16 bits of a word
ROW_CAPACITY = 256  # non-zeros of a row that the sparse route takes; a longer row costs less on the tensor cores
_GROUP = 8  # columns that four lanes share, two each
_BFLOAT16 = np.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """How wide tiles are, how many words each has, and what a value is."""

  tile: int = 256  # columns
  compression: int = 8  # columns a word; more means smaller arrays and earlier overflow
  value_dtype: np.dtype = _BFLOAT16

  def __post_init__(self):
    if not all(type(size) is int for size in (self.tile, self.compression)):
      raise TypeError(f"twell.Spec: tile={self.tile!r} and compression={self.compression!r} must be integers")
    object.__setattr__(self, "value_dtype", np.dtype(self.value_dtype))
    if self.value_dtype not in (jnp.bfloat16, jnp.float16):
      raise ValueError(f"twell.Spec: value_dtype={self.value_dtype.name} must be bfloat16 or float16")
    if self.tile <= 0 or self.tile % _GROUP:
      raise ValueError(f"twell.Spec: tile={self.tile} must be a positive multiple of {_GROUP}")
    if self.compression <= 0 or self.tile % self.compression or self.words < 2:
      raise ValueError(
        f"twell.Spec: compression={self.compression} must divide tile={self.tile} into two words or more,"
        " a count and an entry"
      )

  @property
  def words(self) -> int:
    """Words of a tile."""
    return self.tile // self.compression

  @property
  def capacity(self) -> int:
    """Non-zeros that a tile can hold."""
    return self.words - 1

  def tiles(self, columns: int) -> int:
    """Tiles of a row; the last may reach past the columns.

    Raises:
      ValueError: there are more columns than 16 bits can name.
    """
    if columns > MAX_COLUMNS:
      raise ValueError(
        f"twell: F={columns} columns, but a word has 16 bits for a column, {MAX_COLUMNS} at most; use route='dense'"
      )
    return -(-columns // self.tile)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Twell:
  """A packed matrix [M, columns]."""

  words: jax.Array  # uint32[M, tiles, spec.words]
  spec: Spec = dataclasses.field(metadata={"static": True})
  columns: int = dataclasses.field(metadata={"static": True})

  @property
  def counts(self) -> jax.Array:
    """i32[M, tiles], the true number of non-zeros of each tile."""
    return self.words[:, :, 0].astype(jnp.int32)

  @property
  def overflows(self) -> jax.Array:
    """bool[M], rows that do not fit."""
    return jnp.any(self.words[:, :, 0] > self.spec.capacity, axis=1)  # unsigned: damaged counts are not negative


def from_dense(h_MF: jax.Array, *, spec: Spec | None = None) -> Twell:
  """Packs the non-zeros of a matrix, NaN among them, whatever their sign.

  Args:
    h_MF: floating; values are rounded to spec.value_dtype, and what rounds to zero is none.
    spec: None: the default, with the dtype of h_MF if that has 16 bits.

  Raises:
    ValueError: h_MF is no matrix of floating values, or too wide.
  """
  if h_MF.ndim != 2 or not jnp.issubdtype(h_MF.dtype, jnp.floating):
    raise ValueError(f"twell.from_dense: h_MF must be floating [M, F], got {h_MF.dtype}{h_MF.shape}")
  spec = spec or spec_for(h_MF.dtype)
  (num_rows, columns), tiles = h_MF.shape, spec.tiles(h_MF.shape[1])
  padded = jnp.pad(h_MF.astype(spec.value_dtype), ((0, 0), (0, tiles * spec.tile - columns)))
  order = _order(spec.tile)
  values = padded.reshape(num_rows, tiles, spec.tile)[:, :, order]
  columns_of = (np.arange(tiles)[:, None] * spec.tile + order).astype(np.uint32)[None]
  bits = jax.lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.uint32)
  present = bits & 0x7FFF != 0  # by bits: comparing values would take a subnormal for zero on some devices
  place = jnp.cumsum(present, axis=2)  # 1 for the first: word 0 is the count
  fits = present & (place <= spec.capacity)
  rows, tile_of = jnp.arange(num_rows)[:, None, None], jnp.arange(tiles)[None, :, None]
  words = jnp.zeros((num_rows, tiles, spec.words), jnp.uint32)
  words = words.at[rows, tile_of, jnp.where(fits, place, spec.words)].set(bits << 16 | columns_of, mode="drop")
  return Twell(words.at[:, :, 0].set(jnp.sum(present, axis=2, dtype=jnp.uint32)), spec, columns)


def to_dense(packed: Twell) -> jax.Array:
  """Returns h_MF in the dtype of the values. Rows that overflow are NaN where they are not known yet (under jit).

  Raises:
    ValueError: the array does not fit its spec; or, where its values are known, a tile overflows or a word names a
      column of another tile.
  """
  check(packed)
  spec, (num_rows, tiles, _) = packed.spec, packed.words.shape
  entries = packed.words[:, :, 1:]
  present = jnp.arange(spec.capacity)[None, None] < packed.counts[:, :, None]
  columns = jnp.where(present, entries & 0xFFFF, tiles * spec.tile).astype(jnp.int32)
  values = jax.lax.bitcast_convert_type((entries >> 16).astype(jnp.uint16), spec.value_dtype)
  h_MF = jnp.zeros((num_rows, packed.columns), spec.value_dtype)
  h_MF = h_MF.at[jnp.arange(num_rows)[:, None, None], columns].set(values, mode="drop")
  return jnp.where(packed.overflows[:, None], jnp.array(jnp.nan, spec.value_dtype), h_MF)


def check(packed: Twell) -> None:
  """Raises ValueError for an array that is no TwELL; its values are looked at where they are known."""
  spec, words = packed.spec, packed.words
  tail = (spec.tiles(packed.columns), spec.words)
  if words.dtype != jnp.uint32 or words.ndim != 3 or words.shape[1:] != tail:
    raise ValueError(
      f"twell: words of {packed.columns} columns under {spec} must be uint32[M, {tail[0]}, {tail[1]}],"
      f" got {words.dtype}{words.shape}"
    )
  if isinstance(words, jax.core.Tracer):
    return
  values = np.asarray(words)
  if (over := np.argwhere(values[:, :, 0] > spec.capacity)).size:
    row, tile = over[0]
    raise ValueError(
      f"twell: row {row} has {values[row, tile, 0]} non-zeros in tile {tile}, which holds {spec.capacity}; such a row"
      " cannot be restored: use a Spec with a smaller compression"
    )
  present = np.arange(spec.capacity) < values[:, :, :1]
  columns = values[:, :, 1:] & 0xFFFF
  elsewhere = (columns // spec.tile != np.arange(tail[0])[:, None]) | (columns >= packed.columns)
  if (wrong := np.argwhere(present & elsewhere)).size:
    row, tile, entry = wrong[0]
    raise ValueError(
      f"twell: entry {entry} of row {row}, tile {tile} names column {columns[row, tile, entry]}, which lies in no or"
      f" another tile of {packed.columns} columns; the words are damaged or of another Spec"
    )


def spec_for(dtype) -> Spec:
  """The default Spec for arrays of a dtype: its own where it has 16 bits, else bfloat16."""
  return Spec(value_dtype=jnp.float16 if dtype == jnp.float16 else jnp.bfloat16)


def _order(tile: int) -> np.ndarray:
  """Columns of a tile in the order of their words."""
  column = np.arange(tile)
  return np.lexsort((column, column % _GROUP // 2))
