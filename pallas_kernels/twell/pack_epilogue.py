"""Packing a tile of results while the tensor cores work on the next: counting and storing, each as inline PTX.

A warpgroup holds its 64 rows in the layout of a wgmma result: four lanes share a row, and lane q of them has columns
8 j + 2 q and 8 j + 2 q + 1 of every group j of 8. So a lane packs its columns in the order of j, behind those of the
lanes before it: the order that `format.py` documents. Each step has a stand-in for the interpreter.

`places` is i32[64, 8], in the layout of one group: columns 2 q and 2 q + 1 both say where lane q puts its next entry.

Dimension key: R the 64 rows, C the columns of a tile, S the words of a tile.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels import ptx
from pallas_kernels.twell import rows

ROWS = 64  # of a warpgroup
GROUP = 8  # columns that the four lanes of a row share
_LANES = 4
_WGMMA = plgpu.Layout.WGMMA
_PLACES = plgpu.ShapeDtypeStruct((ROWS, GROUP), jnp.int32, layout=_WGMMA)
_OTHER_ROW = 8  # a lane holds two rows, so far apart


def relu_and_count(values_RC: jax.Array, staging_RS, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
  """Returns (relu(values_RC), places), and writes the number of non-zeros of each row into word 0 of its tile."""
  if interpret:
    values_RC = jnp.maximum(values_RC, 0)
    counts_RQ = jnp.sum(_by_lane(values_RC) != 0, axis=2, dtype=jnp.int32)
    staging_RS[:, 0] = jnp.sum(counts_RQ, axis=1).astype(jnp.uint32)
    first_RQ = jnp.cumsum(counts_RQ, axis=1) - counts_RQ + 1  # behind word 0
    return values_RC, jnp.repeat(first_RQ, 2, axis=1)

  kind = "bf16x2" if values_RC.dtype == jnp.bfloat16 else "f16x2"
  values_type = plgpu.ShapeDtypeStruct(values_RC.shape, values_RC.dtype, layout=_WGMMA)

  @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType()), return_type=(values_type, _PLACES))
  def run(ctx, values, staging):
    del ctx
    registers = values.registers.reshape(-1, 2)
    relu, places = np.empty_like(registers), np.empty((2,), dtype=object)
    for half in range(2):
      words, place, count = _relu_and_count_row(registers[:, half], kind)
      for j, word in enumerate(words):
        relu[j, half] = llvm.bitcast(registers[j, half].type, word)
      places[half] = vector.broadcast(ir.VectorType.get((2,), ptx.i32()), place)
      _store_count(_row_address(staging, half), count)
    return _with(values, relu), _places_array(values, places)

  return run(values_RC, staging_RS)


def store(
  values_RC: jax.Array, places: jax.Array, staging_RS, first_column, groups: range, *, interpret: bool
) -> jax.Array:
  """Stores the non-zeros of some groups of 8 columns into `staging_RS`, and returns the places behind them.

  Straight-line code, so that it fits between asynchronous wgmmas. What does not fit into the tile is not stored.
  """
  if interpret:
    values_RQN = _by_lane(values_RC[:, groups.start * GROUP : groups.stop * GROUP])
    lane, n = (jax.lax.broadcasted_iota(jnp.int32, values_RQN.shape, axis) for axis in (1, 2))
    columns_RQN = first_column + (groups.start + n // 2) * GROUP + 2 * lane + n % 2
    present_RQN = values_RQN != 0
    place_RQN = places[:, ::2, None] + jnp.cumsum(present_RQN, axis=2) - present_RQN
    bits_RQN = jax.lax.bitcast_convert_type(values_RQN, jnp.uint16).astype(jnp.uint32)
    words_RQN = bits_RQN << 16 | columns_RQN.astype(jnp.uint32)
    place_RQN = jnp.where(present_RQN, place_RQN, staging_RS.shape[1])
    rows = jnp.arange(ROWS)[:, None, None]
    staging_RS[...] = staging_RS[...].at[rows, place_RQN].set(words_RQN, mode="drop")
    return places + jnp.repeat(jnp.sum(present_RQN, axis=2, dtype=jnp.int32), 2, axis=1)

  words = staging_RS.shape[1]

  @plgpu.inline_mgpu(arg_types=(_WGMMA, _WGMMA, plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=_PLACES)
  def run(ctx, values, places, staging, first_column):
    del ctx
    registers, behind = values.registers.reshape(-1, 2), np.empty((2,), dtype=object)
    quad, _ = ptx.quad_and_row()
    column = arith.addi(ptx.scalar(first_column), arith.muli(quad, ptx.const(2)))
    for half in range(2):
      place = ptx.element(places.registers.reshape(2)[half], 0)
      row = _row_address(staging, half)
      for j in groups:
        word = llvm.bitcast(ptx.i32(), registers[j, half])
        place = _store_pair(word, row, place, arith.addi(column, ptx.const(GROUP * j)), words)
      behind[half] = vector.broadcast(ir.VectorType.get((2,), ptx.i32()), place)
    return _with(places, behind)

  return run(values_RC, places, staging_RS, first_column)


def _by_lane(values_RC):
  """[R, 4, columns of a lane], each lane's columns in its order."""
  rows = values_RC.shape[0]
  grouped = values_RC.reshape(rows, -1, _LANES, 2)
  return grouped.transpose(0, 2, 1, 3).reshape(rows, _LANES, -1)


