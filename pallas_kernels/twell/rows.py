"""Rows of 16-bit matrices as a warp reads them: which columns a lane has, its loads, products and sums in float32.

A `Team` of one, two or four warps shares a row; each takes a slice of the columns, narrow enough for its registers.
"""

import dataclasses
from collections.abc import Callable

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import ptx

WARPS = 4  # of a warpgroup
MAX_WIDTH = 2048  # columns of a warp: 64 float32 a lane
_LANES = 32
_LOAD_BYTES = 16  # of a lane, the widest
_LOAD_COLUMNS = _LANES * _LOAD_BYTES // 2  # of a warp


@dataclasses.dataclass(frozen=True)
class Team:
  """The warps that share a token, and the columns of each."""

  width: int  # D
  warps: int  # of a token

  @classmethod
  def for_width(cls, width: int) -> "Team":
    """As few warps as have registers for a row."""
    return cls(width, next(n for n in (1, 2, 4) if n * MAX_WIDTH >= width))

  @property
  def tokens(self) -> int:
    """Tokens of a warpgroup."""
    return WARPS // self.warps

  @property
  def slice(self) -> int:
    """Columns of a warp; those of a token's last warp may be fewer."""
    return -(-self.width // (128 * self.warps)) * 128

  @property
  def loads(self) -> int:
    """16-byte loads of a lane for its part of a row."""
    return -(-self.slice // _LOAD_COLUMNS)

  def reaches_past(self, load: int) -> bool:
    """Whether some lane has nothing to load there."""
    shortest = min(self.slice, self.width - (self.warps - 1) * self.slice)
    return (load + 1) * _LOAD_COLUMNS > shortest


class Row:
  """A lane's part of a row: 8 neighbouring columns a load, a load every 256 columns, from its warp's slice."""

  def __init__(self, lane, warp, team: Team, dtype: ir.Type):
    self._team, self._is_bf16, self.loads = team, isinstance(dtype, ir.BF16Type), team.loads
    self.unpack = unpack(dtype)
    part = arith.andi(warp, ptx.const(team.warps - 1))
    first = arith.muli(part, ptx.const(team.slice))
    self._column = arith.addi(first, arith.muli(lane, ptx.const(_LOAD_BYTES // 2)))
    end = arith.minui(arith.addi(first, ptx.const(team.slice)), ptx.const(team.width))
    self._guards = {}
    for load in range(team.loads):
      if team.reaches_past(load):
        column = arith.addi(self._column, ptx.const(load * _LOAD_COLUMNS))
        self._guards[load] = arith.cmpi(arith.CmpIPredicate.ult, column, end)

  def base(self, array: ir.Value) -> ir.Value:
    """Address of the lane's part of row 0."""
    return ptx.offset(array, self._column, 2)

  def start(self, array: ir.Value, index: ir.Value) -> ir.Value:
    """Address of the lane's part of a row."""
    return ptx.offset(self.base(array), index, 2 * self._team.width)

  def load(self, address: ir.Value, instruction: str, *policy: ir.Value, loads: range | None = None) -> list[ir.Value]:
    """The lane's words, two columns each; zeros where it has no columns. `loads`: only some."""
    words = []
    for load in loads or range(self.loads):
      at, operands, constraints = f"[$4+{load * 2 * _LOAD_COLUMNS}]", [address, *policy], "l" + ",l" * len(policy)
      hint = ", $5" if policy else ""
      read = f"{instruction} {{$0, $1, $2, $3}}, {at}{hint};"
      outputs = "=r,=r,=r,=r"
      if load in self._guards:
        operands.append(self._guards[load])
        constraints += ",b"
        read = f"mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; @${3 + len(operands)} {read}"
        outputs = "=&r,=&r,=&r,=&r"
      words += ptx.asm((ptx.i32(),) * 4, operands, read, f"{outputs},{constraints}")
    return words

  def load_weights(self, base: ir.Value, neuron: ir.Value, keep: ir.Value) -> list[ir.Value]:
    """The lane's words of a weight's row. Rows are what L2 is for; all else streams past it."""
    address = ptx.offset(base, neuron, 2 * self._team.width)
    return self.load(address, "ld.global.nc.L2::cache_hint.v4.b32", keep)

  def store(self, address: ir.Value, values: list[ir.Value], exists: ir.Value) -> None:
    """Rounds and writes the lane's columns."""
    kind = "bf16x2" if self._is_bf16 else "f16x2"
    words = [
      ptx.asm((ptx.i32(),), [high, low], f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f", pure=True)
      for low, high in zip(values[::2], values[1::2])
    ]
    for load in range(self.loads):
      guard = arith.andi(exists, self._guards[load]) if load in self._guards else exists
      text = f"@$5 st.global.cs.v4.b32 [$0+{load * 2 * _LOAD_COLUMNS}], {{$1, $2, $3, $4}};"
      ptx.asm((), [address, *words[4 * load : 4 * load + 4], guard], text, "l,r,r,r,r,b")

  def store_f32(self, array: ir.Value, index: ir.Value, values: list[ir.Value]) -> None:
    """Writes the lane's columns of a row as they are."""
    address = ptx.offset(ptx.offset(array, self._column, 4), index, 4 * self._team.width)
    for load in range(self.loads):
      guard = [self._guards[load]] if load in self._guards else []
      for half in range(2):
        first = 8 * load + 4 * half
        at = f"[$0+{4 * (load * _LOAD_COLUMNS + 4 * half)}]"
        text = f"{'@$5 ' if guard else ''}st.global.cs.v4.f32 {at}, {{$1, $2, $3, $4}};"
        ptx.asm((), [address, *values[first : first + 4], *guard], text, "l,f,f,f,f" + ",b" * len(guard))

  def value(self, entry: ir.Value) -> ir.Value:
    """The value of an entry, its upper half."""
    return self.unpack(entry)[1]


def dots_of_rows(
  a: ir.Value, b: ir.Value, pairs: list[tuple[ir.Value, ir.Value]], lane: ir.Value, width: int, dtype: ir.Type
) -> list[ir.Value]:
  """Of each pair (row of a, row of b) the dot product, by one warp; arrays are [*, width]. All pairs are read first."""
  row, at_once = Row(lane, ptx.const(0), Team(width, 1), dtype), MAX_WIDTH // _LOAD_COLUMNS
  starts = [(row.start(a, a_row), row.start(b, b_row)) for a_row, b_row in pairs]
  parts: list[list[ir.Value]] = [[] for _ in pairs]
  for first in range(0, row.loads, at_once):
    loads = range(first, min(first + at_once, row.loads))
    read = [[row.load(address, "ld.global.nc.v4.b32", loads=loads) for address in start] for start in starts]
    for part, (a_words, b_words) in zip(parts, read):
      part.append(dot(row, b_words, [value for word in a_words for value in row.unpack(word)]))
  return [warp_sum(total(part)) for part in parts]


def unpack(dtype: ir.Type):
  """Returns a function from a word to its two columns, as float32."""
  text = (
    "{.reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b;}"
    if isinstance(dtype, ir.BF16Type)
    else "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}"
  )
  return lambda word: ptx.asm((ptx.f32(),) * 2, [word], text, "=f,=f,r", pure=True)


def dot(row: Row, words: list[ir.Value], x: list[ir.Value]) -> ir.Value:
  """Of a lane's columns; four chains, so that additions do not wait for one another."""
  sums = [ptx.const_f32(0.0)] * 4
  for n, word in enumerate(words):
    for half, value in enumerate(row.unpack(word)):
      k = (2 * n + half) % 4
      sums[k] = fma(value, x[2 * n + half], sums[k])
  return total([arith.addf(sums[0], sums[1]), arith.addf(sums[2], sums[3])])


def warp_sum(value: ir.Value) -> ir.Value:
  """Over the lanes of a warp; every lane gets it."""
  for distance in (16, 8, 4, 2, 1):
    value = arith.addf(value, utils.shfl_bfly(value, distance))
  return value


def fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
  """a * b + c in float32."""
  return ptx.asm((ptx.f32(),), [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", pure=True)


def total(values: list[ir.Value]) -> ir.Value:
  """In the order given."""
  result, *rest = values
  for value in rest:
    result = arith.addf(result, value)
  return result


def loop(count: ir.Value, unroll: int, step: Callable, carry: list[ir.Value]) -> list[ir.Value]:
  """carry = step(place, n, carry) for n places at a time: `unroll` of them, then the rest one by one."""
  if unroll == 1:
    return ptx.for_each(ptx.const(0), count, 1, lambda place, carry: step(place, 1, carry), carry)
  full = arith.muli(arith.divui(count, ptx.const(unroll)), ptx.const(unroll))
  carry = ptx.for_each(ptx.const(0), full, unroll, lambda place, carry: step(place, unroll, carry), carry)
  return ptx.for_each(full, count, 1, lambda place, carry: step(place, 1, carry), carry)
