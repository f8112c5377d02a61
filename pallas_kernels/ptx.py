"""Building blocks of the inline PTX in kernels, on the values that `plgpu.inline_mgpu` hands over.

Inline code sees one lane: its registers, its place in the warp, raw addresses. It is for what Mosaic GPU cannot say
(ballots, a lane's own slot in shared memory, a loop whose length differs between warps). Whoever uses it offers the
interpreter a stand-in beside it, and has a test of its own on the GPU.
"""

from collections.abc import Callable

import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

ALL_LANES = "0xffffffff"
# Inclusive sum of `s` over the lanes of a warp; needs registers `t` and `p`.
SCAN = "".join(f"shfl.sync.up.b32 t|p, s, {by}, 0, {ALL_LANES}; @p add.s32 s, s, t;" for by in (1, 2, 4, 8, 16))


def i32() -> ir.Type:
  """32-bit integers."""
  return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
  """64-bit integers, and addresses in global memory."""
  return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
  """float32."""
  return ir.F32Type.get()


def const(value: int) -> ir.Value:
  """An i32; values from 2^31 on are taken as unsigned."""
  return arith.constant(i32(), value if value < 1 << 31 else value - (1 << 32))  # type: ignore  # stubs lack this form


def const_f32(value: float) -> ir.Value:
  """A float32."""
  return arith.constant(f32(), value)  # type: ignore  # stubs lack this form


def f32_bits(value: float) -> str:
  """A float32 in the text of PTX."""
  return f"0f{int(np.float32(value).view(np.uint32)):08X}"


def asm(results: tuple[ir.Type, ...], operands: list[ir.Value], text: str, constraints: str, *, pure: bool = False):
  """One block of PTX; `$n` names results, then operands. Returns a value, a tuple of values, or None.

  Registers and labels declared inside its braces are its own, so a block may branch within itself. A pure block has no
  effect but its results, so the compiler may move it.
  """
  kind = None if not results else results[0]
  if len(results) > 1:
    kind = ir.Type.parse(f"!llvm.struct<({','.join(map(str, results))})>")
  value = llvm.inline_asm(kind, operands, text, constraints, has_side_effects=not pure, asm_dialect=0)
  if len(results) > 1:
    return tuple(llvm.extractvalue(t, value, [n]) for n, t in enumerate(results))
  return value


def list_bits(count: str, address: str, *, label: int) -> str:
  """PTX that lists the set bits of every lane's word `b`, which is the i-th of an array: 32 i + n for its bit n.

  The entries have 16 bits and start at address + 2 * count; `count` grows by their number. Uses a, c, e, i, s, t and p.
  """
  return (
    f"popc.b32 c, b; mov.b32 s, c; {SCAN} sub.s32 a, s, c; add.s32 a, a, {count}; shl.b32 a, a, 1;"
    f"add.s32 a, a, {address}; shl.b32 i, i, 5;"
    f"MORE{label}: setp.ne.b32 p, b, 0; @!p bra DONE{label}; brev.b32 t, b; clz.b32 t, t; add.u32 e, i, t;"
    "{.reg .b16 h; cvt.u16.u32 h, e; st.shared.b16 [a], h;} add.s32 a, a, 2;"
    f"sub.u32 t, b, 1; and.b32 b, b, t; bra MORE{label};"
    f"DONE{label}: bar.warp.sync {ALL_LANES}; shfl.sync.idx.b32 t, s, 31, 31, {ALL_LANES}; add.u32 {count}, {count}, t;"
  )


def lane_and_warp() -> tuple[ir.Value, ir.Value]:
  """Place of the lane in its warp, and of the warp in its block."""
  thread = utils.thread_idx()
  return arith.andi(thread, const(31)), arith.shrui(thread, const(5))


def thread_of_warpgroup() -> ir.Value:
  """Place of the lane among the 128 of its warpgroup."""
  lane, warp = lane_and_warp()
  return arith.addi(arith.muli(arith.andi(warp, const(3)), const(32)), lane)


def quad_and_row() -> tuple[ir.Value, ir.Value]:
  """In the layout of a wgmma's result: place among the four lanes of a row, and the first of two rows, 8 apart."""
  lane, warp = lane_and_warp()
  row = arith.addi(arith.muli(arith.andi(warp, const(3)), const(16)), arith.shrui(lane, const(2)))
  return arith.andi(lane, const(3)), row


def shared_address(ref: ir.Value) -> ir.Value:
  """Where an SMEM ref lies, i32."""
  return llvm.ptrtoint(i32(), utils.memref_ptr(ref))


def global_address(ref: ir.Value) -> ir.Value:
  """Where a GMEM ref lies, i64."""
  return llvm.ptrtoint(i64(), utils.memref_ptr(ref))


def offset(address: ir.Value, index: ir.Value, stride: int) -> ir.Value:
  """address + index * stride; in 64 bits if the address has them, so that arrays beyond 2 GiB work."""
  if address.type == i64():
    return asm((i64(),), [index, address], f"mad.wide.u32 $0, $1, {stride}, $2;", "=l,r,l", pure=True)
  return arith.addi(address, arith.muli(index, const(stride)))


def load_word(address: ir.Value, kind: ir.Type) -> ir.Value:
  """32 bits, from global memory that nothing writes meanwhile or from shared memory, as the address has it."""
  space, of_address = ("global.nc", "l") if address.type == i64() else ("shared", "r")
  return asm((kind,), [address], f"ld.{space}.b32 $0, [$1];", f"={_constraint(kind)},{of_address}")


def store_word(address: ir.Value, value: ir.Value) -> None:
  """32 bits, to global or to shared memory, as the address has it."""
  space, of_address = ("global", "l") if address.type == i64() else ("shared", "r")
  asm((), [address, value], f"st.{space}.b32 [$0], $1;", f"{of_address},{_constraint(value.type)}")


def _constraint(kind: ir.Type) -> str:
  return "f" if kind == f32() else "r"


def for_each(first: ir.Value, last: ir.Value, stride: int, step: Callable, carry: list[ir.Value]) -> list[ir.Value]:
  """carry = step(n, carry) for n = first, first + stride, ... below last, all i32; returns the last carry."""
  index = ir.IndexType.get()
  bounds = (arith.index_cast(index, first), arith.index_cast(index, last), arith.constant(index, stride))  # type: ignore  # as above
  loop = scf.ForOp(*bounds, carry)  # type: ignore  # stubs lack this form
  with ir.InsertionPoint(loop.body):
    scf.yield_(step(arith.index_cast(i32(), loop.induction_variable), list(loop.inner_iter_args)))
  return list(loop.results)


def scalar(array) -> ir.Value:
  """The register of an argument of layout WG_SPLAT."""
  return array.registers.item()


def element(pair: ir.Value, index: int) -> ir.Value:
  """One of a vector's elements."""
  return vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))
