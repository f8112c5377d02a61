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
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, mosaic
from pallas_kernels.jagged import common_hopper as common
from pallas_kernels.jagged import rows, schedule
from pallas_kernels.jagged.form import Form
from pallas_kernels.jagged.schedule import ALIGNMENT, Field, Schedule

TILE = 2 * rows.ROWS  # of an item
STEP = 64
_STAGES = 2  # steps on their way
_ITEMS = 2  # of a block that are there: one is used, one arrives
_SMS_OF_A_TEST = 2  # the interpreter has no device to ask
_LOG2_E = math.log2(math.e)


@functools.partial(jax.jit, static_argnames=("form", "num_sms", "interpret"))
def query_gradient(
  q_THK, k_SGK, v_SGK, d_o_THK, lse_HT, delta_HT, tiles: Schedule, form: Form, *, num_sms=None, interpret: bool = False
) -> jax.Array:
  """d_q_THK; `tiles` are of `schedule.over_queries` with TILE and STEP, lse and delta are None without softmax."""
  width = q_THK.shape[2]
  own, others = (q_THK, d_o_THK), (k_SGK, v_SGK)
  kernel = functools.partial(_query_kernel, form=form, interpret=interpret)
  out = jax.ShapeDtypeStruct(q_THK.shape, q_THK.dtype)
  (d_q_THK,) = _launch(
    "jagged_query_gradient", kernel, (out,), own, others, _sums(lse_HT, delta_HT), tiles, width, False, num_sms, interpret
  )
  return d_q_THK


@functools.partial(jax.jit, static_argnames=("form", "num_sms", "interpret"))
def key_gradients(
  q_THK, k_SGK, v_SGK, d_o_THK, lse_HT, delta_HT, tiles: Schedule, form: Form, *, num_sms=None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """(d_k_SGK, d_v_SGK); `tiles` are of `schedule.over_keys` with TILE and STEP."""
  width = q_THK.shape[2]
  own, others = (k_SGK, v_SGK), (q_THK, d_o_THK)
  kernel = functools.partial(_key_kernel, form=form, interpret=interpret)
  outs = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in own)
  return _launch(
    "jagged_key_gradients", kernel, outs, own, others, _sums(lse_HT, delta_HT), tiles, width, True, num_sms, interpret
  )


def _sums(lse_HT, delta_HT) -> tuple[jax.Array, ...]:
  """What softmax needs of each query."""
  return () if lse_HT is None else (lse_HT, delta_HT)


def _launch(name, kernel, outs, own, others, sums, tiles, width, steps_have_sums, num_sms, interpret):
  """Tiles of `own` arrays are there once an item, steps of `others` again and again; sums are of the queries."""
  if num_sms is None:
    num_sms = _SMS_OF_A_TEST if interpret else device.num_sms()
  reach = TILE * interpret  # copies that reach past the end of an array are not for the interpreter
  pad = lambda a_THK: jnp.pad(a_THK, ((0, -len(a_THK) % ALIGNMENT + reach), (0, 0), (0, 0)))
  sums = tuple(jnp.pad(a_HT, ((0, 0), (0, -a_HT.shape[1] % ALIGNMENT + reach))) for a_HT in sums)
  transforms = mosaic.operand_transforms()
  tile = lambda a: plgpu.SMEM((_ITEMS, 2, rows.ROWS, width), a.dtype, transforms=transforms)
  step = lambda a: plgpu.SMEM((_STAGES, STEP, width), a.dtype, transforms=transforms)
  numbers = lambda: plgpu.SMEM((_STAGES, STEP) if steps_have_sums else (_ITEMS, 2, rows.ROWS), jnp.float32)
  own_arrivals = 2 * len(own) + 1 + (0 if steps_have_sums else 2 * len(sums))
  return mosaic.kernel(
    functools.partial(kernel, num_sms=num_sms, num_sums=len(sums)),
    out_type=outs,
    grid=(num_sms,),
    grid_names=("sm",),
    num_threads=3,
    thread_name="wg",
    scratch_types=[
      *map(tile, own),
      *map(step, others),
      *(numbers() for _ in sums),
      plgpu.SMEM((_ITEMS, schedule.FIELDS), jnp.int32),
      plgpu.Barrier(num_arrivals=own_arrivals, num_barriers=_ITEMS),
      plgpu.Barrier(num_arrivals=2, num_barriers=_ITEMS),
      plgpu.Barrier(num_arrivals=2 + len(sums) * steps_have_sums, num_barriers=_STAGES),
      plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
    ],
    compiler_params=plgpu.CompilerParams(approx_math=True),
    kernel_name=name,
    interpret=interpret,
  )(*map(pad, own), *map(pad, others), *sums, tiles.tiles_NF, tiles.number)


