"""o = p v on Hopper, for every member of the attention family: persistent blocks, two multiplying warpgroups and one
that loads.

A block takes items of the schedule, each a tile of 128 queries of one row and one head. The loading warpgroup runs
ahead through the steps of all its items, so that short rows do not drain the pipeline. The other two have 64 queries
each and take turns: while one is busy with its scores, the tensor cores work for the other (as in FlashAttention-3).

Only steps that hold a pair that is not visible are masked; there the values of other tokens are cleared, so that what
is not finite in them cannot reach this row through a product with 0.

Dimension key: T query tokens, S key tokens, H query heads, G key heads, K head width, Q queries of a warpgroup, C keys
of a step, N tiles.
"""

import dataclasses
import functools

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
from pallas_kernels.jagged.schedule import FORWARD_STEP as STEP
from pallas_kernels.jagged.schedule import TILE, Field, TileList

_LOWEST = -1e30  # below any score; -inf could not be subtracted from itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  stages: int = 2  # steps of keys and values on their way

  def smem_bytes(self, width: int) -> int:
    """Queries, keys and values, entries of the schedule, barriers."""
    queries, keys = common.ITEMS * TILE * width * 2, self.stages * STEP * width * 2
    return queries + 2 * keys + common.ITEMS * schedule.FIELDS * 4 + 8 * (2 * common.ITEMS + 4 * self.stages + 1)


