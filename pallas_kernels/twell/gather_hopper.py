"""The sparse half of a feed-forward block on Hopper: y = sum over a token's entries of h Wd[n] (TwELL, algorithm 2).

h = value * (x . Wu[n]) for the gated block, the value itself for the other. A warp has a token (several share one that
is wider than 2048), and goes through its entries twice: first all dots, then all sums. So it holds either x or y in
registers, never both, and has several rows on their way. Sums run in float32, in the order of the entries.

The work is reading rows, 2 D bytes each, out of L2: at 8.3 to 9 TB/s nothing else matters.

Dimension key: M tokens, D model width, F neurons, S words of a tile.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.twell import gather_blocks as blocks
from pallas_kernels.twell import kept_blocks, rows
from pallas_kernels.twell.format import ROW_CAPACITY
from pallas_kernels.twell.kept import Lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  dots_unroll: int = 1  # rows on their way in the first pass, beside x
  sums_unroll: int = 1  # and in the second, beside y

  def __post_init__(self):
    for name in ("dots_unroll", "sums_unroll"):
      if not 1 <= getattr(self, name) <= 4:
        raise ValueError(f"twell gather Config.{name}={getattr(self, name)} must be in 1..4: rows lie in registers")


@functools.partial(jax.jit, static_argnames=("room", "config", "interpret"))
def gather(
  x_MD: jax.Array,
  words_MTS: jax.Array,
  w_up_FD: jax.Array | None,
  w_down_FD: jax.Array,
  start_MD: jax.Array | None = None,
  first_M: jax.Array | None = None,
  *,
  room: int = 0,
  config: Config | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, Lists | None]:
  """Returns (y_MD, l1 f32[M], counts i32[M], lists); the caller has checked shapes and dtypes.

  Args:
    x_MD: tokens; the non-gated block takes their number and dtype alone.
    words_MTS: the packed gate.
    w_up_FD: None for the non-gated block.
    w_down_FD: row n belongs to neuron n.
    start_MD: added to y, None: nothing.
    first_M: i32[M], where a token's entries are to be kept, -1: nowhere; None: no lists are wanted.
    room: E of the lists.
    config: None: the fastest.
    interpret: run in Mosaic's interpreter.

  Returns:
    y_MD, sum |h| and the number of entries of each token. A count of -1 says that a token is a misfit (it overflows a
    tile or ROW_CAPACITY, or is not finite): its y and l1 mean nothing. Of the lists, what no token has written means
    nothing either.
  """
  config = config or Config()
  (num_tokens, width), (_, tiles, words) = x_MD.shape, words_MTS.shape
  team, dtype = rows.Team.for_width(width), x_MD.dtype
  gated, started, listed = w_up_FD is not None, start_MD is not None, first_M is not None
  kinds = [jnp.uint32, *[jnp.float32] * gated] if listed else []
  if num_tokens == 0:
    return jnp.zeros_like(x_MD), jnp.zeros((0,), jnp.float32), jnp.zeros((0,), jnp.int32), None
  capacity = min(tiles * (words - 1), ROW_CAPACITY)

  def body(*refs):
    x_ref, words_ref, w_down_ref, *rest = refs
    w_up_ref = rest.pop(0) if gated else None
    start_ref = rest.pop(0) if started else None
    first_ref = rest.pop(0) if listed else None
    y_ref, l1_ref, counts_ref, *rest = rest
    list_refs, (entries_smem, heads_smem, *dots_smem) = rest[: len(kinds)], rest[len(kinds) :]
    dots_smem = dots_smem[0] if dots_smem else None
    first = lax.axis_index("team") * team.tokens
    blocks.list_entries(words_ref, first, entries_smem, heads_smem, team, words=words, interpret=interpret)
    if gated:
      blocks.multiply_rows(
        x_ref,
        w_up_ref,
        first,
        entries_smem,
        heads_smem,
        dots_smem,
        team,
        unroll=config.dots_unroll,
        interpret=interpret,
      )
    if listed:
      entries_ref, up_ref = list_refs if gated else (*list_refs, None)
      kept_blocks.store_lists(
        first_ref, entries_ref, up_ref, first, entries_smem, dots_smem, heads_smem, team, interpret=interpret
      )
    blocks.add_rows(
      w_down_ref,
      start_ref,
      first,
      entries_smem,
      heads_smem,
      dots_smem,
      y_ref,
      l1_ref,
      counts_ref,
      team,
      unroll=config.sums_unroll,
      interpret=interpret,
    )

  scratch = [plgpu.SMEM((rows.WARPS, capacity), jnp.uint32), plgpu.SMEM((rows.WARPS, blocks.HEAD_WORDS), jnp.int32)]
  operands = [x_MD, words_MTS.reshape(num_tokens, tiles * words), w_down_FD]
  y_MD, l1_M, counts_MP, *lists = mosaic.kernel(
    body,
    out_type=(
      jax.ShapeDtypeStruct((num_tokens, width), dtype),
      jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
      jax.ShapeDtypeStruct((num_tokens, team.warps), jnp.int32),
      *(jax.ShapeDtypeStruct((room,), kind) for kind in kinds),
    ),
    grid=(-(-num_tokens // team.tokens),),
    grid_names=("team",),
    scratch_types=scratch + [plgpu.SMEM((rows.WARPS, capacity), jnp.float32)] * gated,
    kernel_name="twell_gather",
    interpret=interpret,
  )(*operands, *[w_up_FD] * gated, *[start_MD] * started, *[first_M] * listed)
  return y_MD, l1_M, jnp.min(counts_MP, axis=1), Lists(lists[0], lists[1] if gated else None) if listed else None
