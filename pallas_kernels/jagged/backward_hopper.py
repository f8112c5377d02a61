"""Gradients of the attention family on Hopper, by two kernels: that of q, and those of k and v. No atomics.

Scores are recomputed. `query_gradient` has items as the forward pass: 128 queries, which step through keys.
`key_gradients` has items of 128 keys of a key head, which step through the queries of all its heads; there scores are
transposed, so that they are held in registers as a product with queries needs them.

With p and act'(s) as in the forward pass, dp = do v^T, and delta = sum(do * o) over a query's features:
  ds = p (dp - delta) for softmax, else dp act'(s);   dq = ds k,   dk = ds^T q,   dv = p^T do.

Steps that hold a pair that is not visible are masked, and what other tokens hold there is cleared.

Dimension key: T query tokens, S key tokens, H query heads, G key heads, K head width, Q and C tokens of a tile's
warpgroup and of a step.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.jagged import common_hopper as common
from pallas_kernels.jagged import rows, schedule
from pallas_kernels.jagged.bias_hopper import Bias, add_to
from pallas_kernels.jagged.form import Form
from pallas_kernels.jagged.schedule import ALIGNMENT, TILE, Field, TileList
from pallas_kernels.jagged.schedule import BACKWARD_STEP as STEP

_STAGES = 2  # steps on their way


@functools.partial(jax.jit, static_argnames=("form", "num_sms", "interpret"))
def query_gradient(
  q_THK,
  k_SGK,
  v_SGK,
  d_o_THK,
  lse_HT,
  delta_HT,
  tiles: TileList,
  turn,
  bias,
  form: Form,
  *,
  num_sms=None,
  interpret=False,
) -> jax.Array:
  """d_q_THK, zeros for tokens in no row; lse and delta are None without softmax, turn is empty without `Rotary`."""
  sums = _given(lse_HT, delta_HT)
  arrays = _Arrays((q_THK, d_o_THK), (k_SGK, v_SGK), item_sums=sums, turn=turn, bias=bias)
  return _launch("jagged_query_gradient", _query_kernel, (q_THK,), arrays, tiles, form, num_sms, interpret)[0]


@functools.partial(jax.jit, static_argnames=("form", "num_sms", "interpret"))
def key_gradients(
  q_THK,
  k_SGK,
  v_SGK,
  d_o_THK,
  lse_HT,
  delta_HT,
  tiles: TileList,
  turn,
  bias,
  form: Form,
  *,
  num_sms=None,
  interpret=False,
) -> tuple[jax.Array, jax.Array]:
  """(d_k_SGK, d_v_SGK), zeros for tokens in no row; None and empty as for `query_gradient`."""
  sums = _given(lse_HT, delta_HT)
  arrays = _Arrays((k_SGK, v_SGK), (q_THK, d_o_THK), step_sums=sums, turn=turn, bias=bias)
  return _launch("jagged_key_gradients", _key_kernel, (k_SGK, v_SGK), arrays, tiles, form, num_sms, interpret)


def _given(*arrays: jax.Array | None) -> tuple[jax.Array, ...]:
  return tuple(a for a in arrays if a is not None)


class _Arrays(NamedTuple):
  """What a kernel reads, in memory or in shared memory: of its item once, and of every step."""

  of_items: tuple  # [tokens, heads, K]
  of_steps: tuple
  item_sums: tuple = ()  # [heads, tokens], f32
  step_sums: tuple = ()
  # Read from memory alone.
  turn: tuple = ()  # [tokens, K / 2], f32: those of `Rotary`
  bias: Bias | None = None


def _launch(name, kernel, results, arrays: _Arrays, tiles: TileList, form: Form, num_sms, interpret) -> tuple:
  """Results of the shapes and dtypes of `results`."""
  num_sms = common.num_sms_of(num_sms, interpret=interpret)
  width, dtype = results[0].shape[2], results[0].dtype
  reach = TILE * interpret  # copies that reach past the end of an array are not for the interpreter
  pad = functools.partial(common.padded, reach=reach)
  pad_sums = functools.partial(common.padded, reach=reach, axis=1)
  shared = functools.partial(plgpu.SMEM, transforms=mosaic.operand_transforms(width))
  scratch = _Arrays(
    tuple(shared((common.ITEMS, 2, rows.ROWS, width), dtype) for _ in arrays.of_items),
    tuple(shared((_STAGES, STEP, width), dtype) for _ in arrays.of_steps),
    tuple(plgpu.SMEM((common.ITEMS, 2, rows.ROWS), jnp.float32) for _ in arrays.item_sums),
    tuple(plgpu.SMEM((_STAGES, STEP), jnp.float32) for _ in arrays.step_sums),
  )
  copies_of_item = 2 * len(arrays.of_items + arrays.item_sums) + 1  # two halves of a tile, and the entry
  return mosaic.kernel(
    functools.partial(kernel, form=form, num_sms=num_sms, interpret=interpret),
    out_type=tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results),
    grid=(num_sms,),
    grid_names=("sm",),
    num_threads=3,
    thread_name="wg",
    scratch_types=[
      scratch,
      plgpu.SMEM((common.ITEMS, schedule.FIELDS), jnp.int32),
      plgpu.Barrier(num_arrivals=copies_of_item, num_barriers=common.ITEMS),
      plgpu.Barrier(num_arrivals=2, num_barriers=common.ITEMS),
      plgpu.Barrier(num_arrivals=len(arrays.of_steps + arrays.step_sums), num_barriers=_STAGES),
      plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
    ],
    compiler_params=plgpu.CompilerParams(approx_math=True),
    kernel_name=name,
    interpret=interpret,
  )(
    _Arrays(
      tuple(map(pad, arrays.of_items)),
      tuple(map(pad, arrays.of_steps)),
      tuple(map(pad_sums, arrays.item_sums)),
      tuple(map(pad_sums, arrays.step_sums)),
      tuple(jnp.pad(a_TP, ((0, reach), (0, 0))) for a_TP in arrays.turn),
      arrays.bias,
    ),
    *tiles,
  )


class _Barriers(NamedTuple):
  item_full: jax.Array
  item_free: jax.Array
  full: jax.Array
  free: jax.Array


def _load(
  items: common.Items,
  refs: _Arrays,
  smem: _Arrays,
  tiles_ref,
  entry_smem,
  barriers: _Barriers,
  rounds: int,
  head_of_step,
):
  """The loading warpgroup: through the steps of an item `rounds` times, of head_of_step(item's head, round)."""
  plgpu.set_max_registers(24, action="decrease")

  def load_item(n, step):
    (entry, head), slot = items[n], lax.rem(n, common.ITEMS)
    pl.when(n >= common.ITEMS)(lambda: plgpu.barrier_wait(barriers.item_free.at[slot]))
    token = pl.multiple_of(tiles_ref[entry, Field.TOKEN], ALIGNMENT)
    full = barriers.item_full.at[slot]
    for w in range(2):
      run = pl.ds(token + w * rows.ROWS, rows.ROWS)
      for ref, own in zip(refs.of_items, smem.of_items):
        plgpu.copy_gmem_to_smem(ref.at[run, head], own.at[slot, w], full)
      for ref, own in zip(refs.item_sums, smem.item_sums):
        plgpu.copy_gmem_to_smem(ref.at[head, run], own.at[slot, w], full)
    plgpu.copy_gmem_to_smem(tiles_ref.at[entry], entry_smem.at[slot], full)
    other = pl.multiple_of(tiles_ref[entry, Field.OTHER_TOKEN], ALIGNMENT)

    steps = tiles_ref[entry, Field.STEPS]

    def load_step(done, step):
      stage, run = lax.rem(step, _STAGES), pl.ds(other + lax.rem(done, steps) * STEP, STEP)
      step_head = head_of_step(head, lax.div(done, steps))
      pl.when(step >= _STAGES)(lambda: plgpu.barrier_wait(barriers.free.at[stage]))
      for ref, own in zip(refs.of_steps, smem.of_steps):
        plgpu.copy_gmem_to_smem(ref.at[run, step_head], own.at[stage], barriers.full.at[stage])
      for ref, own in zip(refs.step_sums, smem.step_sums):
        plgpu.copy_gmem_to_smem(ref.at[step_head, run], own.at[stage], barriers.full.at[stage])
      return step + 1

    return lax.fori_loop(0, rounds * steps, load_step, step)

  steps = lax.fori_loop(0, items.number, load_item, jnp.int32(0))
  common.wait_for_last(items.number, common.ITEMS, barriers.item_free)
  common.wait_for_last(steps, _STAGES, barriers.free)


def _query_kernel(refs, tiles_ref, counts_ref, d_q_ref, smem, entry_smem, *barriers, form: Form, num_sms, interpret):
  barriers, wg, sm = _Barriers(*barriers), lax.axis_index("wg"), lax.axis_index("sm")
  heads, width = d_q_ref.shape[1:]
  group = heads // refs.of_steps[0].shape[1]
  items = common.Items(counts_ref[0], heads, sm, num_sms)

  def load():
    _load(items, refs, smem, tiles_ref, entry_smem, barriers, 1, lambda head, n: lax.div(head, group))

  def compute():
    plgpu.set_max_registers(240, action="increase")

    def compute_item(n, step):
      (_, head), slot = items[n], lax.rem(n, common.ITEMS)
      plgpu.barrier_wait(barriers.item_full.at[slot])
      entry = common.read_entry(entry_smem, slot)
      first = wg * rows.ROWS
      q_smem, d_o_smem = (own.at[slot, wg] for own in smem.of_items)
      sums = [plgpu.load(own.at[slot, wg], layout=plgpu.Layout.WGMMA.reduce(1)) for own in smem.item_sums]

      def compute_step(t, d_q_QK):
        stage = lax.rem(step + t, _STAGES)
        plgpu.barrier_wait(barriers.full.at[stage])
        k_smem, v_smem = (own.at[stage] for own in smem.of_steps)
        masked, key = common.is_masked(entry, t), entry[Field.OTHER_TOKEN] + t * STEP
        k_CK = common.clear_others(k_smem, masked, key, entry, interpret=interpret)
        s_QC, d_p_QC = common.two_products((q_smem, k_smem), (d_o_smem, v_smem))
        tile = entry, first, key, s_QC.shape
        add_bias = add_to(refs.bias, *tile[:3], queries=0, interpret=interpret)
        visible = lambda: common.visible(form, *tile, queries=0)
        _, d_s_QC = common.weights_and_gradient(form, head, s_QC, add_bias, d_p_QC, sums, masked, visible, queries=0)
        d_q_QK = mosaic.mma(d_q_QK, d_s_QC.astype(d_q_ref.dtype), k_CK, interpret=interpret)
        plgpu.barrier_arrive(barriers.free.at[stage])
        return d_q_QK

      d_q_QK = lax.fori_loop(0, entry[Field.STEPS], compute_step, _zeros(width))
      plgpu.commit_smem()  # what was read by plain loads will be overwritten by copies
      plgpu.barrier_arrive(barriers.item_free.at[slot])
      d_q_QK = common.scaled(d_q_QK, common.score_scale(form))
      _store(d_q_QK, d_q_ref, head, entry, first, refs.turn, interpret)
      return step + entry[Field.STEPS]

    lax.fori_loop(0, items.number, compute_item, jnp.int32(0))
    common.clear_tail(d_q_ref, counts_ref[1], 2 * sm + wg, 2 * num_sms, interpret=interpret)

  lax.cond(wg < 2, compute, load)


def _key_kernel(
  refs, tiles_ref, counts_ref, d_k_ref, d_v_ref, smem, entry_smem, *barriers, form: Form, num_sms, interpret
):
  barriers, wg, sm = _Barriers(*barriers), lax.axis_index("wg"), lax.axis_index("sm")
  key_heads, width = d_k_ref.shape[1:]
  group = refs.of_steps[0].shape[1] // key_heads
  items = common.Items(counts_ref[0], key_heads, sm, num_sms)

  def load():
    _load(items, refs, smem, tiles_ref, entry_smem, barriers, group, lambda head, n: head * group + n)

  def compute():
    plgpu.set_max_registers(240, action="increase")

    def compute_item(n, step):
      (_, head), slot = items[n], lax.rem(n, common.ITEMS)
      plgpu.barrier_wait(barriers.item_full.at[slot])
      entry = common.read_entry(entry_smem, slot)
      first = wg * rows.ROWS
      k_smem, v_smem = (own.at[slot, wg] for own in smem.of_items)

      def compute_step(done, carry):
        d_k_QK, d_v_QK = carry
        stage, t = lax.rem(step + done, _STAGES), lax.rem(done, entry[Field.STEPS])
        plgpu.barrier_wait(barriers.full.at[stage])
        q_smem, d_o_smem = (own.at[stage] for own in smem.of_steps)
        masked, query = common.is_masked(entry, t), entry[Field.OTHER_TOKEN] + t * STEP
        q_CK, d_o_CK = (
          common.clear_others(own, masked, query, entry, interpret=interpret) for own in (q_smem, d_o_smem)
        )
        sums = [plgpu.load(own.at[stage], layout=plgpu.Layout.WGMMA.reduce(0)) for own in smem.step_sums]
        s_QC, d_p_QC = common.two_products((k_smem, q_smem), (v_smem, d_o_smem))
        tile = entry, first, query, s_QC.shape
        add_bias = add_to(refs.bias, *tile[:3], queries=1, interpret=interpret)
        visible = lambda: common.visible(form, *tile, queries=1)
        query_head = head * group + lax.div(done, entry[Field.STEPS])
        p_QC, d_s_QC = common.weights_and_gradient(
          form, query_head, s_QC, add_bias, d_p_QC, sums, masked, visible, queries=1
        )
        d_v_QK = mosaic.mma(d_v_QK, p_QC.astype(d_v_ref.dtype), d_o_CK, interpret=interpret)
        d_k_QK = mosaic.mma(d_k_QK, d_s_QC.astype(d_k_ref.dtype), q_CK, interpret=interpret)
        plgpu.commit_smem()  # sums were read by plain loads
        plgpu.barrier_arrive(barriers.free.at[stage])
        return d_k_QK, d_v_QK

      steps, zeros = group * entry[Field.STEPS], _zeros(width)
      d_k_QK, d_v_QK = lax.fori_loop(0, steps, compute_step, (zeros, zeros))
      plgpu.commit_smem()
      plgpu.barrier_arrive(barriers.item_free.at[slot])
      _store(common.scaled(d_k_QK, common.score_scale(form)), d_k_ref, head, entry, first, refs.turn, interpret)
      turn_of_v = refs.turn if form.turn_values else ()
      _store(common.scaled(d_v_QK, form.post_scale), d_v_ref, head, entry, first, turn_of_v, interpret)
      return step + steps

    lax.fori_loop(0, items.number, compute_item, jnp.int32(0))
    for out_ref in (d_k_ref, d_v_ref):
      common.clear_tail(out_ref, counts_ref[1], 2 * sm + wg, 2 * num_sms, interpret=interpret)

  lax.cond(wg < 2, compute, load)


def _store(d_QK, out_ref, head, entry, first, turn_refs: tuple, interpret: bool) -> None:
  """The warpgroup's part of an item's gradients, turned back if there is something to turn by."""
  token, end = entry[Field.TOKEN] + first, entry[Field.END]
  d_QK = rows.turned_back(d_QK, turn_refs, token, end, interpret=interpret)
  rows.store(d_QK, out_ref, head, token, entry[Field.BEGIN], end, interpret=interpret)


def _zeros(width: int) -> jax.Array:
  return plgpu.layout_cast(jnp.zeros((rows.ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