def _load(items: common.Items, own, others, tiles_ref, entry_smem, own_sums, steps_of, barriers):
  """The loading warpgroup: (ref, smem) pairs of tiles and of steps.

  own_sums: (ref, smem) pairs of numbers that belong to tiles. steps_of: (entry, item's head) -> list of heads... of
  each round through the steps, and pairs of numbers that belong to steps.
  """
  own_full, own_free, full, free = barriers
  rounds, step_sums, head_of_tile, head_of_step = steps_of

  def load_item(n, step):
    (entry, head), slot = items[n], lax.rem(n, _ITEMS)
    pl.when(n >= _ITEMS)(lambda: plgpu.barrier_wait(own_free.at[slot]))
    token = pl.multiple_of(tiles_ref[entry, Field.TOKEN], ALIGNMENT)
    for w in range(2):
      run = pl.ds(token + w * rows.ROWS, rows.ROWS)
      for ref, smem in own:
        plgpu.copy_gmem_to_smem(ref.at[run, head_of_tile(head)], smem.at[slot, w], own_full.at[slot])
      for ref, smem in own_sums:
        plgpu.copy_gmem_to_smem(ref.at[head, run], smem.at[slot, w], own_full.at[slot])
    plgpu.copy_gmem_to_smem(tiles_ref.at[entry], entry_smem.at[slot], own_full.at[slot])
    other, steps = pl.multiple_of(tiles_ref[entry, Field.OTHER_TOKEN], ALIGNMENT), tiles_ref[entry, Field.STEPS]

    def load_step(t, step):
      stage, run = lax.rem(step, _STAGES), pl.ds(other + lax.rem(t, steps) * STEP, STEP)
      step_head = head_of_step(head, lax.div(t, steps))
      pl.when(step >= _STAGES)(lambda: plgpu.barrier_wait(free.at[stage]))
      for ref, smem in others:
        plgpu.copy_gmem_to_smem(ref.at[run, step_head], smem.at[stage], full.at[stage])
      for ref, smem in step_sums:
        plgpu.copy_gmem_to_smem(ref.at[step_head, run], smem.at[stage], full.at[stage])
      return step + 1

    return lax.fori_loop(0, rounds * steps, load_step, step)

  steps = lax.fori_loop(0, items.number, load_item, jnp.int32(0))
  common.wait_for_last(items.number, _ITEMS, own_free)
  common.wait_for_last(steps, _STAGES, free)