@functools.partial(jax.jit, static_argnames=("form", "config", "num_sms", "interpret"))
def forward(
  q_THK: jax.Array,
  k_SGK: jax.Array,
  v_SGK: jax.Array,
  tiles: TileList,
  form: Form,
  bias: Bias | None = None,
  *,
  config: Config = Config(),
  num_sms: int | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  """o_THK, zeros for tokens in no row, and for softmax lse_HT, which has no value there.

  The caller has checked shapes and dtypes.

  Args:
    q_THK: queries.
    k_SGK: keys.
    v_SGK: values.
    tiles: of a schedule, those of the forward pass.
    form: what is computed.
    bias: what is added to scores.
    config: speed alone.
    num_sms: one block runs on each; None: those of the device, which must then be there.
    interpret: run in Mosaic's interpreter.
  """
  heads, width = q_THK.shape[1:]
  mosaic.check_smem(f"jagged.attention {config}, K={width}", config.smem_bytes(width))
  num_sms = common.num_sms_of(num_sms, interpret=interpret)
  # The interpreter has no copies that reach past the end of an array.
  pad = lambda a, tile: common.padded(a, tile * interpret)
  transforms = mosaic.operand_transforms(width)
  outs = [jax.ShapeDtypeStruct(q_THK.shape, q_THK.dtype)]
  if form.is_softmax:
    outs.append(jax.ShapeDtypeStruct((heads, len(q_THK)), jnp.float32))
  o_THK, *lse_HT = mosaic.kernel(
    functools.partial(_kernel, form=form, stages=config.stages, num_sms=num_sms, interpret=interpret),
    out_type=tuple(outs),
    grid=(num_sms,),
    grid_names=("sm",),
    num_threads=3,
    thread_name="wg",
    scratch_types=[
      plgpu.SMEM((common.ITEMS, 2, rows.ROWS, width), q_THK.dtype, transforms=transforms),
      plgpu.SMEM((config.stages, STEP, width), q_THK.dtype, transforms=transforms),
      plgpu.SMEM((config.stages, STEP, width), q_THK.dtype, transforms=transforms),
      plgpu.SMEM((common.ITEMS, schedule.FIELDS), jnp.int32),
      plgpu.Barrier(num_arrivals=3, num_barriers=common.ITEMS),
      plgpu.Barrier(num_arrivals=2, num_barriers=common.ITEMS),
      plgpu.Barrier(num_barriers=config.stages),
      plgpu.Barrier(num_barriers=config.stages),
      plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
      plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
      plgpu.Barrier(num_arrivals=2),
    ],
    compiler_params=plgpu.CompilerParams(approx_math=True),
    kernel_name="jagged_attention",
    interpret=interpret,
  )(pad(q_THK, TILE), pad(k_SGK, STEP), pad(v_SGK, STEP), bias, *tiles)
  return o_THK, lse_HT[0] if lse_HT else None


def _kernel(
  q_ref, k_ref, v_ref, bias: Bias | None, tiles_ref, counts_ref, o_ref, *rest, form: Form, stages, num_sms, interpret
):
  *lse_ref, q_smem, k_smem, v_smem, entry_smem, q_full, q_free, k_full, v_full, k_free, v_free, turn = rest
  wg, sm = lax.axis_index("wg"), lax.axis_index("sm")
  heads, width = o_ref.shape[1:]
  items = common.Items(counts_ref[0], heads, sm, num_sms)
  group = heads // k_ref.shape[1]  # query heads of a key head

  def load():
    plgpu.set_max_registers(40, action="decrease")

    def load_item(n, step):
      (entry, head), slot = items[n], lax.rem(n, common.ITEMS)
      pl.when(n >= common.ITEMS)(lambda: plgpu.barrier_wait(q_free.at[slot]))
      token = pl.multiple_of(tiles_ref[entry, Field.TOKEN], schedule.ALIGNMENT)
      for w in range(2):
        own = pl.ds(token + w * rows.ROWS, rows.ROWS)
        plgpu.copy_gmem_to_smem(q_ref.at[own, head], q_smem.at[slot, w], q_full.at[slot])
      plgpu.copy_gmem_to_smem(tiles_ref.at[entry], entry_smem.at[slot], q_full.at[slot])
      key = pl.multiple_of(tiles_ref[entry, Field.OTHER_TOKEN], schedule.ALIGNMENT)

      def load_step(t, step):
        stage, own = lax.rem(step, stages), (pl.ds(key + t * STEP, STEP), lax.div(head, group))
        for ref, smem, full, free in ((k_ref, k_smem, k_full, k_free), (v_ref, v_smem, v_full, v_free)):
          pl.when(step >= stages)(lambda free=free: plgpu.barrier_wait(free.at[stage]))
          plgpu.copy_gmem_to_smem(ref.at[own], smem.at[stage], full.at[stage])
        return step + 1

      return lax.fori_loop(0, tiles_ref[entry, Field.STEPS], load_step, step)

    steps = lax.fori_loop(0, items.number, load_item, jnp.int32(0))
    common.wait_for_last(items.number, common.ITEMS, q_free)
    common.wait_for_last(steps, stages, k_free, v_free)

  def compute():
    plgpu.set_max_registers(232, action="increase")

    def meet():
      plgpu.barrier_arrive(turn)
      plgpu.barrier_wait(turn)

    pl.when(wg == 1)(meet)  # from here on half a step behind

    def compute_item(n, step):
      (_, head), slot = items[n], lax.rem(n, common.ITEMS)
      plgpu.barrier_wait(q_full.at[slot])
      entry = common.read_entry(entry_smem, slot)
      first = wg * rows.ROWS
      q = q_smem.at[slot, wg]

      def compute_step(t, carry):
        stage = lax.rem(step + t, stages)
        plgpu.barrier_wait(k_full.at[stage])

        def scores(acc):
          plgpu.wgmma(acc, q, k_smem.at[stage].transpose((1, 0)))
          meet()
          return acc[...]

        s_QC = pl.run_scoped(scores, plgpu.ACC((rows.ROWS, STEP), jnp.float32))
        plgpu.barrier_arrive(k_free.at[stage])
        masked = common.is_masked(entry, t)
        key = entry[Field.OTHER_TOKEN] + t * STEP
        visible = lambda: common.visible(form, entry, first, key, s_QC.shape, queries=0)
        add_bias = add_to(bias, entry, first, key, queries=0, interpret=interpret)
        p_QC, carry = _weights(form, head, common.scores(form, s_QC, add_bias), carry, masked, visible)
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(v_full.at[stage])
        plgpu.barrier_wait(turn)
        o_QK, *sums = carry
        v_CK = common.clear_others(v_smem.at[stage], masked, key, entry, interpret=interpret)
        o_QK = mosaic.mma(o_QK, p_QC.astype(q_ref.dtype), v_CK, interpret=interpret)
        plgpu.barrier_arrive(v_free.at[stage])
        return o_QK, *sums

      o_QK = plgpu.layout_cast(jnp.zeros((rows.ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
      row_of = lambda value: plgpu.layout_cast(jnp.full((rows.ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
      sums = [row_of(_LOWEST), row_of(0.0)] if form.is_softmax else []
      o_QK, *sums = lax.fori_loop(0, entry[Field.STEPS], compute_step, (o_QK, *sums))
      plgpu.commit_smem()  # the entry was read by plain loads, and a copy will overwrite it
      plgpu.barrier_arrive(q_free.at[slot])
      place = head, entry[Field.TOKEN] + first, entry[Field.BEGIN], entry[Field.END]
      if form.is_softmax:
        most_Q, total_Q = sums
        lse_Q = (most_Q + jnp.log2(total_Q)) / common.LOG2_E
        rows.store_numbers(lse_Q, lse_ref[0], *place, interpret=interpret)
        o_QK = o_QK * lax.broadcast_in_dim(1 / jnp.where(total_Q == 0, 1.0, total_Q), o_QK.shape, [0])
      if form.post_scale != 1:
        o_QK = o_QK * form.post_scale
      rows.store(o_QK, o_ref, *place, interpret=interpret)
      return step + entry[Field.STEPS]

    lax.fori_loop(0, items.number, compute_item, jnp.int32(0))
    pl.when(wg == 0)(meet)
    common.clear_tail(o_ref, counts_ref[1], 2 * sm + wg, 2 * num_sms, interpret=interpret)

  lax.cond(wg < 2, compute, load)


def _weights(form: Form, head, s_QC, carry, masked, visible):
  """p_QC before it is scaled, and the carry for it: what was summed so far, in the scale of the new maxima."""
  replace = lambda x_QC, value: lax.cond(masked, lambda: jnp.where(visible(), x_QC, value), lambda: x_QC)
  if not form.is_softmax:
    return replace(form.activate_one(s_QC, head), 0.0), carry
  o_QK, most_Q, total_Q = carry
  rows_of = lambda x_Q, like: lax.broadcast_in_dim(x_Q, like.shape, [0])
  s_QC = replace(s_QC, -jnp.inf)
  new_Q = jnp.maximum(most_Q, s_QC.max(axis=1))
  kept_Q = jnp.exp2(most_Q - new_Q)
  p_QC = jnp.exp2(s_QC - rows_of(new_Q, s_QC))
  return p_QC, (o_QK * rows_of(kept_Q, o_QK), new_Q, total_Q * kept_Q + p_QC.sum(axis=1))
