"""Building blocks of the inline PTX in kernels, on the values that `plgpu.inline_mgpu` hands over.

Inline code sees one lane: its registers, its place in the warp, raw addresses. It is for what Mosaic GPU cannot say
(ballots, a lane's own slot in shared memory, a loop whose length differs between warps). Whoever uses it offers the
interpreter a stand-in beside it, and has a test of its own on the GPU.
"""

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

ALL_LANES = "0xffffffff"


def i32() -> ir.Type:
  return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
  return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
  return ir.F32Type.get()


def const(value: int) -> ir.Value:
  """An i32; values from 2^31 on are taken as unsigned."""
  return arith.constant(i32(), value if value < 1 << 31 else value - (1 << 32))


def const_f32(value: float) -> ir.Value:
  return arith.constant(f32(), value)


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


def lane_and_warp() -> tuple[ir.Value, ir.Value]:
  """Place of the lane in its warp, and of the warp in its block."""
  thread = utils.thread_idx()
  return arith.andi(thread, const(31)), arith.shrui(thread, const(5))


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


def scalar(array) -> ir.Value:
  """The register of an argument of layout WG_SPLAT."""
  return array.registers.item()


def element(pair: ir.Value, index: int) -> ir.Value:
  """One of a vector's elements."""
  return vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))
