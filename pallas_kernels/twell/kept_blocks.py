"""Lists of entries on their way to memory and back, as inline PTX; each block has a stand-in for the interpreter.

A warp takes 32 neighbours at a time, a lane each. `gather_blocks.py` says how lists lie in shared memory, `kept.py` how
they lie in memory.

Dimension key: W the four warps, M tokens, E entries.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import ptx
from pallas_kernels.twell import gather_blocks as blocks
from pallas_kernels.twell.kept import Kept
from pallas_kernels.twell.rows import WARPS, Team

_LANES = 32


def store_lists(
  first_ref, entries_ref, up_ref, first_token, entries_smem, dots_smem, heads_smem, team: Team, *, interpret: bool
) -> None:
  """Writes a token's entries to entries_ref from first[token] on, and the sums of its dots to up_ref if there is one.

  Nothing where first[token] is -1.
  """
  gated, num_tokens = up_ref is not None, first_ref.shape[0]
  if interpret:
    for warp in range(0, WARPS, team.warps):
      token, begin = _place(first_ref, first_token, warp, team)
      count = jnp.where((token < num_tokens) & (begin >= 0), heads_smem[warp, blocks.ENTRIES], 0)
      lists = [(entries_ref, entries_smem[warp])]
      if gated:
        lists.append((up_ref, sum(dots_smem[warp + n] for n in range(team.warps))))
      write_list(begin, count, lists)
    return

  refs = [first_ref, entries_ref, entries_smem, heads_smem, *[up_ref, dots_smem] * gated]

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * len(refs)), return_type=None)
  def run(ctx, first_token, first_ref, entries_ref, entries, heads, *rest):
    del ctx
    lane, warp, token = blocks.place_of_warp(first_token, team)
    begin, exists = begin_of(first_ref, token, num_tokens)
    writes = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.eq, warp, blocks.first_warp_of(warp, team)))
    count = arith.select(writes, blocks.load_head(blocks.row_of(heads, warp), blocks.ENTRIES), ptx.const(0))

    def step(at, _):
      place = arith.addi(begin, at)
      ptx.store_word(global_word(entries_ref, place), ptx.load_word(shared_word(entries, warp, at), ptx.i32()))
      if gated:
        up_ref, dots = rest
        ptx.store_word(global_word(up_ref, place), blocks.sum_over_team(dots, warp, at, team))
      return []

    ptx.for_each(lane, count, _LANES, step, [])
    return []

  run(first_token, *refs)


def load_lists(kept: Kept, first_token, entries_smem, up_smem, heads_smem, team: Team, *, interpret: bool) -> None:
  """Reads a token's entries back, and their dots if there is up_smem, for each of its warps; none without a place."""
  (first_ref, counts_ref), gated = kept.places, up_smem is not None
  num_tokens, capacity = first_ref.shape[0], entries_smem.shape[1]
  if interpret:
    for warp in range(WARPS):
      token, begin = _place(first_ref, first_token, warp, team)
      present = (token < num_tokens) & (begin >= 0)
      count = jnp.where(present, counts_ref[jnp.minimum(token, num_tokens - 1)], 0)
      at = jnp.arange(capacity)
      place = jnp.clip(begin + at, 0, kept.lists.entries_E.shape[0] - 1)
      for ref, smem in ((kept.lists.entries_E, entries_smem), (kept.lists.up_E, up_smem)):
        if ref is not None:
          smem[warp] = jnp.where(at < count, ref[...][place], 0)
      heads_smem[warp] = jnp.zeros((blocks.HEAD_WORDS,), jnp.int32).at[blocks.ENTRIES].set(count)
    return

  refs = [first_ref, counts_ref, kept.lists.entries_E, entries_smem, heads_smem, *[kept.lists.up_E, up_smem] * gated]

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * len(refs)), return_type=None)
  def run(ctx, first_token, first_ref, counts_ref, entries_ref, entries, heads, *rest):
    del ctx
    lane, warp, token = blocks.place_of_warp(first_token, team)
    begin, exists = begin_of(first_ref, token, num_tokens)
    count = ptx.load_word(global_word(counts_ref, blocks.clamped(token, num_tokens)), ptx.i32())
    count = arith.select(exists, count, ptx.const(0))

    def step(at, _):
      place = arith.addi(begin, at)
      ptx.store_word(shared_word(entries, warp, at), ptx.load_word(global_word(entries_ref, place), ptx.i32()))
      if gated:
        up_ref, up = rest
        ptx.store_word(shared_word(up, warp, at), ptx.load_word(global_word(up_ref, place), ptx.f32()))
      return []

    ptx.for_each(lane, count, _LANES, step, [])
    head = blocks.row_of(heads, warp)
    for word, value in ((blocks.ENTRIES, count), (blocks.MISFIT, ptx.const(0))):
      ptx.store_word(ptx.offset(head, ptx.const(word), 4), value)
    ptx.asm((), [], f"bar.warp.sync {ptx.ALL_LANES};", "")
    return []

  run(first_token, *refs)


def begin_of(first_ref: ir.Value, token: ir.Value, num_tokens: int) -> tuple[ir.Value, ir.Value]:
  """(where a token's entries begin in memory, whether they are there)."""
  begin = ptx.load_word(global_word(first_ref, blocks.clamped(token, num_tokens)), ptx.i32())
  exists = arith.cmpi(arith.CmpIPredicate.ult, token, ptx.const(num_tokens))
  return begin, arith.andi(exists, arith.cmpi(arith.CmpIPredicate.sge, begin, ptx.const(0)))


def shared_word(ref: ir.Value, warp: ir.Value, at: ir.Value) -> ir.Value:
  """Address of a word of the warp's row."""
  return ptx.offset(blocks.row_of(ref, warp), at, 4)


def global_word(ref: ir.Value, place: ir.Value) -> ir.Value:
  """Address of a word of an array in memory."""
  return ptx.offset(ptx.global_address(ref), place, 4)


def write_list(begin, count, lists) -> None:
  """For the interpreter: ref[begin + n] = values[n] for n below count and each (ref, values)."""

  def write(n, _):
    for ref, values in lists:
      ref[begin + n] = values[n]

  lax.fori_loop(0, count, write, None)


def _place(first_ref, first_token, warp: int, team: Team):
  """For the interpreter: (the warp's token, first[token])."""
  token = first_token + warp // team.warps
  return token, first_ref[jnp.minimum(token, first_ref.shape[0] - 1)]
