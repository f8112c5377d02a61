"""Embedding bag on Hopper: out[b] = sum over the ids of bag b of weights[t] * table[ids[t]] / divisor_b.

A block of one warpgroup owns one bag and `block_d` columns, so no two blocks write the same element: no atomics, and
the sum runs in the order of the ids. The work is reading rows, and each read is a trip to memory; `rows_in_flight`
independent reads, times the blocks that fit on an SM, hide it.

Dimension key: V table rows, D row width, T ids, B bags.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.embedding.reference import Mode

DTYPES = (jnp.float32, jnp.bfloat16)
_LOAD_BYTES = 16  # the widest load of one lane
_MAX_ROWS = 16  # of one group; its code is unrolled
_MAX_REGISTERS = 128  # a lane has 255; more than half would leave too few blocks on an SM to hide anything


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  block_d: int  # columns of one block; wider means wider loads, but more registers
  rows_in_flight: int = 4  # more hides more latency, and wastes more slots in the last group of a bag; 4 was fastest

  def __post_init__(self):
    if self.block_d <= 0 or self.block_d % mosaic.LANES:
      raise ValueError(f"embedding.bag Config.block_d={self.block_d} must be a positive multiple of {mosaic.LANES}")
    if not 0 < self.rows_in_flight <= _MAX_ROWS:
      raise ValueError(f"embedding.bag Config.rows_in_flight={self.rows_in_flight} must be in 1..{_MAX_ROWS}")
    # The running sum, the rows on their way (counted as float32, the wider type), and per row its id, weight and place.
    needed = self.block_d // mosaic.LANES * (1 + self.rows_in_flight) + 4 * self.rows_in_flight
    if needed > _MAX_REGISTERS:
      raise ValueError(
        f"embedding.bag Config(block_d={self.block_d}, rows_in_flight={self.rows_in_flight}) needs about {needed}"
        f" registers a lane, {_MAX_REGISTERS} are allowed; make either smaller"
      )

  @classmethod
  def for_width(cls, width: int, dtype) -> "Config":
    """The widest loads that a row of this width allows."""
    widest = mosaic.LANES * _LOAD_BYTES // jnp.dtype(dtype).itemsize
    block_d = next(d for d in (1024, 512, 256, 128) if d <= widest and width % d == 0)
    return cls(block_d=block_d)


def unsupported(width: int, dtype) -> str | None:
  """Why the kernel cannot serve a table, or None if it can."""
  if dtype not in DTYPES:
    return f"a table of {jnp.dtype(dtype).name} is not float32 or bfloat16"
  if width % mosaic.LANES:
    return f"row width D={width} is no multiple of {mosaic.LANES}; pad the table's columns"
  return None


def _kernel(table_ref, ids_ref, offsets_ref, *rest, config: Config, mode: Mode):
  *weights_ref, out_ref = rest
  (num_rows, _), (num_tokens,) = table_ref.shape, ids_ref.shape
  bag, columns = lax.axis_index("bag"), pl.ds(lax.axis_index("column") * config.block_d, config.block_d)
  # Offsets that were traced are unchecked: whatever they hold, the reads stay inside the ids. (The interpreter shows a
  # read past the end, but takes a negative place for one counted from the end; the last max keeps those out.)
  first, end = jnp.maximum(offsets_ref[bag], 0), jnp.minimum(offsets_ref[bag + 1], num_tokens)
  length, group = jnp.maximum(end - first, 0), config.rows_in_flight

  vector = min(config.block_d // mosaic.LANES, _LOAD_BYTES // table_ref.dtype.itemsize)
  layout = plgpu.Layout.WG_STRIDED((config.block_d,), vec_size=vector)
  zeros = plgpu.layout_cast(jnp.zeros((config.block_d,), jnp.float32), layout)

  def add_group(g, acc, *, partial):
    tokens = [first + g * group + i for i in range(group)]
    # Slots past the end read the last token once more, which is in L1, instead of ending in a loop of single reads.
    reads = [jnp.minimum(t, end - 1) for t in tokens] if partial else tokens
    ids = [ids_ref[t] for t in reads]
    exists = [(i >= 0) & (i < num_rows) for i in ids]
    # All reads of the group are issued before the first is used. Row 0 stands in for rows that do not exist.
    rows = [
      plgpu.load(table_ref.at[jnp.where(e, i, 0), columns], layout=layout, optimized=False) for i, e in zip(ids, exists)
    ]
    weights = [ref[t] for ref in weights_ref for t in reads]
    counts = [e & (t < end) for e, t in zip(exists, tokens)] if partial else exists
    for i in range(group):
      term = rows[i].astype(jnp.float32)
      if weights:
        term = term * weights[i]
      # A select: the row or the weight of a slot that does not count may be NaN.
      acc = acc + jnp.where(jnp.broadcast_to(counts[i], term.shape), term, zeros)
    return acc

  full_groups, groups = lax.div(length, group), lax.div(length + group - 1, group)
  acc = lax.fori_loop(0, full_groups, functools.partial(add_group, partial=False), zeros)
  acc = lax.fori_loop(full_groups, groups, functools.partial(add_group, partial=True), acc)
  if mode == "mean":
    acc = acc / jnp.maximum(length, 1).astype(jnp.float32)
  out_ref[bag, columns] = acc.astype(out_ref.dtype)


def bag(
  table_VD: jax.Array,
  ids_T: jax.Array,
  offsets: jax.Array,
  weights_T: jax.Array | None,
  mode: Mode,
  *,
  config: Config | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Returns out_BD in the dtype of the table; the caller has checked shapes and dtypes of ids, offsets and weights."""
  (num_rows, width), num_bags = table_VD.shape, offsets.shape[0] - 1
  if (reason := unsupported(width, table_VD.dtype)) is not None:
    raise NotImplementedError(f"bag_hopper: {reason}")
  if 0 in (num_rows, width, ids_T.shape[0], num_bags):  # neither a grid nor a buffer may be empty
    return jnp.zeros((num_bags, width), table_VD.dtype)
  config = config or Config.for_width(width, table_VD.dtype)
  if width % config.block_d:
    raise ValueError(f"bag_hopper: row width D={width} is no multiple of Config.block_d={config.block_d}")
  operands = (table_VD, ids_T, offsets) + (() if weights_T is None else (weights_T,))
  return mosaic.kernel(
    functools.partial(_kernel, config=config, mode=mode),
    out_type=jax.ShapeDtypeStruct((num_bags, width), table_VD.dtype),
    # Bags come last, that is on the x axis of the grid: y and z end at 65535.
    grid=(width // config.block_d, num_bags),
    grid_names=("column", "bag"),
    kernel_name="embedding_bag",
    interpret=interpret,
  )(*operands)
