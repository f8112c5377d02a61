"""relu(x @ w.T), packed, on Hopper: a dense matrix product whose results leave the SM as TwELL (TwELL, appendix A.1).

Persistent clusters of two blocks take tiles of 256 rows x 256 columns, 128 rows a block, 64 a warpgroup; both blocks
share the tile of w. A third warpgroup loads. A tile's results become 16-bit values in registers at once; counting and
storing them happens between the asynchronous wgmmas of the next tile, so the tensor cores do not wait for it.

Tiles go column by column through a group of row blocks: what the SMs work on at a time is nearly square, so that little
of x and w is wanted from L2, and x is read from memory once.

Dimension key: M tokens, D model width, F neurons, S words of a tile.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, mosaic
from pallas_kernels.twell import pack_epilogue as epilogue
from pallas_kernels.twell.format import Spec

TILE = 256  # columns: one wgmma, one tile of the format
_ROWS = 2 * epilogue.ROWS  # of a block
_PAIR = 2 * _ROWS  # rows of a cluster
_K = 64  # of a step: 128 bytes, the widest swizzle
_SWIZZLED_ROWS = 8
_MAX_SPREAD = 16  # steps over which a tile is stored; 8, 16 and 32 are within 1 %
_SMS_OF_A_TEST = 4  # the interpreter has no device to ask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  words: int  # of a tile of the result
  stages: int  # steps of operands on their way
  group: int = 8  # pairs of row blocks that go through the columns together

  def __post_init__(self):
    if self.stages < 2:
      raise ValueError(f"twell.pack Config.stages={self.stages} must be at least 2: one arrives while one is used")
    if self.group < 1:
      raise ValueError(f"twell.pack Config.group={self.group} must be positive")
    mosaic.check_smem(f"twell.pack {self}", self.smem_bytes)

  @property
  def smem_bytes(self) -> int:
    """Operands of all stages, the tile on its way out, barriers."""
    return self.stages * (_ROWS + TILE) * _K * 2 + _ROWS * self.words * 4 + 2 * 8 * self.stages

  @classmethod
  def for_spec(cls, spec: Spec) -> "Config":
    """As many stages as fit."""
    for stages in (4, 3, 2):
      try:
        return cls(words=spec.words, stages=stages)
      except ValueError:
        continue
    raise ValueError(f"twell.pack: a tile of {spec} does not fit into shared memory beside two stages")


@functools.partial(jax.jit, static_argnames=("spec", "first", "config", "num_sms", "interpret"))
def pack(
  x_MD: jax.Array,
  w_FD: jax.Array,
  spec: Spec,
  *,
  first: int = 0,
  config: Config | None = None,
  num_sms: int | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Returns words uint32[M, tiles, S] of the neurons from `first` on; the caller has checked shapes and dtypes.

  Rows past the end of an operand arrive as zeros, so that they give no entries.

  Args:
    x_MD: tokens.
    w_FD: row n belongs to neuron n.
    spec: of the result.
    first: a neuron.
    config: None: the fastest.
    num_sms: one block runs on each; None: those of the device, which must then be there.
    interpret: run in Mosaic's interpreter.
  """
  num_rows, num_neurons = x_MD.shape[0], w_FD.shape[0]
  tiles = spec.tiles(num_neurons - first)
  if num_rows == 0 or tiles == 0:
    return jnp.zeros((num_rows, tiles, spec.words), jnp.uint32)
  # A copy takes whole swizzle tiles of 8 rows, and may not be larger than the array; the interpreter has none that
  # reaches past its end.
  rows = _PAIR if num_rows < _PAIR or interpret else _SWIZZLED_ROWS
  x_MD = jnp.pad(x_MD, ((0, -num_rows % rows), (0, 0)))
  if num_neurons < TILE or interpret:
    w_FD = jnp.pad(w_FD, ((0, first + tiles * TILE - num_neurons), (0, 0)))
  config = config or Config.for_spec(spec)
  blocks = -(-x_MD.shape[0] // _PAIR)
  if num_sms is None:
    num_sms = _SMS_OF_A_TEST if interpret else device.num_sms()
  clusters = min(num_sms // 2, blocks * tiles)
  transforms = mosaic.operand_transforms()
  words_MS = mosaic.kernel(
    functools.partial(
      _kernel,
      config=config,
      first=first,
      num_neurons=num_neurons,
      tiles=tiles,
      blocks=blocks,
      clusters=clusters,
      interpret=interpret,
    ),
    out_type=jax.ShapeDtypeStruct((x_MD.shape[0], tiles * spec.words), jnp.uint32),
    grid=(clusters,),
    grid_names=("cluster",),
    cluster=(2,),
    cluster_names=("block",),
    num_threads=3,
    thread_name="wg",
    scratch_types=[
      plgpu.SMEM((config.stages, _ROWS, _K), x_MD.dtype, transforms=transforms),
      plgpu.SMEM((config.stages, TILE, _K), x_MD.dtype, transforms=transforms),
      plgpu.SMEM((2, epilogue.ROWS, spec.words), jnp.uint32),
      plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
      plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=2, num_barriers=config.stages),
    ],
    kernel_name="twell_pack",
    interpret=interpret,
  )(x_MD, w_FD)
  return words_MS[:num_rows].reshape(num_rows, tiles, spec.words)


def _kernel(
  x_ref,
  w_ref,
  out_ref,
  x_smem,
  w_smem,
  staging_smem,
  full,
  empty,
  *,
  config,
  first,
  num_neurons,
  tiles,
  blocks,
  clusters,
  interpret,
):
  wg, cluster, block = lax.axis_index("wg"), lax.axis_index("cluster"), lax.axis_index("block")
  steps, stages = x_ref.shape[1] // _K, config.stages
  mine = lax.div(tiles * blocks - cluster + clusters - 1, clusters)  # tiles of this cluster, at least one

  def place(n):
    """(first row, tile) of this block's n-th tile."""
    linear = n * clusters + cluster
    group = lax.div(linear, config.group * tiles)
    first_block = group * config.group
    rows, within = jnp.minimum(blocks - first_block, config.group), linear - first_block * tiles
    return ((first_block + lax.rem(within, rows)) * 2 + block) * _ROWS, lax.div(within, rows)

  def load():
    plgpu.set_max_registers(24, action="decrease")

    def step(s, _):
      row, tile = place(lax.div(s, steps))
      slot, columns = lax.rem(s, stages), pl.ds(lax.rem(s, steps) * _K, _K)
      pl.when(s >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
      plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, _ROWS), columns], x_smem.at[slot], full.at[slot])
      neurons = pl.ds(first + tile * TILE, TILE)
      plgpu.copy_gmem_to_smem(w_ref.at[neurons, columns], w_smem.at[slot], full.at[slot], collective_axes="block")

    lax.fori_loop(0, mine * steps, step, None)
    # The other block still signals into this one: leave only after its last release of every slot.
    used = jnp.minimum(mine * steps, stages)
    wait = lambda n, _: plgpu.barrier_wait(empty.at[lax.rem(mine * steps - used + n, stages)])
    lax.fori_loop(0, used, wait, None)

  def compute():
    plgpu.set_max_registers(240, action="increase")
    rows, staging = pl.ds(wg * epilogue.ROWS, epilogue.ROWS), staging_smem.at[wg]
    spread = min(_MAX_SPREAD, steps // 2)
    groups = [range(n * 32 // spread, (n + 1) * 32 // spread) for n in range(spread)]

    def send(n):
      row, tile = place(n)
      plgpu.commit_smem()
      target = out_ref.at[pl.ds(row + wg * epilogue.ROWS, epilogue.ROWS), pl.ds(tile * config.words, config.words)]
      plgpu.copy_smem_to_gmem(staging, target)

    def column(n):
      return first + place(n)[1] * TILE

    def count(values):
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left the staging buffer
      return epilogue.relu_and_count(values, staging, interpret=interpret)

    def tile(n, values):
      """Multiplies tile n; counts, stores and sends tile n - 1 meanwhile."""

      def multiply(acc, k):
        slot = lax.rem(n * steps + k, stages)
        plgpu.barrier_wait(full.at[slot])
        plgpu.wgmma(acc, x_smem.at[slot, rows], w_smem.at[slot].transpose((1, 0)))

      def release(k):
        plgpu.barrier_arrive(empty.at[lax.rem(n * steps + k, stages)])

      def scope(acc):
        multiply(acc, 0)
        packed, places = count(values)
        for k in range(spread):
          if k > 0:
            multiply(acc, k)
          places = epilogue.store(packed, places, staging, column(n - 1), groups[k], interpret=interpret)
          plgpu.wgmma_wait(1)  # step k - 1 is done
          if k > 0:
            release(k - 1)
        pl.when(n > 0)(lambda: send(n - 1))

        def step(k, _):
          multiply(acc, k)
          plgpu.wgmma_wait(1)
          release(k - 1)

        lax.fori_loop(spread, steps, step, None)
        result = acc[...].astype(x_ref.dtype)
        release(steps - 1)
        if (num_neurons - first) % TILE:
          # A token that is not finite has NaN also for the zeros behind the last neuron.
          columns = plgpu.broadcasted_iota(jnp.int32, result.shape, 1, layout=plgpu.Layout.WGMMA)
          result = jnp.where(columns < num_neurons - column(n), result, jnp.zeros((), result.dtype))
        return result

      return pl.run_scoped(scope, plgpu.ACC((epilogue.ROWS, TILE), jnp.float32))

    nothing = plgpu.layout_cast(jnp.zeros((epilogue.ROWS, TILE), x_ref.dtype), plgpu.Layout.WGMMA)
    values = lax.fori_loop(0, mine, tile, nothing)
    packed, places = count(values)
    epilogue.store(packed, places, staging, column(mine - 1), range(TILE // epilogue.GROUP), interpret=interpret)
    send(mine - 1)
    plgpu.wait_smem_to_gmem(0)

  lax.cond(wg < 2, compute, load)
