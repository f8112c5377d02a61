"""Which tiles there are, what each of them has to read, and in which order they are computed.

Made on the device, from offsets alone, so that one schedule serves all layers of a model and the backward pass. Tiles
that read most come first; `nth` deals them out to SMs in a zigzag, which evens out their sums.

Copies into tiles start at a multiple of 8 tokens, so a row's first tile begins up to 7 tokens before the row. Blocks of
block attention begin where they are, and all take the same time.

Dimension key: B rows, N tiles.
"""

import dataclasses
import enum
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.jagged.geometry import Mask, Tiles

TILE = 128  # tokens of an item, half of them for either multiplying warpgroup
FORWARD_STEP, BACKWARD_STEP = 128, 64  # tokens of a step
BLOCK = 64  # of block attention that has kernels of its own
ALIGNMENT = 8
FIELDS = 32  # of an entry: a copy of it is 128 bytes, the least that TMA moves


class Field(enum.IntEnum):
  """Of an entry; tokens count from the first one of an array, steps are tiles of the other side."""

  TOKEN = 0  # the tile's first token
  BEGIN = 1  # of the row
  END = 2
  OTHER_TOKEN = 3  # the first step's first token
  OTHER_BEGIN = 4  # of the row on the other side
  OTHER_END = 5
  STEPS = 6
  PLAIN_FROM = 7  # steps in which every pair is visible
  PLAIN_TO = 8
  HISTORY = 9


