"""Tiles of rows, and which pairs of query and key see each other: one home, for the reference and for all kernels.

Positions count from the start of a row. `Mask.visible` decides a pair; `keys_of` and `queries_of` bound what a run of
queries or keys can see, so that tiles outside are skipped. All three take numbers or arrays, in kernels too.

Dimension key: i position of a query, j position of a key, B rows, N tiles.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_SMALLEST_TILE, _LARGEST_TILE = 16, 128  # of plain jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
  """Conditions that all have to hold; without any, a query sees every key of its row."""

  causal: bool = False  # j <= i
  window: int | None = None  # |i - j| <= window
  block: int | None = None  # i // block == j // block
  targets: bool = False  # keys from `history` on are seen by the query at their own position alone

  def visible(self, i, j, history=None):
    """Whether query i sees key j, both inside the row; None if every query sees every key."""
    conditions = []
    if self.causal:
      conditions.append(j <= i)
    if self.window is not None:
      conditions.append(i - j <= self.window)
      if not self.causal:
        conditions.append(j - i <= self.window)
    if self.block is not None:
      conditions.append(lax.div(i, jnp.int32(self.block)) == lax.div(j, jnp.int32(self.block)))
    if self.targets:
      conditions.append((j < history) | (i == j))
    if not conditions:
      return None
    first, *others = conditions
    for condition in others:
      first = first & condition
    return first

  def keys_of(self, first, last, length):
    """(begin, end) of a range that holds every key seen by the queries first..last of a row with `length` keys."""
    begin, end = self._reach(first, last)
    if self.causal:
      end = last + 1
    return begin, jnp.minimum(end, length) if end is not None else length

  def queries_of(self, first, last, length):
    """(begin, end) of a range that holds every query that sees one of the keys first..last, in a row of `length`."""
    begin, end = self._reach(first, last)
    if self.causal:
      begin = first
    return begin, jnp.minimum(end, length) if end is not None else length

  def common_keys_of(self, first, last, length, history=None):
    """(begin, end) of the keys that every one of the queries first..last sees; end <= begin if there are none."""
    begin, end = self._common_reach(first, last, length)
    if self.causal:
      end = jnp.minimum(end, first + 1)
    if self.targets:
      end = jnp.minimum(end, history)
    return begin, end

  def common_queries_of(self, first, last, length, history=None):
    """(begin, end) of the queries that see every one of the keys first..last; end <= begin if there are none."""
    begin, end = self._common_reach(first, last, length)
    if self.causal:
      begin = jnp.maximum(begin, last)
    if self.targets:
      end = jnp.where(last < history, end, begin)
    return begin, end

  def _common_reach(self, first, last, length):
    """What window and block let all of first..last see."""
    begin, end = jnp.zeros_like(first), length
    if self.window is not None:
      begin = jnp.maximum(last - self.window, 0)
      end = jnp.minimum(end, first + self.window + 1)
    if self.block is not None:
      block = first // self.block
      begin = jnp.maximum(begin, block * self.block)
      end = jnp.where(block == last // self.block, jnp.minimum(end, (block + 1) * self.block), begin)
    return begin, end

  def _reach(self, first, last):
    """By window and block, which hold for a pair in either direction; end is None if nothing bounds it."""
    begin, end = jnp.zeros_like(first), None
    if self.window is not None:
      begin, end = jnp.maximum(first - self.window, 0), last + self.window + 1
    if self.block is not None:
      begin = jnp.maximum(begin, first // self.block * self.block)
      block_end = (last // self.block + 1) * self.block
      end = block_end if end is None else jnp.minimum(end, block_end)
    return begin, end


def tile_size(num_tokens: int, num_rows: int) -> int:
  """Near the mean length of a row: a row takes at least a tile."""
  mean = num_tokens / max(num_rows, 1)
  size = _SMALLEST_TILE
  while size < min(mean, _LARGEST_TILE):
    size *= 2
  return size


class Tiles(NamedTuple):
  """Every row cut into tiles of its own from its start on, row by row; an empty row has none."""

  row: jax.Array  # i32[N], N a bound that no offsets can exceed
  block: jax.Array  # i32[N], the how manyth tile of its row
  number: jax.Array  # i32[], of tiles there are; the entries behind them mean nothing

  @classmethod
  def of(cls, lengths_B: jax.Array, total: int, size: int) -> "Tiles":
    """The tiles of `size` tokens of rows with these lengths, `total` tokens at most."""
    tiles_B = (lengths_B + size - 1) // size
    upto_B = jnp.cumsum(tiles_B)
    most = max(total // size + tiles_B.shape[0], 1)
    tile = jnp.arange(most, dtype=jnp.int32)
    # Unrolled: each turn of a loop costs the host a launch or two.
    row = jnp.searchsorted(upto_B, tile, side="right", method="scan_unrolled").astype(jnp.int32)
    last = max(tiles_B.shape[0] - 1, 0)
    row = jnp.minimum(row, last)
    before = jnp.append(upto_B - tiles_B, 0)[row]
    return cls(row, (tile - before).astype(jnp.int32), jnp.sum(tiles_B, dtype=jnp.int32))