def _query_kernel(q_ref, d_o_ref, k_ref, v_ref, *rest, form: Form, num_sms, num_sums, interpret):
  sum_refs, (tiles_ref, number_ref, d_q_ref, q_smem, d_o_smem, k_smem, v_smem, *rest) = rest[:num_sums], rest[num_sums:]
  sum_smems, (entry_smem, *barriers) = rest[:num_sums], rest[num_sums:]
  own_full, own_free, full, free = barriers
  wg, sm, heads = lax.axis_index("wg"), lax.axis_index("sm"), q_ref.shape[1]
  group = heads // k_ref.shape[1]
  items = common.Items(number_ref[0], heads, sm, num_sms)

  def load():
    plgpu.set_max_registers(40, action="decrease")
    own, others = ((q_ref, q_smem), (d_o_ref, d_o_smem)), ((k_ref, k_smem), (v_ref, v_smem))
    steps_of = 1, (), lambda head: head, lambda head, turn: lax.div(head, group)
    _load(items, own, others, tiles_ref, entry_smem, tuple(zip(sum_refs, sum_smems)), steps_of, barriers)

  def compute():
    plgpu.set_max_registers(232, action="increase")

    def compute_item(n, step):
      (_, head), slot = items[n], lax.rem(n, _ITEMS)
      plgpu.barrier_wait(own_full.at[slot])
      entry = {field: entry_smem[slot, field] for field in Field}
      first = wg * rows.ROWS
      q, d_o = q_smem.at[slot, wg], d_o_smem.at[slot, wg]
      sums = [plgpu.load(smem.at[slot, wg], layout=plgpu.Layout.WGMMA.reduce(1)) for smem in sum_smems]

      def compute_step(t, d_q_QK):
        stage = lax.rem(step + t, _STAGES)
        plgpu.barrier_wait(full.at[stage])
        masked, key = common.is_masked(entry, t), entry[Field.OTHER_TOKEN] + t * STEP
        row = entry[Field.OTHER_BEGIN], entry[Field.OTHER_END]
        k_CK = rows.clear_others(k_smem.at[stage], masked, key, *row, interpret=interpret)
        s_QC, d_p_QC = _two_products((q, k_smem.at[stage]), (d_o, v_smem.at[stage]))
        visible = lambda: common.visible(form, entry, first, key, s_QC.shape, queries=0)
        _, d_s_QC = _weights(form, s_QC, d_p_QC, sums, masked, visible, queries=0)
        d_q_QK = mosaic.mma(d_q_QK, d_s_QC.astype(q_ref.dtype), k_CK, interpret=interpret)
        plgpu.barrier_arrive(free.at[stage])
        return d_q_QK

      d_q_QK = lax.fori_loop(0, entry[Field.STEPS], compute_step, _zeros(q_ref.shape[2]))
      plgpu.commit_smem()  # what was read by plain loads will be overwritten by copies
      plgpu.barrier_arrive(own_free.at[slot])
      place = head, entry[Field.TOKEN] + first, entry[Field.BEGIN], entry[Field.END]
      rows.store(_scaled(d_q_QK, _score_scale(form)), d_q_ref, *place, interpret=interpret)
      return step + entry[Field.STEPS]

    lax.fori_loop(0, items.number, compute_item, jnp.int32(0))

  lax.cond(wg < 2, compute, load)


