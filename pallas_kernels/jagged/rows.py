"""Rows of a tile that is held in a wgmma's layout: those that are stored, and those of an operand that are cleared.

Packed rows begin anywhere, so a tile reaches into its neighbours' tokens. Each step has a stand-in for the interpreter.

Dimension key: T tokens, H heads, K head width, Q the 64 tokens of a warpgroup, C tokens of an operand.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic, ptx

ROWS = 64  # of a warpgroup
_WGMMA = plgpu.Layout.WGMMA
_SPLAT = plgpu.Layout.WG_SPLAT
_OTHER_ROW = 8  # a lane holds two rows, so far apart
_GROUP = 8  # columns that the four lanes of a row share


def store(values_QK: jax.Array, out_ref, head, token, begin, end, *, first_column: int = 0, interpret: bool) -> None:
  """out_ref[t, head, first_column:] = values of the tokens t = token + q with begin <= t < end."""
  values_QK = values_QK.astype(out_ref.dtype)
  if interpret:
    columns = pl.ds(first_column, values_QK.shape[1])
    _store_one_by_one(values_QK, lambda t: out_ref.at[t, head, columns], token, begin, end)
    return

  @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType(), _SPLAT, _SPLAT, _SPLAT, _SPLAT), return_type=None)
  def run(ctx, values, out, head, token, begin, end):
    del ctx
    heads, width = ir.MemRefType(out.type).shape[1:]
    registers, (quad, row) = values.registers.reshape(-1, 2), ptx.quad_and_row()
    address = ptx.global_address(out)
    head, token, begin, end = map(ptx.scalar, (head, token, begin, end))
    for half in range(2):
      t = arith.addi(token, arith.addi(row, ptx.const(_OTHER_ROW * half)))
      inside = arith.cmpi(arith.CmpIPredicate.ult, arith.subi(t, begin), arith.subi(end, begin))
      own = ptx.offset(address, arith.addi(arith.muli(t, ptx.const(heads)), head), 2 * width)
      own = ptx.offset(own, quad, 2 * _GROUP)
      for first in range(0, len(registers), 4):
        words = [llvm.bitcast(ptx.i32(), register) for register in registers[first : first + 4, half]]
        words = _transposed(words, quad)
        text = f"@$5 st.global.v4.b32 [$0+{2 * (first_column + first * _GROUP)}], {{$1, $2, $3, $4}};"
        ptx.asm((), [own, *words, inside], text, "l,r,r,r,r,b")
    return []

  run(values_QK, out_ref, head, token, begin, end)


def turned_back(values_QK: jax.Array, turn_refs: tuple, token, end, *, first_column: int = 0, interpret: bool):
  """Values of the tokens t = token + q < end, their pairs of features turned back; turn_refs are those of a `Rotary`.

  Without them they stay as they are. The first of them is feature `first_column` of a head.
  """
  if not turn_refs:
    return values_QK
  if interpret:
    own = pl.ds(token, ROWS), pl.ds(first_column // 2, values_QK.shape[1] // 2)
    (cos_QP, sin_QP), (x_QP, y_QP) = (ref[own] for ref in turn_refs), (values_QK[:, 0::2], values_QK[:, 1::2])
    pairs_QP2 = jnp.stack([x_QP * cos_QP + y_QP * sin_QP, y_QP * cos_QP - x_QP * sin_QP], axis=-1)
    return pairs_QP2.reshape(values_QK.shape)

  values_type = plgpu.ShapeDtypeStruct(values_QK.shape, jnp.float32, layout=_WGMMA)

  @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType(), plgpu.RefType(), _SPLAT, _SPLAT), return_type=values_type)
  def run(ctx, values, cos, sin, token, end):
    del ctx
    pairs = ir.MemRefType(cos.type).shape[1]
    registers, (quad, row) = values.registers.reshape(-1, 2), ptx.quad_and_row()
    token, end = map(ptx.scalar, (token, end))
    turned = np.empty_like(registers)
    for half in range(2):
      t = arith.addi(token, arith.addi(row, ptx.const(_OTHER_ROW * half)))
      inside = arith.cmpi(arith.CmpIPredicate.ult, t, end)
      own = [ptx.offset(ptx.offset(ptx.global_address(ref), t, 4 * pairs), quad, 4) for ref in (cos, sin)]
      for j, pair in enumerate(registers[:, half]):
        turned[j, half] = _turned_back(pair, own, inside, 2 * (first_column + j * _GROUP))
    return mgpu.FragmentedArray(
      _registers=turned.reshape(values.registers.shape), _layout=values.layout, _is_signed=None
    )

  return run(values_QK, *turn_refs, token, end)


def _turned_back(pair: ir.Value, addresses: list[ir.Value], inside: ir.Value, offset: int) -> ir.Value:
  """Two neighbouring features of a token; unturned where it is not inside."""
  # Not pure, else the compiler asks for all angles at once, and has no registers for them.
  load = lambda address, default: ptx.asm(
    (ptx.f32(),),
    [address, inside],
    f"mov.f32 $0, {ptx.f32_bits(default)}; @$2 ld.global.nc.f32 $0, [$1+{offset}];",
    "=&f,l,b",
  )
  cos, sin = map(load, addresses, (1.0, 0.0))
  x, y = ptx.element(pair, 0), ptx.element(pair, 1)
  first = arith.addf(arith.mulf(x, cos), arith.mulf(y, sin))
  second = arith.subf(arith.mulf(y, cos), arith.mulf(x, sin))
  return vector.from_elements(ir.VectorType.get((2,), ptx.f32()), [first, second])


def store_numbers(values_Q: jax.Array, out_ref, head, token, begin, end, *, interpret: bool) -> None:
  """out_ref[head, t] = values of the tokens t = token + q with begin <= t < end; float32."""
  if interpret:
    _store_one_by_one(values_Q, lambda t: out_ref.at[head, t], token, begin, end)
    return

  layout = _WGMMA.reduce(1)

  @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), _SPLAT, _SPLAT, _SPLAT, _SPLAT), return_type=None)
  def run(ctx, values, out, head, token, begin, end):
    del ctx
    tokens = ir.MemRefType(out.type).shape[1]
    quad, row = ptx.quad_and_row()
    head, token, begin, end = map(ptx.scalar, (head, token, begin, end))
    own = ptx.offset(ptx.global_address(out), head, 4 * tokens)
    first_lane = arith.cmpi(arith.CmpIPredicate.eq, quad, ptx.const(0))
    for half, register in enumerate(values.registers.reshape(2)):
      t = arith.addi(token, arith.addi(row, ptx.const(_OTHER_ROW * half)))
      inside = arith.cmpi(arith.CmpIPredicate.ult, arith.subi(t, begin), arith.subi(end, begin))
      value = register if isinstance(register.type, ir.F32Type) else ptx.element(register, 0)
      operands = [ptx.offset(own, t, 4), value, arith.andi(inside, first_lane)]
      ptx.asm((), operands, "@$2 st.global.f32 [$0], $1;", "l,f,b")
    return []

  run(values_Q, out_ref, head, token, begin, end)


def _store_one_by_one(values_Q, place, token, begin, end) -> None:
  """The interpreter knows no masked store, and one of the whole array would race with the other warpgroup's."""

  def store_one(t, _):
    place(t)[...] = lax.dynamic_index_in_dim(values_Q, t - token, keepdims=False)

  lax.fori_loop(jnp.maximum(token, begin), jnp.minimum(token + ROWS, end), store_one, None)


