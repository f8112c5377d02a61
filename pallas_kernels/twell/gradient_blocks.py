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
from pallas_kernels.twell.rows import WARPS, Row, Team, fma, loop, total

_UNROLL = 4  # tokens on their way for a neuron


class Entries(NamedTuple):
  """Of all tokens, one after another: where an entry is, and what it multiplies tokens by in weight gradients."""

  neuron: jax.Array  # i32[E]
  token: jax.Array  # i32[E]
  of_gate: jax.Array | None  # f32[E], times x: of the gate's gradient; None without a gate
  of_up: jax.Array  # f32[E], times x
  of_down: jax.Array  # f32[E], times d_y


def add_gradient_rows(
  w_gate_ref, w_up_ref, first_ref, d_l1_ref, first_token, entries_smem, heads_smem, up_smem, down_smem, d_x_ref,
  out: Entries, team: Team, *, interpret: bool,
) -> None:  # fmt: skip
  """d_x[token] = sum over entries of d_gate Wg[n] + d_up Wu[n], and writes the entries from first[token] on.

  With g the value of an entry, u = x . Wu[n] in up_smem and v = d_y . Wd[n] in down_smem (each warp its part of a
  token's): t = v + d_l1 sign(h), then h = g u, d_up = t g, d_gate = t u; without a gate h = g and d_up = t.
  A token with first < 0 gets zeros, and writes no entries.
  """
  num_tokens, width = d_x_ref.shape
  gated, dtype, capacity = w_gate_ref is not None, d_x_ref.dtype, entries_smem.shape[1]
  if interpret:
    for warp in range(WARPS):
      token, part = first_token + warp // team.warps, warp % team.warps
      columns = slice(part * team.slice, min((part + 1) * team.slice, width))
      team_warps = range(warp - part, warp - part + team.warps)
      entries, exists = entries_smem[warp], token < num_tokens
      token = jnp.minimum(token, num_tokens - 1)
      begin = first_ref[token]
      present = (jnp.arange(capacity) < heads_smem[warp, blocks.ENTRIES]) & (begin >= 0)
      value = jax.lax.bitcast_convert_type((entries >> 16).astype(jnp.uint16), dtype).astype(jnp.float32)
      neuron = jnp.where(present, entries & 0xFFFF, 0).astype(jnp.int32)
      summed = lambda smem, warps=team_warps: sum(smem[w] for w in warps)
      up = summed(up_smem) if gated else jnp.ones_like(value)
      d_h = summed(down_smem) + d_l1_ref[0] * jnp.sign(value * up)
      found = jnp.where(present, jnp.stack([d_h * up, d_h * value if gated else d_h, value * up]), 0)
      of = lambda ref, columns=columns, neuron=neuron: ref[...].astype(jnp.float32)[:, columns][neuron]
      zero_rows = lambda ref, present=present, of=of: jnp.where(present[:, None], of(ref), 0)
      d_x = found[1] @ zero_rows(w_up_ref) + (found[0] @ zero_rows(w_gate_ref) if gated else 0)

      @pl.when(exists)
      def _(d_x=d_x, token=token, part=part, columns=columns, begin=begin, present=present, neuron=neuron, found=found):
        d_x_ref[token, columns] = d_x.astype(dtype)
        if part == 0:
          values = neuron, jnp.full_like(neuron, token), *found

          def write(e, _):
            for ref, listed in zip(out, values):
              if ref is not None:
                ref[begin + e] = listed[e]

          jax.lax.fori_loop(0, jnp.sum(present, dtype=jnp.int32), write, None)

    return

  smem = [entries_smem, heads_smem, down_smem] + [up_smem] * gated
  outs = [ref for ref in out if ref is not None]
  refs = [w_up_ref, first_ref, d_l1_ref, d_x_ref, *smem, *outs] + [w_gate_ref] * gated

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * len(refs)), return_type=None)
  def run(ctx, first_token, w_up_ref, first_ref, d_l1_ref, d_x_ref, entries, heads, down, *rest):
    del ctx
    up, rest = (rest[0], rest[1:]) if gated else (None, rest)
    outs, (w_gate_ref,) = (rest[:-1], rest[-1:]) if gated else (rest, (None,))
    lane, warp, token = blocks.place_of_warp(first_token, team)
    row = Row(lane, warp, team, ir.MemRefType(d_x_ref.type).element_type)
    exists = arith.cmpi(arith.CmpIPredicate.ult, token, ptx.const(num_tokens))
    token = blocks.clamped(token, num_tokens)
    load_f32 = lambda at: ptx.asm((ptx.f32(),), [at], "ld.global.nc.f32 $0, [$1];", "=f,l")
    d_l1 = load_f32(ptx.global_address(d_l1_ref))
    begin = ptx.asm(
      (ptx.i32(),), [ptx.offset(ptx.global_address(first_ref), token, 4)], "ld.global.nc.b32 $0, [$1];", "=r,l"
    )
    head = ptx.offset(ptx.shared_address(heads), warp, 4 * blocks.HEAD_WORDS)
    fits = arith.cmpi(arith.CmpIPredicate.sge, begin, ptx.const(0))
    count = arith.select(fits, blocks.load_head(head, blocks.ENTRIES), ptx.const(0))
    first_warp = arith.andi(warp, ptx.const(WARPS - team.warps))
    writes = arith.andi(
      arith.andi(exists, arith.cmpi(arith.CmpIPredicate.eq, warp, first_warp)),
      arith.cmpi(arith.CmpIPredicate.eq, lane, ptx.const(0)),
    )
    entry_of = ptx.offset(ptx.shared_address(entries), warp, 4 * capacity)
    keep = blocks.keep_policy()
    weights = [row.base(ptx.global_address(ref)) for ref in (w_up_ref, w_gate_ref) if ref is not None]

    def summed(smem, at):
      parts = []
      for n in range(team.warps):
        of_warp = ptx.offset(ptx.shared_address(smem), arith.addi(first_warp, ptx.const(n)), 4 * capacity)
        parts.append(ptx.asm((ptx.f32(),), [ptx.offset(of_warp, at, 4)], "ld.shared.f32 $0, [$1];", "=f,r"))
      return total(parts)

    def step(at, count, acc):
      assert count == 1
      entry = blocks.load_entry(entry_of, at, 0)
      neuron = blocks.neuron_of(entry)
      read = [row.load_weights(base, neuron, keep) for base in weights]
      value, d_h = row.value(entry), summed(down, at)
      u = summed(up, at) if gated else None
      h = arith.mulf(value, u) if gated else value
      sign = "{.reg .pred p, q; setp.gt.f32 p, $1, 0f00000000; setp.lt.f32 q, $1, 0f00000000;"
      sign += "mov.f32 $0, 0f00000000; @p mov.f32 $0, 0f3F800000; @q mov.f32 $0, 0fBF800000;}"
      d_h = fma(d_l1, ptx.asm((ptx.f32(),), [h], sign, "=&f,f", pure=True), d_h)
      factors = [arith.mulf(d_h, value), arith.mulf(d_h, u)] if gated else [d_h]  # of up, of gate
      for factor, words in zip(factors, read):
        columns = [column for word in words for column in row.unpack(word)]
        acc = [fma(column, factor, a) for column, a in zip(columns, acc)]
      place = arith.addi(begin, at)
      listed = [neuron, token, *reversed(factors), h]
      for ref, one in zip(outs, listed, strict=True):
        kind = "f" if one.type == ptx.f32() else "r"
        address = ptx.offset(ptx.global_address(ref), place, 4)
        ptx.asm((), [address, one, writes], "@$2 st.global.b32 [$0], $1;", f"l,{kind},b")
      return acc

    acc = loop(count, 1, step, [ptx.const_f32(0.0)] * (8 * team.loads))
    row.store(row.start(ptx.global_address(d_x_ref), token), acc, exists)
    return []

  run(first_token, *refs)


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
      load = lambda array, place, kind, of: ptx.asm(
        (kind,), [ptx.offset(array, place, 4)], "ld.global.nc.b32 $0, [$1];", f"={of},l"
      )
      own = [load(tokens, place, ptx.i32(), "r") for place in places]
      read = [[row.load(ptx.offset(base, token, 2 * width), "ld.global.nc.v4.b32") for base in bases] for token in own]
      size = 8 * team.loads
      for place, (x_words, d_y_words) in zip(places, read):
        x, d_y = ([column for word in words for column in row.unpack(word)] for words in (x_words, d_y_words))
        for which, array in enumerate(factor_arrays):
          factor = load(array, place, ptx.f32(), "f")
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
