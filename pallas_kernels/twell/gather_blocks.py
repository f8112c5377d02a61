"""What a warp does for a token of a packed matrix, as inline PTX: list its entries, multiply rows, add rows.

A warpgroup has four warps, and a `rows.Team` of them shares a token. Warps run apart, since tokens differ in their
number of entries; so what passes from one block to the next lies in shared memory, a row for each warp. Each block has
a stand-in for the interpreter.

Dimension key: W the four warps, E entries that a list holds, M tokens, D model width, F neurons.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import ptx
from pallas_kernels.twell.rows import WARPS, Row, Team, dot, fma, loop, total, warp_sum

_LANES = 32
_FIRST_WORDS = 8  # of a tile, read at once: its count and 7 entries, which is all for most
ENTRIES, MISFIT, COUNT = range(3)  # words of a warp's head
HEAD_WORDS = 4


def list_entries(words_ref, first_token, entries_smem, heads_smem, team: Team, *, words: int, interpret: bool) -> None:
  """Joins the tiles of each token into one list: `entries_smem[w]`, with its length and more in `heads_smem[w]`.

  A token that overflows a tile or the list gets an empty one, and its head says so. Each lane takes a tile: one read
  brings its count and first entries. A walk from tile to tile would wait for memory once a tile.
  """
  num_tokens, row_words = words_ref.shape
  tiles, capacity = row_words // words, entries_smem.shape[1]
  if interpret:
    for warp in range(WARPS):
      token = first_token + warp // team.warps
      row = words_ref[jnp.minimum(token, num_tokens - 1)].reshape(tiles, words)
      counts = jnp.where(token < num_tokens, row[:, 0].astype(jnp.int32), 0)
      total = jnp.sum(counts)
      misfit = jnp.any(counts >= words) | (total > capacity)
      n = jax.lax.broadcasted_iota(jnp.int32, (tiles, words - 1), 1)
      place = jnp.where(n < counts[:, None], jnp.cumsum(counts)[:, None] - counts[:, None] + n, capacity)
      entries_smem[warp] = jnp.zeros((capacity,), jnp.uint32).at[place].set(row[:, 1:], mode="drop")
      heads_smem[warp] = jnp.stack([jnp.where(misfit, 0, total), misfit.astype(jnp.int32), total, 0])
    return

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.RefType(), plgpu.RefType()), return_type=None
  )
  def run(ctx, words_ref, first_token, entries, heads):
    del ctx
    lane, warp, token = place_of_warp(first_token, team)
    row = ptx.offset(ptx.global_address(words_ref), token, 4 * row_words)
    start = row_of(entries, warp)
    head = row_of(heads, warp)
    exists = f"setp.lt.u32 r, $3, {num_tokens};"
    text = (
      "{.reg .pred p, r, v, o; .reg .b32 c, s, t, a, j, e, n, over, end, w<8>; .reg .b64 g, h;"
      f"{exists} mov.b32 over, 0; mov.b32 n, 0; add.s32 end, $1, {4 * capacity};"
    )
    store = "setp.lt.and.u32 p, t, end, p; @p st.shared.b32 [t], {word};"  # unless the list is full
    for group in range(-(-tiles // _LANES)):
      text += (
        f"add.u32 j, $2, {group * _LANES}; setp.lt.and.u32 v, j, {tiles}, r; mul.wide.u32 g, j, {4 * words};"
        "add.u64 g, g, $0; mov.b32 w0, 0;"
        "@v ld.global.cs.v4.b32 {w0, w1, w2, w3}, [g]; @v ld.global.cs.v4.b32 {w4, w5, w6, w7}, [g+16];"
        f"setp.ge.u32 o, w0, {words}; vote.sync.any.pred o, o, {ptx.ALL_LANES}; @o mov.b32 over, 1;"
        # A list that nobody reads need not be copied.
        "mov.b32 c, w0; setp.ne.u32 o, over, 0; @o mov.b32 c, 0; mov.b32 s, c;"
      )
      text += ptx.SCAN
      # a: where this lane's entries go, after those of the groups before (n) and of the lanes before (s - c)
      text += "sub.s32 t, s, c; add.s32 t, t, n; shl.b32 t, t, 2; add.s32 a, t, $1;"
      for k in range(1, _FIRST_WORDS):
        text += f"setp.ge.u32 p, c, {k}; add.s32 t, a, {4 * (k - 1)}; {store.format(word=f'w{k}')}"
      text += (
        f"mov.b32 j, {_FIRST_WORDS}; MORE{group}: setp.le.u32 p, j, c; @!p bra DONE{group};"
        "mul.wide.u32 h, j, 4; add.u64 h, h, g; ld.global.cs.b32 e, [h]; add.s32 t, j, -1; shl.b32 t, t, 2;"
        f"add.s32 t, t, a; {store.format(word='e')} add.s32 j, j, 1; bra MORE{group};"
        # true counts, for the head
        f"DONE{group}: bar.warp.sync {ptx.ALL_LANES}; redux.sync.add.u32 t, w0, {ptx.ALL_LANES}; add.u32 n, n, t;"
      )
    text += (
      f"setp.gt.u32 p, n, {capacity}; @p mov.b32 over, 1;"
      "setp.ne.u32 o, over, 0; mov.b32 e, n; @o mov.b32 e, 0; mov.b32 t, 0;"
      f"setp.eq.u32 p, $2, 0; @p st.shared.v4.b32 [$4], {{e, over, n, t}}; bar.warp.sync {ptx.ALL_LANES};}}"
    )
    ptx.asm((), [row, start, lane, token, head], text, "l,r,r,r,r")
    return []

  run(words_ref, first_token, entries_smem, heads_smem)


def multiply_rows(
  x_ref, w_ref, first_token, entries_smem, heads_smem, dots_smem, team: Team, *, unroll: int, interpret: bool
) -> None:
  """dots_smem[w, e] = this warp's part of x[token] . w[neuron of entry e]; a token that is not finite is a misfit."""
  num_tokens = x_ref.shape[0]
  if interpret:
    w_FD, capacity = w_ref[...].astype(jnp.float32), entries_smem.shape[1]
    for warp in range(WARPS):
      columns = slice(warp % team.warps * team.slice, (warp % team.warps + 1) * team.slice)
      x_D = x_ref[jnp.minimum(first_token + warp // team.warps, num_tokens - 1)].astype(jnp.float32)[columns]
      head = heads_smem[warp]
      neurons = jnp.where(jnp.arange(capacity) < head[ENTRIES], entries_smem[warp] & 0xFFFF, 0).astype(jnp.int32)
      dots_smem[warp] = w_FD[:, columns][neurons] @ x_D
      heads_smem[warp] = head.at[MISFIT].max((~jnp.all(jnp.isfinite(x_D))).astype(jnp.int32))
    return

  ref = plgpu.RefType()

  @plgpu.inline_mgpu(arg_types=(ref, ref, plgpu.Layout.WG_SPLAT, ref, ref, ref), return_type=None)
  def run(ctx, x_ref, w_ref, first_token, entries, heads, dots):
    del ctx
    lane, warp, token = place_of_warp(first_token, team)
    row = Row(lane, warp, team, ir.MemRefType(x_ref.type).element_type)
    head = row_of(heads, warp)
    # A misfit has no entries: any x will do, and the first one is in L2.
    fits = arith.cmpi(arith.CmpIPredicate.eq, load_head(head, MISFIT), ptx.const(0))
    token = arith.select(fits, clamped(token, num_tokens), ptx.const(0))
    words = row.load(row.start(ptx.global_address(x_ref), token), "ld.global.cs.v4.b32")
    x = [value for word in words for value in row.unpack(word)]
    _note_if_not_finite(x, lane, head)
    weights, keep = row.base(ptx.global_address(w_ref)), keep_policy()
    entry_of, dot_of = (row_of(s, warp) for s in (entries, dots))

    def step(place, count, carry):
      del carry
      rows = [row.load_weights(weights, neuron_of(load_entry(entry_of, place, n)), keep) for n in range(count)]
      for n, words in enumerate(rows):
        value = warp_sum(dot(row, words, x))
        at = ptx.offset(dot_of, arith.addi(place, ptx.const(n)), 4)
        ptx.asm((), [at, value, lane], "{.reg .pred p; setp.eq.u32 p, $2, 0; @p st.shared.f32 [$0], $1;}", "r,f,r")
      return []

    loop(load_head(head, ENTRIES), unroll, step, [])
    if team.warps == 1:
      ptx.asm((), [], f"bar.warp.sync {ptx.ALL_LANES};", "")
    else:
      utils.warpgroup_barrier()  # a token's dots are sums over its warps
    return []

  run(x_ref, w_ref, first_token, entries_smem, heads_smem, dots_smem)


def add_rows(
  w_ref,
  start_ref,
  first_token,
  entries_smem,
  heads_smem,
  dots_smem,
  out_ref,
  l1_ref,
  counts_ref,
  team: Team,
  *,
  unroll: int,
  interpret: bool,
) -> None:
  """out[token] = start[token] + sum over entries of h w[neuron]; h = value * dot, or the value if there are no dots.

  Also writes sum |h| to l1[token] and the number of entries to counts[token, warp], -1 for a misfit, whose out and l1
  mean nothing. A misfit is often known to one warp of a token only.
  """
  num_tokens, width = out_ref.shape
  dtype = out_ref.dtype
  if interpret:
    w_FD, capacity = w_ref[...].astype(jnp.float32), entries_smem.shape[1]
    for warp in range(WARPS):
      token, part = first_token + warp // team.warps, warp % team.warps
      columns = slice(part * team.slice, min((part + 1) * team.slice, width))
      entries, head = entries_smem[warp], heads_smem[warp]
      values = jax.lax.bitcast_convert_type((entries >> 16).astype(jnp.uint16), dtype).astype(jnp.float32)
      if dots_smem is not None:
        team_warps = range(warp - part, warp - part + team.warps)
        values = values * sum(dots_smem[w] for w in team_warps)
      present = jnp.arange(capacity) < head[ENTRIES]
      h, neurons = jnp.where(present, values, 0), jnp.where(present, entries & 0xFFFF, 0).astype(jnp.int32)
      rows = jnp.where(present[:, None], w_FD[:, columns][neurons], 0)

      @pl.when(token < num_tokens)
      def _(token=token, part=part, columns=columns, h=h, rows=rows, head=head):
        begin = 0 if start_ref is None else start_ref[token, columns].astype(jnp.float32)
        out_ref[token, columns] = (begin + h @ rows).astype(dtype)
        counts_ref[token, part] = jnp.where(head[MISFIT] != 0, -1, head[COUNT])
        if part == 0:
          l1_ref[token] = jnp.sum(jnp.abs(h))

    return

  has_start, has_dots = start_ref is not None, dots_smem is not None
  refs = [w_ref, entries_smem, heads_smem, out_ref, l1_ref, counts_ref]
  refs += [start_ref] * has_start + [dots_smem] * has_dots

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * len(refs)), return_type=None)
  def run(ctx, first_token, w_ref, entries, heads, out_ref, l1_ref, counts_ref, *rest):
    del ctx
    rest = list(rest)
    start_ref = rest.pop(0) if has_start else None
    dots = rest.pop(0) if has_dots else None
    lane, warp, token = place_of_warp(first_token, team)
    row = Row(lane, warp, team, ir.MemRefType(out_ref.type).element_type)
    safe_token = clamped(token, num_tokens)
    exists = arith.cmpi(arith.CmpIPredicate.ult, token, ptx.const(num_tokens))
    weights, keep = row.base(ptx.global_address(w_ref)), keep_policy()
    entry_of = row_of(entries, warp)
    head = row_of(heads, warp)

    def hidden(place, entry):
      value = row.value(entry)
      if dots is None:
        return value
      return arith.mulf(value, sum_over_team(dots, warp, place, team))

    def step(place, count, carry):
      l1, *acc = carry
      listed = [load_entry(entry_of, place, n) for n in range(count)]
      rows = [row.load_weights(weights, neuron_of(entry), keep) for entry in listed]
      for n, (entry, words) in enumerate(zip(listed, rows)):
        h = hidden(arith.addi(place, ptx.const(n)), entry)
        l1 = ptx.asm((ptx.f32(),), [l1, h], "{.reg .f32 a; abs.f32 a, $2; add.f32 $0, $1, a;}", "=f,f,f", pure=True)
        columns = [value for word in words for value in row.unpack(word)]
        acc = [fma(value, h, a) for value, a in zip(columns, acc)]
      return [l1, *acc]

    if start_ref is None:
      acc = [ptx.const_f32(0.0)] * (8 * team.loads)
    else:
      words = row.load(row.start(ptx.global_address(start_ref), safe_token), "ld.global.cs.v4.b32")
      acc = [value for word in words for value in row.unpack(word)]
    l1, *acc = loop(load_head(head, ENTRIES), unroll, step, [ptx.const_f32(0.0), *acc])
    fits = arith.cmpi(arith.CmpIPredicate.eq, load_head(head, MISFIT), ptx.const(0))
    row.store(row.start(ptx.global_address(out_ref), safe_token), acc, arith.andi(exists, fits))

    part = arith.subi(warp, first_warp_of(warp, team))
    first_lane = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.eq, lane, ptx.const(0)))
    at = ptx.offset(ptx.global_address(l1_ref), safe_token, 4)
    writes_l1 = arith.andi(first_lane, arith.cmpi(arith.CmpIPredicate.eq, part, ptx.const(0)))
    ptx.asm((), [at, l1, writes_l1], "@$2 st.global.f32 [$0], $1;", "l,f,b")
    count = arith.addi(arith.muli(safe_token, ptx.const(team.warps)), part)
    at = ptx.offset(ptx.global_address(counts_ref), count, 4)
    value = arith.select(fits, load_head(head, COUNT), ptx.const(0xFFFFFFFF))
    ptx.asm((), [at, value, first_lane], "@$2 st.global.b32 [$0], $1;", "l,r,b")
    return []

  run(first_token, *refs)


