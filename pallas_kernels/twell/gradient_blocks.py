"""What a warp does for the gradients of a packed matrix, as inline PTX: rows for a token, and tokens for a row.

Each block has a stand-in for the interpreter. See `gather_blocks.py` for lists of entries and products with rows.

Dimension key: W the four warps, M tokens, D model width, F neurons, E entries of all tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import ptx
from pallas_kernels.twell import gather_blocks as blocks
from pallas_kernels.twell import kept_blocks
from pallas_kernels.twell.rows import WARPS, Row, Team, fma, loop, unpack

_LANES = 32
_UNROLL = 4  # tokens on their way for a neuron


class Entries(NamedTuple):
  """Of all tokens, one after another: where an entry is, and what it multiplies tokens by in weight gradients."""

  neuron: jax.Array  # i32[E]
  token: jax.Array  # i32[E]
  of_gate: jax.Array | None  # f32[E], times x: of the gate's gradient; None without a gate
  of_up: jax.Array  # f32[E], times x
  of_down: jax.Array  # f32[E], times d_y


class Scratch(NamedTuple):
  """Of each warp, in shared memory: [W, E], and heads."""

  entries: jax.Array  # u32
  heads: jax.Array  # i32[W, HEAD_WORDS]
  up: jax.Array | None  # f32, x . Wu[n]; None without a gate
  down: jax.Array  # f32, this warp's part of d_y . Wd[n]
  factor: jax.Array  # f32, what an entry multiplies Wu[n] by


def find_factors(
  first_ref, takes_part_ref, d_l1_ref, first_token, lists: Scratch, out: Entries, dtype, num_neurons: int, team: Team,
  *, interpret: bool,
) -> None:  # fmt: skip
  """What each entry multiplies tokens by, to `out` from first[token] on; and what it multiplies weights by.

  With g the value of an entry, u and v its products with x and d_y: t = v + d_l1 sign(h), h = g u, d_up = t g,
  d_gate = t u; without a gate h = g and d_up = t. Afterwards `lists.factor` holds d_up, and `lists.up` d_gate.

  An entry of a token that does not take part has the neuron F, so that no weight's gradient reads it.
  """
  num_tokens, gated = first_ref.shape[0], lists.up is not None
  if interpret:
    for warp in range(WARPS):
      token, part = first_token + warp // team.warps, warp % team.warps
      own, entries = jnp.minimum(token, num_tokens - 1), lists.entries[warp]
      value = jax.lax.bitcast_convert_type((entries >> 16).astype(jnp.uint16), dtype).astype(jnp.float32)
      up = jnp.ones_like(value) if lists.up is None else lists.up[warp]
      d_h = sum(lists.down[warp - part + n] for n in range(team.warps)) + d_l1_ref[0] * jnp.sign(value * up)
      of_gate, of_up = d_h * up, d_h * value if gated else d_h
      lists.factor[warp] = of_up
      if lists.up is not None:
        lists.up[warp] = of_gate
      if part == 0:
        neuron = jnp.where(takes_part_ref[own] != 0, (entries & 0xFFFF).astype(jnp.int32), num_neurons)
        found = Entries(neuron, jnp.full_like(neuron, token), of_gate if gated else None, of_up, value * up)
        count = jnp.where(token < num_tokens, lists.heads[warp, blocks.ENTRIES], 0)
        kept_blocks.write_list(first_ref[own], count, [(ref, a) for ref, a in zip(out, found) if ref is not None])
    return

  kept_lists, outs = [ref for ref in lists if ref is not None], [ref for ref in out if ref is not None]
  refs = [first_ref, takes_part_ref, d_l1_ref, *kept_lists, *outs]

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * len(refs)), return_type=None)
  def run(ctx, first_token, first_ref, takes_part_ref, d_l1_ref, *rest):
    del ctx
    own, outs = rest[: len(kept_lists)], rest[len(kept_lists) :]
    entries, heads, up, down, factor = own if gated else (*own[:2], None, *own[2:])
    lane, warp, token = blocks.place_of_warp(first_token, team)
    begin, _ = kept_blocks.begin_of(first_ref, token, num_tokens)
    word = lambda ref, place, kind: ptx.load_word(kept_blocks.global_word(ref, place), kind)
    takes_part = word(takes_part_ref, blocks.clamped(token, num_tokens), ptx.i32())
    takes_part = arith.cmpi(arith.CmpIPredicate.ne, takes_part, ptx.const(0))
    writes = arith.cmpi(arith.CmpIPredicate.eq, warp, blocks.first_warp_of(warp, team))
    d_l1, value_of = word(d_l1_ref, ptx.const(0), ptx.f32()), unpack(_mlir_type(dtype))
    of_warp = lambda ref, at: kept_blocks.shared_word(ref, warp, at)

    def step(at, _):
      entry = ptx.load_word(of_warp(entries, at), ptx.i32())
      value = value_of(entry)[1]
      u = ptx.load_word(of_warp(up, at), ptx.f32()) if gated else None
      h = arith.mulf(value, u) if gated else value
      d_h = fma(d_l1, _sign(h), blocks.sum_over_team(down, warp, at, team))
      of_up = arith.mulf(d_h, value) if gated else d_h
      ptx.store_word(of_warp(factor, at), of_up)
      of_gate = [arith.mulf(d_h, u)] if gated else []
      for one in of_gate:
        ptx.store_word(of_warp(up, at), one)
      neuron = arith.select(takes_part, blocks.neuron_of(entry), ptx.const(num_neurons))
      place = arith.addi(begin, at)
      for ref, one in zip(outs, [neuron, token, *of_gate, of_up, h], strict=True):
        kind = "f" if one.type == ptx.f32() else "r"
        address = kept_blocks.global_word(ref, place)
        ptx.asm((), [address, one, writes], "@$2 st.global.b32 [$0], $1;", f"l,{kind},b")
      return []

    ptx.for_each(lane, blocks.load_head(blocks.row_of(heads, warp), blocks.ENTRIES), _LANES, step, [])
    ptx.asm((), [], f"bar.warp.sync {ptx.ALL_LANES};", "")
    return []

  run(first_token, *refs)


def add_factored_rows(
  w_gate_ref, w_up_ref, first_token, lists: Scratch, d_x_ref, team: Team, *, interpret: bool
) -> None:
  """d_x[token] = sum over entries of d_up Wu[n] + d_gate Wg[n], as `find_factors` left them."""
  num_tokens, width = d_x_ref.shape
  gated, dtype = w_gate_ref is not None, d_x_ref.dtype
  if interpret:
    for warp in range(WARPS):
      token, part = first_token + warp // team.warps, warp % team.warps
      columns = slice(part * team.slice, min((part + 1) * team.slice, width))
      present = jnp.arange(lists.entries.shape[1]) < lists.heads[warp, blocks.ENTRIES]
      neuron = jnp.where(present, lists.entries[warp] & 0xFFFF, 0).astype(jnp.int32)
      d_x = jnp.zeros((columns.stop - columns.start,), jnp.float32)
      for factors, ref in ((lists.factor, w_up_ref), (lists.up, w_gate_ref)):
        if factors is not None:
          rows_ED = jnp.where(present[:, None], ref[...].astype(jnp.float32)[:, columns][neuron], 0)
          d_x += jnp.where(present, factors[warp], 0) @ rows_ED

      @pl.when(token < num_tokens)
      def _(token=token, columns=columns, d_x=d_x):
        d_x_ref[token, columns] = d_x.astype(dtype)

    return

  refs = [d_x_ref, lists.entries, lists.heads, w_up_ref, lists.factor, *[w_gate_ref, lists.up] * gated]

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * len(refs)), return_type=None)
  def run(ctx, first_token, d_x_ref, entries, heads, *pairs):
    del ctx
    lane, warp, token = blocks.place_of_warp(first_token, team)
    row, keep = Row(lane, warp, team, ir.MemRefType(d_x_ref.type).element_type), blocks.keep_policy()
    exists = arith.cmpi(arith.CmpIPredicate.ult, token, ptx.const(num_tokens))
    bases = [row.base(ptx.global_address(ref)) for ref in pairs[::2]]

    def step(at, count, acc):
      assert count == 1
      neuron = blocks.neuron_of(ptx.load_word(kept_blocks.shared_word(entries, warp, at), ptx.i32()))
      read = [row.load_weights(base, neuron, keep) for base in bases]
      for ref, words in zip(pairs[1::2], read):
        factor = ptx.load_word(kept_blocks.shared_word(ref, warp, at), ptx.f32())
        columns = [column for word in words for column in row.unpack(word)]
        acc = [fma(column, factor, a) for column, a in zip(columns, acc)]
      return acc

    count = blocks.load_head(blocks.row_of(heads, warp), blocks.ENTRIES)
    acc = loop(count, 1, step, [ptx.const_f32(0.0)] * (8 * team.loads))
    row.store(row.start(ptx.global_address(d_x_ref), blocks.clamped(token, num_tokens)), acc, exists)
    return []

  run(first_token, *refs)


def _sign(value: ir.Value) -> ir.Value:
  """-1, 0 or 1; NaN of NaN."""
  text = "{.reg .pred p, q; setp.gt.f32 p, $1, 0f00000000; setp.lt.f32 q, $1, 0f00000000;"
  text += "mov.f32 $0, $1; @p mov.f32 $0, 0f3F800000; @q mov.f32 $0, 0fBF800000;}"
  return ptx.asm((ptx.f32(),), [value], text, "=&f,f", pure=True)


def _mlir_type(dtype) -> ir.Type:
  return ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()


def sum_tokens(
  x_ref, d_y_ref, entries: Entries, begin, count, target, out_refs: tuple, team: Team, *, interpret: bool
) -> None:
  """Row `target` of each out = sum over entries begin .. begin + count of its factor times x[token] or d_y[token].

  Outs are float32, in the order of the factors; the sum is in the order of the entries.
  """
  width = x_ref.shape[1]
  factors = [ref for ref in (entries.of_gate, entries.of_up, entries.of_down) if ref is not None]
  if interpret:

    def add(e, sums):
      token = entries.token[begin + e]
      x_D, d_y_D = (ref[token].astype(jnp.float32) for ref in (x_ref, d_y_ref))
      rows = [x_D] * (len(factors) - 1) + [d_y_D]
      return [s + factor[begin + e] * r for s, factor, r in zip(sums, factors, rows)]

    sums = jax.lax.fori_loop(0, count, add, [jnp.zeros((width,), jnp.float32)] * len(factors))
    for out_ref, s in zip(out_refs, sums):
      out_ref[target] = s
    return

  refs = [x_ref, d_y_ref, entries.token, *factors, *out_refs]
  splat = plgpu.Layout.WG_SPLAT

  @plgpu.inline_mgpu(arg_types=(splat, splat, splat, *[plgpu.RefType()] * len(refs)), return_type=None)
  def run(ctx, begin, count, target, x_ref, d_y_ref, token_ref, *rest):
    del ctx
    factor_refs, out_refs = rest[: len(factors)], rest[len(factors) :]
    begin, count, target = map(ptx.scalar, (begin, count, target))
    lane, warp = ptx.lane_and_warp()
    row = Row(lane, warp, team, ir.MemRefType(x_ref.type).element_type)
    bases = [row.base(ptx.global_address(ref)) for ref in (x_ref, d_y_ref)]
    tokens, *factor_arrays = (ptx.global_address(ref) for ref in (token_ref, *factor_refs))

    def step(at, number, acc):
      places = [arith.addi(begin, arith.addi(at, ptx.const(n))) for n in range(number)]
      own = [ptx.load_word(ptx.offset(tokens, place, 4), ptx.i32()) for place in places]
      read = [[row.load(ptx.offset(base, token, 2 * width), "ld.global.nc.v4.b32") for base in bases] for token in own]
      size = 8 * team.loads
      for place, (x_words, d_y_words) in zip(places, read):
        x, d_y = ([column for word in words for column in row.unpack(word)] for words in (x_words, d_y_words))
        for which, array in enumerate(factor_arrays):
          factor = ptx.load_word(ptx.offset(array, place, 4), ptx.f32())
          columns, own_acc = (d_y if which == len(factors) - 1 else x), slice(which * size, (which + 1) * size)
          acc = [
            *acc[: own_acc.start],
            *(fma(column, factor, a) for column, a in zip(columns, acc[own_acc])),
            *acc[own_acc.stop :],
          ]
      return acc

    size = 8 * team.loads
    acc = loop(count, _UNROLL, step, [ptx.const_f32(0.0)] * (size * len(factors)))
    for which, ref in enumerate(out_refs):
      row.store_f32(ptx.global_address(ref), target, acc[which * size : (which + 1) * size])
    return []

  run(begin, count, target, *refs)