def clear_others(operand_smem, wanted, token, begin, end, *, interpret: bool):
  """The operand of a wgmma, if `wanted` with zeros for the tokens outside begin <= token + c < end.

  On the GPU in place, by each warpgroup that is to read it: others that read it then take no harm, as what they make of
  such tokens is masked.
  """
  if interpret:
    t_C = token + jnp.arange(operand_smem.shape[0])
    values_CK = operand_smem[...]
    plgpu.commit_smem()
    return jnp.where((((t_C >= begin) & (t_C < end)) | ~wanted)[:, None], values_CK, 0)

  tokens, width = operand_smem.shape

  @pl.when(wanted)
  def _():
    @plgpu.inline_mgpu(
      arg_types=(plgpu.RefType(mosaic.operand_transforms(width)), _SPLAT, _SPLAT, _SPLAT), return_type=None
    )
    def run(ctx, operand, token, begin, end):
      del ctx
      _clear(ptx.shared_address(operand), *map(ptx.scalar, (token, begin, end)), tokens, width)
      return []

    run(operand_smem, token, begin, end)
    plgpu.commit_smem()

  return operand_smem


def _clear(address: ir.Value, token: ir.Value, begin: ir.Value, end: ir.Value, tokens: int, width: int) -> None:
  """A row of a swizzle tile is cleared by lanes of 16 bytes; swizzling moves pieces inside such a row alone."""
  thread = ptx.thread_of_warpgroup()
  row_bytes = mosaic.swizzle_bytes(width)
  pieces, lanes = 2 * width // row_bytes, row_bytes // 16  # tiles side by side, and lanes for a row of one

  def clear(row, carry):
    t = arith.addi(token, row)
    outside = arith.cmpi(arith.CmpIPredicate.uge, arith.subi(t, begin), arith.subi(end, begin))
    tile = arith.muli(arith.shrui(row, ptx.const(3)), ptx.const(8 * row_bytes * pieces))
    place = arith.addi(tile, arith.muli(arith.andi(row, ptx.const(7)), ptx.const(row_bytes)))
    place = arith.addi(place, arith.muli(arith.andi(thread, ptx.const(lanes - 1)), ptx.const(16)))
    for piece in range(pieces):
      at = arith.addi(arith.addi(address, place), ptx.const(8 * row_bytes * piece))
      text = "{.reg .b32 z; mov.b32 z, 0; @$1 st.shared.v4.b32 [$0], {z, z, z, z};}"
      ptx.asm((), [at, outside], text, "r,b")
    return carry

  first = arith.divui(thread, ptx.const(lanes))
  ptx.for_each(first, ptx.const(tokens), mosaic.LANES // lanes, clear, [])


def _transposed(words: list[ir.Value], quad: ir.Value) -> list[ir.Value]:
  """Word q of each of the four lanes of a row, in lane q: eight columns that follow one another."""
  text = "{.reg .pred p; .reg .b32 s, t;"
  for bit, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
    text += f"and.b32 t, $8, {bit}; setp.ne.u32 p, t, 0;"
    for a, b in pairs:
      sources = ("$4", "$5", "$6", "$7") if bit == 1 else ("$0", "$1", "$2", "$3")
      text += f"selp.b32 s, {sources[a]}, {sources[b]}, p; shfl.sync.bfly.b32 t, s, {bit}, 31, {ptx.ALL_LANES};"
      # A lane without the bit keeps its first word and receives the other's first; one with it keeps the second.
      text += f"selp.b32 ${a}, t, {sources[a]}, p; selp.b32 ${b}, {sources[b]}, t, p;"
  return list(ptx.asm((ptx.i32(),) * 4, [*words, quad], text + "}", "=&r,=&r,=&r,=&r,r,r,r,r,r"))