def place_of_warp(first_token, team: Team) -> tuple[ir.Value, ir.Value, ir.Value]:
  """(lane, warp, the warp's token), which may lie past the last."""
  lane, warp = ptx.lane_and_warp()
  own = arith.shrui(warp, ptx.const(team.warps.bit_length() - 1))
  return lane, warp, arith.addi(ptx.scalar(first_token), own)


def first_warp_of(warp: ir.Value, team: Team) -> ir.Value:
  """Of those that share the warp's token."""
  return arith.andi(warp, ptx.const(WARPS - team.warps))


def sum_over_team(parts_ref: ir.Value, warp: ir.Value, place: ir.Value, team: Team) -> ir.Value:
  """Of what the warps that share a token have in [W, E] shared memory, each at its row; float32."""
  warps = [arith.addi(first_warp_of(warp, team), ptx.const(n)) for n in range(team.warps)]
  return total([ptx.load_word(ptx.offset(row_of(parts_ref, own), place, 4), ptx.f32()) for own in warps])


def row_of(ref: ir.Value, warp: ir.Value) -> ir.Value:
  """Address of the warp's row of words in shared memory."""
  return ptx.offset(ptx.shared_address(ref), warp, 4 * ir.MemRefType(ref.type).shape[1])


def clamped(token: ir.Value, num_tokens: int) -> ir.Value:
  """The token, or the last one."""
  return arith.minui(token, ptx.const(num_tokens - 1))