class TileList(NamedTuple):
  """Entries in the order in which they are computed."""

  tiles_NF: jax.Array  # i32[N, FIELDS]
  counts: jax.Array  # i32[2]: entries that count, and tokens that belong to rows


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("forward", "query_gradient", "key_gradients", "blocks"),
  meta_fields=("mask", "num_queries", "num_keys"),
)
@dataclasses.dataclass(frozen=True)
class Schedule:
  """What `make_schedule` makes: for one set of offsets and one mask, whatever the heads."""

  forward: TileList
  query_gradient: TileList
  key_gradients: TileList
  blocks: TileList | None  # of rows that see nothing but their blocks of 64
  mask: Mask
  num_queries: int
  num_keys: int

  def imbalance(self, heads: int, num_sms: int) -> jax.Array:
    """f32[], predicted: steps of the SM that has most of them in the forward pass, over the mean; 1 is even."""
    tiles_NF, (number, _) = self.forward if self.blocks is None else self.blocks
    steps_N = tiles_NF[:, Field.STEPS]
    place = jnp.arange(len(steps_N) * heads)
    turn, sm = place // num_sms, place % num_sms
    steps = jnp.where(place < number * heads, steps_N[place // heads], 0)
    steps_of_sm = jax.ops.segment_sum(steps, jnp.where(turn % 2 == 0, sm, num_sms - 1 - sm), num_sms)
    total = jnp.sum(steps)
    return jnp.where(total == 0, 1.0, jnp.max(steps_of_sm) * num_sms / jnp.maximum(total, 1))


def make(
  q_offsets, k_offsets, history_B, mask: Mask, num_queries: int, num_keys: int, *, same_tokens: bool
) -> Schedule:
  """All lists; queries and keys may be the same tokens.

  Under jit nobody has checked the offsets: whatever they are, tiles stay inside the arrays.
  """
  q_offsets, k_offsets = (
    lax.cummax(jnp.clip(offsets, 0, tokens)) for offsets, tokens in ((q_offsets, num_queries), (k_offsets, num_keys))
  )
  over_queries = functools.partial(
    _tile_list, q_offsets, k_offsets, history_B, mask.keys_of, mask.common_keys_of, num_queries
  )
  over_keys = functools.partial(
    _tile_list, k_offsets, q_offsets, history_B, mask.queries_of, mask.common_queries_of, num_keys
  )
  backward = over_queries(BACKWARD_STEP), over_keys(BACKWARD_STEP)
  has_blocks = same_tokens and mask == Mask(block=BLOCK)
  blocks = _block_list(q_offsets, num_queries) if has_blocks else None
  return Schedule(over_queries(FORWARD_STEP), *backward, blocks, mask, num_queries, num_keys)


def _block_list(offsets, num_tokens: int) -> TileList:
  """Blocks in the order of their tokens: all take the same time, and neighbours in memory are read together."""
  tiles = Tiles.of(jnp.diff(offsets), num_tokens, BLOCK)
  of_row = lambda values_B: jnp.append(values_B, 0)[tiles.row]
  token = of_row(offsets[:-1]) + tiles.block * BLOCK
  fields = {Field.TOKEN: token, Field.END: of_row(offsets[1:]), Field.STEPS: jnp.ones_like(token)}
  return TileList(_entries(fields), jnp.stack([tiles.number, offsets[-1]]))


def _entries(fields: dict[Field, jax.Array]) -> jax.Array:
  """i32[N, FIELDS]; 0 where nothing is given."""
  zeros = jnp.zeros_like(fields[Field.TOKEN])
  tiles_NF = jnp.stack([fields.get(field, zeros) for field in Field], axis=1).astype(jnp.int32)
  return jnp.pad(tiles_NF, ((0, 0), (0, FIELDS - len(Field))))


def _tile_list(offsets, other_offsets, history_B, reach, common, num_tokens: int, step: int) -> TileList:
  """Tiles of the rows of `offsets`, with steps of `step` tokens through what they see on the other side."""
  begin_B, end_B = offsets[:-1], offsets[1:]
  aligned_B = begin_B // ALIGNMENT * ALIGNMENT
  lengths_B = jnp.where(end_B > begin_B, end_B - aligned_B, 0)
  tiles = Tiles.of(lengths_B, num_tokens + (ALIGNMENT - 1) * len(begin_B), TILE)
  of_row = lambda values_B: jnp.append(values_B, 0)[tiles.row]
  begin, end, other_begin, other_end = map(of_row, (begin_B, end_B, other_offsets[:-1], other_offsets[1:]))
  token = of_row(aligned_B) + tiles.block * TILE
  first = jnp.maximum(token, begin) - begin
  last = jnp.maximum(jnp.minimum(token + TILE, end) - 1 - begin, first)
  history = None if history_B is None else of_row(history_B)
  other_length = other_end - other_begin
  reach_begin, reach_end = reach(first, last, other_length)
  reach_begin = jnp.minimum(reach_begin, other_length)  # a window or a block may lie behind a shorter row
  common_begin, common_end = common(first, last, other_length, history)
  other_token = (other_begin + reach_begin) // ALIGNMENT * ALIGNMENT
  # At least one, all of it masked where there is nothing to see: so that every item has its turn in the kernels.
  steps = jnp.maximum((other_begin + reach_end - other_token + step - 1) // step, 1)
  plain_from = jnp.clip((other_begin + common_begin - other_token + step - 1) // step, 0, steps)
  plain_to = jnp.clip((other_begin + common_end - other_token) // step, plain_from, steps)
  fields = {
    Field.TOKEN: token,
    Field.BEGIN: begin,
    Field.END: end,
    Field.OTHER_TOKEN: other_token,
    Field.OTHER_BEGIN: other_begin,
    Field.OTHER_END: other_end,
    Field.STEPS: steps,
    Field.PLAIN_FROM: plain_from,
    Field.PLAIN_TO: plain_to,
  }
  if history is not None:
    fields[Field.HISTORY] = history
  counts = jnp.arange(len(steps)) < tiles.number
  order = jnp.argsort(jnp.where(counts, -steps, 1), stable=True)
  return TileList(_entries(fields)[order], jnp.stack([tiles.number, offsets[-1]]))


def nth(n, sm, num_sms: int):
  """Place in the schedule of the n-th item of an SM; also inside kernels."""
  return n * num_sms + jnp.where(lax.rem(n, 2) == 0, sm, num_sms - 1 - sm)


def items_of(sm, total, num_sms: int):
  """How many of `total` items an SM has; also inside kernels."""
  rounds = lax.div(total, num_sms)
  return rounds + (nth(rounds, sm, num_sms) < total).astype(jnp.int32)