def _key_kernel(k_ref, v_ref, q_ref, d_o_ref, *rest, form: Form, num_sms, num_sums, interpret):
  sum_refs, rest = rest[:num_sums], rest[num_sums:]
  tiles_ref, number_ref, d_k_ref, d_v_ref, k_smem, v_smem, q_smem, d_o_smem, *rest = rest
  sum_smems, (entry_smem, *barriers) = rest[:num_sums], rest[num_sums:]
  own_full, own_free, full, free = barriers
  wg, sm, key_heads = lax.axis_index("wg"), lax.axis_index("sm"), k_ref.shape[1]
  group = q_ref.shape[1] // key_heads
  items = common.Items(number_ref[0], key_heads, sm, num_sms)

  def load():
    plgpu.set_max_registers(24, action="decrease")
    own, others = ((k_ref, k_smem), (v_ref, v_smem)), ((q_ref, q_smem), (d_o_ref, d_o_smem))
    sums = tuple(zip(sum_refs, sum_smems))
    steps_of = group, sums, lambda head: head, lambda head, turn: head * group + turn
    _load(items, own, others, tiles_ref, entry_smem, (), steps_of, barriers)

  def compute():
    plgpu.set_max_registers(240, action="increase")

    def compute_item(n, step):
      (_, head), slot = items[n], lax.rem(n, _ITEMS)
      plgpu.barrier_wait(own_full.at[slot])
      entry = {field: entry_smem[slot, field] for field in Field}
      first = wg * rows.ROWS
      k, v = k_smem.at[slot, wg], v_smem.at[slot, wg]

      def compute_step(t, carry):
        d_k_QK, d_v_QK = carry
        stage = lax.rem(step + t, _STAGES)
        plgpu.barrier_wait(full.at[stage])
        turn = lax.rem(t, entry[Field.STEPS])
        masked, query = common.is_masked(entry, turn), entry[Field.OTHER_TOKEN] + turn * STEP
        row = entry[Field.OTHER_BEGIN], entry[Field.OTHER_END]
        q_CK, d_o_CK = (
          rows.clear_others(smem.at[stage], masked, query, *row, interpret=interpret) for smem in (q_smem, d_o_smem)
        )
        sums = [plgpu.load(smem.at[stage], layout=plgpu.Layout.WGMMA.reduce(0)) for smem in sum_smems]
        s_QC, d_p_QC = _two_products((k, q_smem.at[stage]), (v, d_o_smem.at[stage]))
        visible = lambda: common.visible(form, entry, first, query, s_QC.shape, queries=1)
        p_QC, d_s_QC = _weights(form, s_QC, d_p_QC, sums, masked, visible, queries=1)
        d_v_QK = mosaic.mma(d_v_QK, p_QC.astype(q_ref.dtype), d_o_CK, interpret=interpret)
        d_k_QK = mosaic.mma(d_k_QK, d_s_QC.astype(q_ref.dtype), q_CK, interpret=interpret)
        plgpu.commit_smem()  # sums were read by plain loads
        plgpu.barrier_arrive(free.at[stage])
        return d_k_QK, d_v_QK

      steps, zeros = group * entry[Field.STEPS], _zeros(k_ref.shape[2])
      d_k_QK, d_v_QK = lax.fori_loop(0, steps, compute_step, (zeros, zeros))
      plgpu.commit_smem()
      plgpu.barrier_arrive(own_free.at[slot])
      place = head, entry[Field.TOKEN] + first, entry[Field.BEGIN], entry[Field.END]
      rows.store(_scaled(d_k_QK, _score_scale(form)), d_k_ref, *place, interpret=interpret)
      rows.store(_scaled(d_v_QK, form.post_scale), d_v_ref, *place, interpret=interpret)
      return step + steps

    lax.fori_loop(0, items.number, compute_item, jnp.int32(0))

  lax.cond(wg < 2, compute, load)


def _two_products(first, second) -> tuple[jax.Array, jax.Array]:
  """a b^T of two pairs of operands, f32[Q, C] each."""

  def multiply(acc_a, acc_b):
    for acc, (a, b) in ((acc_a, first), (acc_b, second)):
      plgpu.wgmma(acc, a, b.transpose((1, 0)))
    return acc_a[...], acc_b[...]

  acc = plgpu.ACC((rows.ROWS, STEP), jnp.float32)
  return pl.run_scoped(multiply, acc, acc)


def _weights(form: Form, s, d_p, sums, masked, visible, *, queries: int) -> tuple[jax.Array, jax.Array]:
  """p, and d_s without the scales that `_score_scale` holds; 0 for pairs that are not visible."""
  if form.is_softmax:
    lse, delta = (lax.broadcast_in_dim(x, s.shape, [queries]) for x in sums)
    p = jnp.exp2(s * (form.pre_scale * _LOG2_E) - lse * _LOG2_E)
    d_s = p * (_scaled(d_p, form.post_scale) - delta)
  else:
    s = _scaled(s, form.pre_scale)
    p, d_s = form.activate(s), d_p * form.slope(s)

  def mask():
    seen = visible()
    return jnp.where(seen, p, 0.0), jnp.where(seen, d_s, 0.0)

  return lax.cond(masked, mask, lambda: (p, d_s))


def _score_scale(form: Form) -> float:
  """What d_q and d_k are multiplied by at the end. delta holds softmax's post_scale already."""
  return form.pre_scale if form.is_softmax else form.pre_scale * form.post_scale


def _scaled(x: jax.Array, scale: float) -> jax.Array:
  return x if scale == 1 else x * scale


def _zeros(width: int) -> jax.Array:
  return plgpu.layout_cast(jnp.zeros((rows.ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
