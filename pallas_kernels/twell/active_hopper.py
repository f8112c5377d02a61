"""Which neurons occur in a packed matrix, on Hopper. Apart from the gather, so that who does not ask does not pay.

Each block sets bits in shared memory for its share of the tiles; or-ing them is the same in any order.

Dimension key: M tokens, F neurons, S words of a tile, B blocks.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_kernels import mosaic, ptx
from pallas_kernels.twell import bits

_TILES_OF_A_BLOCK = 4096  # 32 of each lane
_FIRST_WORDS = 8  # of a tile, read at once


@functools.partial(jax.jit, static_argnames=("num_neurons", "interpret"))
def active(words_MTS: jax.Array, num_neurons: int, *, interpret: bool) -> jax.Array:
  """Returns bool[F], true for a neuron with an entry; of a tile that overflows, those that it holds."""
  num_tokens, tiles, words = words_MTS.shape
  if num_tokens * tiles == 0:
    return jnp.zeros((num_neurons,), bool)
  bitmap = -(-num_neurons // (bits.BITS * mosaic.LANES)) * mosaic.LANES  # words, one or more a lane
  blocks = -(-num_tokens * tiles // _TILES_OF_A_BLOCK)
  bits_BW = mosaic.kernel(
    functools.partial(_kernel, interpret=interpret),
    out_type=jax.ShapeDtypeStruct((blocks, bitmap), jnp.uint32),
    grid=(blocks,),
    grid_names=("block",),
    scratch_types=[plgpu.SMEM((bitmap,), jnp.uint32)],
    kernel_name="twell_active",
    interpret=interpret,
  )(words_MTS.reshape(num_tokens * tiles, words))
  bits_W = lax.reduce(bits_BW, jnp.uint32(0), lax.bitwise_or, (0,))
  return bits.expand(bits_W)[:num_neurons]


def _kernel(words_ref, out_ref, bits_smem, *, interpret: bool):
  block = lax.axis_index("block")
  bits_smem[...] = jnp.zeros(bits_smem.shape, jnp.uint32)
  plgpu.commit_smem()
  _set_bits(words_ref, bits_smem, block * _TILES_OF_A_BLOCK, interpret=interpret)
  plgpu.commit_smem()
  out_ref[block] = bits_smem[...]


def _set_bits(words_ref, bits_smem, first_tile, *, interpret: bool) -> None:
  num_tiles, words = words_ref.shape
  if interpret:
    tiles = first_tile + jnp.arange(_TILES_OF_A_BLOCK)
    rows = words_ref[...].at[tiles].get(mode="fill", fill_value=0)
    present = lax.broadcasted_iota(jnp.uint32, (_TILES_OF_A_BLOCK, words - 1), 1) < rows[:, :1]
    neurons = jnp.where(present, rows[:, 1:] & 0xFFFF, bits_smem.shape[0] * bits.BITS).astype(jnp.int32)
    fired = jnp.zeros((bits_smem.shape[0] * bits.BITS,), bool).at[neurons].set(True, mode="drop")
    bits_smem[...] |= bits.join(fired)
    return

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=None)
  def run(ctx, words_ref, bits_ref, first_tile):
    del ctx
    lane, warp = ptx.lane_and_warp()
    tile = arith.addi(ptx.scalar(first_tile), arith.addi(lane, arith.muli(warp, ptx.const(32))))
    end = arith.minui(arith.addi(ptx.scalar(first_tile), ptx.const(_TILES_OF_A_BLOCK)), ptx.const(num_tiles))
    set_bit = (
      "and.b32 n, e, 0xffff; shr.u32 a, n, 5; shl.b32 a, a, 2; add.u32 a, a, $1; and.b32 n, n, 31; shl.b32 n, one, n;"
    )
    text = (
      "{.reg .pred p; .reg .b32 t, c, j, e, n, a, one, w1, w2, w3, w4, w5, w6, w7; .reg .b64 g, h; mov.b32 t, $2;"
      "mov.b32 one, 1;"
      f"NEXT: setp.lt.u32 p, t, $3; @!p bra END; mul.wide.u32 g, t, {4 * words}; add.u64 g, g, $0;"
      "ld.global.v4.b32 {c, w1, w2, w3}, [g]; ld.global.v4.b32 {w4, w5, w6, w7}, [g+16];"
      f"min.u32 c, c, {words - 1};"
    )
    for k in range(1, _FIRST_WORDS):
      text += f"setp.ge.u32 p, c, {k}; mov.b32 e, w{k}; {set_bit} @p red.shared.or.b32 [a], n;"
    text += (
      f"mov.b32 j, {_FIRST_WORDS}; MORE: setp.le.u32 p, j, c; @!p bra DONE; mul.wide.u32 h, j, 4; add.u64 h, h, g;"
      f"ld.global.b32 e, [h]; {set_bit} red.shared.or.b32 [a], n; add.u32 j, j, 1; bra MORE;"
      f"DONE: add.u32 t, t, {mosaic.LANES}; bra NEXT; END: }}"
    )
    # The bits of stale words are not set, but their addresses are computed: an and keeps those inside 65536 neurons.
    ptx.asm((), [ptx.global_address(words_ref), ptx.shared_address(bits_ref), tile, end], text, "l,r,r,r")
    return []

  run(words_ref, bits_smem, first_tile)