def _with(like, registers: np.ndarray):
  """An array of the same layout and type."""
  return mgpu.FragmentedArray(
    _registers=registers.reshape(like.registers.shape), _layout=like.layout, _is_signed=like.is_signed
  )


def _places_array(values, places: np.ndarray):
  shape = (1, 1, *values.registers.shape[2:])
  return mgpu.FragmentedArray(_registers=places.reshape(shape), _layout=values.layout, _is_signed=True)


def _row_address(staging: ir.Value, half: int) -> ir.Value:
  _, row = ptx.quad_and_row()
  row_bytes = 4 * ir.MemRefType(staging.type).shape[1]
  return ptx.offset(ptx.shared_address(staging), arith.addi(row, ptx.const(_OTHER_ROW * half)), row_bytes)


def _relu_and_count_row(pairs, kind: str):
  """Of a lane's part of a row: its words after ReLU, the place of its first entry, the count of the whole row."""
  words, ones = [], ptx.const(0)
  for pair in pairs:
    # max with NaN gives NaN; "not equal, or unordered" counts it.
    text = f"{{.reg .b32 t; max.NaN.{kind} $0, $2, $3; set.neu.{kind}.{kind} t, $0, $3; add.rn.{kind} $1, $4, t;}}"
    operands = [llvm.bitcast(ptx.i32(), pair), ptx.const(0), ones]
    word, ones = ptx.asm((ptx.i32(), ptx.i32()), operands, text, "=&r,=&r,r,r,r", pure=True)
    words.append(word)
  dtype = ir.VectorType(pairs[0].type).element_type
  low, high = rows.unpack(dtype)(ones)
  mine = ptx.asm((ptx.i32(),), [arith.addf(low, high)], "cvt.rni.u32.f32 $0, $1;", "=r,f", pure=True)
  quad, _ = ptx.quad_and_row()
  shuffle = lambda value, by, clamp, how: nvvm.shfl_sync(
    ptx.const(0xFFFFFFFF), value, ptx.const(by), ptx.const(clamp), how
  )
  within = 28 << 8  # the mask of a segment of four lanes
  upto = mine
  for distance in (1, 2):
    before = shuffle(upto, distance, within, nvvm.ShflKind.up)
    reaches = arith.cmpi(arith.CmpIPredicate.uge, quad, ptx.const(distance))
    upto = arith.addi(upto, arith.select(reaches, before, ptx.const(0)))
  count = shuffle(upto, 3, within | 31, nvvm.ShflKind.idx)
  return words, arith.addi(arith.subi(upto, mine), ptx.const(1)), count


def _store_count(row: ir.Value, count: ir.Value) -> None:
  quad, _ = ptx.quad_and_row()
  ptx.asm((), [row, count, quad], "{.reg .pred p; setp.eq.u32 p, $2, 0; @p st.shared.b32 [$0], $1;}", "r,r,r")


def _store_pair(word: ir.Value, row: ir.Value, place: ir.Value, column: ir.Value, words: int) -> ir.Value:
  """Stores the non-zero halves of a word of two neighbouring columns; returns the place behind them.

  Most words are zero in the whole warp, or their tiles full, and the warp skips the rest: 3 % of the kernel's time at
  0.5 % non-zeros. Behind the end of a tile `place` means nothing.
  """
  half = (
    f"setp.ne.b32 p, e, 0; or.b32 e, e, f; setp.lt.and.u32 q, $0, {words}, p; shl.b32 a, $0, 2; add.s32 a, a, $2;"
    "@q st.shared.b32 [a], e; @p add.s32 $0, $0, 1;"
  )
  text = (
    "{.reg .pred p, q; .reg .b32 e, f, a; mov.b32 $0, $4;"
    f"setp.ne.b32 p, $1, 0; setp.lt.and.u32 p, $4, {words}, p; vote.sync.any.pred q, p, {ptx.ALL_LANES}; @!q bra SKIP;"
    f"mov.b32 f, $3; shl.b32 e, $1, 16; {half} and.b32 e, $1, 0xffff0000; add.s32 f, f, 1; {half} SKIP: }}"
  )
  return ptx.asm((ptx.i32(),), [word, row, column, place], text, "=&r,r,r,r,r")
