"""Which tiles there are, what each of them has to read, and in which order they are computed.

Made on the device, from offsets alone, so that one schedule serves all layers of a model and the backward pass. Tiles
that read most come first; `nth` deals them out to SMs in a zigzag, which evens out their sums.

TMA copies start at a multiple of 8 tokens, so a row's first tile begins up to 7 tokens before the row.

Dimension key: B rows, N tiles.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.jagged.geometry import Mask, Tiles

ALIGNMENT = 8
FIELDS = 32  # of an entry: a copy of it is 128 bytes, the least that TMA moves


class Field(enum.IntEnum):
  """Of an entry; tokens count from the first one of an array, steps are tiles of the other side."""

  TOKEN = 0  # the tile's first token
  BEGIN = 1  # of the row
  END = 2
  OUT = 3  # where the tile's first token has its result
  OTHER_TOKEN = 4  # the first step's first token
  OTHER_BEGIN = 5  # of the row on the other side
  OTHER_END = 6
  STEPS = 7
  PLAIN_FROM = 8  # steps in which every pair is visible
  PLAIN_TO = 9
  HISTORY = 10


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
  """Entries in the order in which they are computed."""

  tiles_NF: jax.Array  # i32[N, FIELDS]
  number: jax.Array  # i32[1], of entries that count


def over_queries(
  q_offsets, k_offsets, history_B, mask: Mask, *, num_queries: int, tile: int, step: int, broadcast_q: bool
) -> Schedule:
  """For results that belong to queries: o, and the gradient of q.

  Args:
    q_offsets: of the rows' results.
    k_offsets: of the keys.
    history_B: for masks with targets.
    mask: which pairs are visible.
    num_queries: T, a bound on q_offsets[-1].
    tile: queries of a tile.
    step: keys of a step.
    broadcast_q: the queries of every row are the same ones.
  """
  begin_B, end_B = q_offsets[:-1], q_offsets[1:]
  aligned_B = begin_B if broadcast_q else begin_B // ALIGNMENT * ALIGNMENT
  lengths_B = jnp.where(end_B > begin_B, end_B - aligned_B, 0)
  tiles = Tiles.of(lengths_B, num_queries + (ALIGNMENT - 1) * len(begin_B), tile)
  of_row = lambda values_B: jnp.append(values_B, 0)[tiles.row]
  begin, end, k_begin, k_end = map(of_row, (begin_B, end_B, k_offsets[:-1], k_offsets[1:]))
  out = of_row(aligned_B) + tiles.block * tile
  first = jnp.maximum(out, begin) - begin
  last = jnp.maximum(jnp.minimum(out + tile, end) - 1 - begin, first)
  history = None if history_B is None else of_row(history_B)
  length = k_end - k_begin
  reach_begin, reach_end = mask.keys_of(first, last, length)
  common_begin, common_end = mask.common_keys_of(first, last, length, history)
  k_first = (k_begin + reach_begin) // ALIGNMENT * ALIGNMENT
  # At least one, all of it masked where there is nothing to see: so that every item has its turn in the kernels.
  steps = jnp.maximum((k_begin + reach_end - k_first + step - 1) // step, 1)
  plain_from = jnp.clip((k_begin + common_begin - k_first + step - 1) // step, 0, steps)
  plain_to = jnp.clip((k_begin + common_end - k_first) // step, plain_from, steps)
  fields = {
    Field.TOKEN: out - begin if broadcast_q else out,
    Field.BEGIN: begin,
    Field.END: end,
    Field.OUT: out,
    Field.OTHER_TOKEN: k_first,
    Field.OTHER_BEGIN: k_begin,
    Field.OTHER_END: k_end,
    Field.STEPS: steps,
    Field.PLAIN_FROM: plain_from,
    Field.PLAIN_TO: plain_to,
    Field.HISTORY: jnp.zeros_like(out) if history is None else history,
  }
  return _longest_first(fields, steps, tiles.number)


def _longest_first(fields: dict[Field, jax.Array], steps: jax.Array, number: jax.Array) -> Schedule:
  counts = jnp.arange(len(steps)) < number
  order = jnp.argsort(jnp.where(counts, -steps, 1), stable=True)
  tiles_NF = jnp.stack([fields[field] for field in Field], axis=1).astype(jnp.int32)[order]
  return Schedule(jnp.pad(tiles_NF, ((0, 0), (0, FIELDS - len(Field)))), number.reshape(1))


def nth(n, sm, num_sms: int):
  """Place in the schedule of the n-th item of an SM; also inside kernels."""
  return n * num_sms + jnp.where(lax.rem(n, 2) == 0, sm, num_sms - 1 - sm)


def items_of(sm, total, num_sms: int):
  """How many of `total` items an SM has; also inside kernels."""
  rounds = lax.div(total, num_sms)
  return rounds + (nth(rounds, sm, num_sms) < total).astype(jnp.int32)