def keep_policy() -> ir.Value:
  """For rows that L2 should keep."""
  return ptx.asm((ptx.i64(),), [], "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "=l", pure=True)


def load_head(head: ir.Value, word: int) -> ir.Value:
  """A word of a warp's head."""
  return ptx.load_word(ptx.offset(head, ptx.const(word), 4), ptx.i32())


def load_entry(entries: ir.Value, place: ir.Value, n: int) -> ir.Value:
  """Entry place + n of a list."""
  return ptx.asm((ptx.i32(),), [ptx.offset(entries, place, 4)], f"ld.shared.b32 $0, [$1+{4 * n}];", "=r,r")


def neuron_of(entry: ir.Value) -> ir.Value:
  """The lower half of an entry."""
  return arith.andi(entry, ptx.const(0xFFFF))


def _note_if_not_finite(x: list[ir.Value], lane: ir.Value, head: ir.Value) -> None:
  """Sets MISFIT in the head: a finite number times zero is zero, anything else gives NaN."""
  zero = ptx.const_f32(0.0)
  product = zero
  for value in x:
    product = fma(value, zero, product)
  text = (
    "{.reg .pred p, q; .reg .b32 one; setp.neu.f32 p, $0, 0f00000000; vote.sync.any.pred q, p, "
    f"{ptx.ALL_LANES}; mov.b32 one, 1; setp.eq.and.u32 p, $1, 0, q; @p st.shared.b32 [$2+{4 * MISFIT}], one;}}"
  )
  ptx.asm((), [product, lane, head], text, "f,r,r")
