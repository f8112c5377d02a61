"""The relative bias in the kernels: what is added to scores, and the gradient of its tables. No atomics.

Tables stay in memory and are read through the first-level cache: neighbouring pairs look at neighbouring places.

A block of the gradient's kernel has one warpgroup and histograms of its own in shared memory. Of a tile of d_s it adds
up each diagonal, by one thread, for the table of positions, and each pair to a number of the thread's own for that of
times; so every sum has one order. What the blocks have is summed at the end.

Dimension key: T tokens, S key tokens, H heads, G key heads, K head width, N longest row, Q queries and C keys of a
tile.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import mosaic, ptx
from pallas_kernels.jagged import bias as bias_tables
from pallas_kernels.jagged import common_hopper as common
from pallas_kernels.jagged import rows, schedule
from pallas_kernels.jagged.bias import RelativeBias
from pallas_kernels.jagged.form import Form
from pallas_kernels.jagged.schedule import BACKWARD_STEP as STEP
from pallas_kernels.jagged.schedule import Field, TileList

_WGMMA = plgpu.Layout.WGMMA
_BUCKETS = 72  # that a distance of 31 bits reaches
_BUCKETS_OF_A_DOUBLING = math.log(2) / bias_tables.BUCKET_WIDTH
_CONSTRAINTS = "=&f,=&r,f,r,r,l,l,l"
_STAGING = STEP + 1  # words of a row of a staged tile: its diagonals then lie in different banks


class Bias(NamedTuple):
  """What kernels read of it; everything lies in memory."""

  position: jax.Array  # f32[2 N - 1]
  time: jax.Array  # f32[129]
  last: jax.Array  # i32[130]: the largest distance below bucket 0, 1, ...
  requested: jax.Array  # i32[T]
  happened: jax.Array  # i32[T]

  @classmethod
  def of(cls, bias: RelativeBias, offsets: jax.Array) -> "Bias":
    """Of the rows with these offsets."""
    requested_T = bias_tables.requests(bias.timestamps, offsets)
    return cls(bias.position, bias.time, jnp.asarray(bias_tables.LAST_BELOW), requested_T, bias.timestamps)

  @property
  def center(self) -> int:
    """Place of a query's own position."""
    return (self.position.shape[0] - 1) // 2

  def adder(self, entry, first, other, *, queries: int, interpret: bool):
    """(s, unit) -> s + unit * bias, and the buckets of the times, for a tile whose axis `queries` is that of queries.

    The tile's own tokens, on axis 0, are those from the entry's token + first on, the others those from `other` on.
    NaN for pairs outside of the table of positions.
    """
    own = entry[Field.TOKEN] + first
    run = _add_in_arrays if interpret else _add
    return lambda s, unit: run(
      self, s, unit, own, own - entry[Field.BEGIN], other, other - entry[Field.OTHER_BEGIN], queries
    )


def most_places(width: int) -> int:
  """Of a table of positions whose gradient has room in shared memory."""
  operands, others = 6 * rows.ROWS * width * 2, 4 * (_BUCKETS * mosaic.LANES + rows.ROWS * _STAGING + 2 * rows.ROWS)
  alignment = 8 * 1024  # of as many buffers
  return (mosaic.SMEM_BYTES - operands - others - alignment) // (4 * mosaic.LANES) * mosaic.LANES


def add_to(bias: Bias | None, *tile, queries: int, interpret: bool):
  """`adder` without the buckets; None where there is no bias."""
  if bias is None:
    return None
  add = bias.adder(*tile, queries=queries, interpret=interpret)
  return lambda s, unit: add(s, unit)[0]


def _add_in_arrays(bias: Bias, s, unit: float, own, own_position, other, other_position, queries: int):
  """For the interpreter."""
  refs = (bias.requested, bias.happened) if queries == 0 else (bias.happened, bias.requested)
  times = [
    ref[...][jnp.clip(t + jnp.arange(size), 0, len(ref) - 1)] for ref, t, size in zip(refs, (own, other), s.shape)
  ]
  distance = jnp.abs(times[0][:, None] - times[1][None, :])
  bucket = jnp.searchsorted(bias.last[...][1:], distance.reshape(-1)).reshape(s.shape).astype(jnp.int32)
  positions = own_position + jnp.arange(s.shape[0])[:, None], other_position + jnp.arange(s.shape[1])[None, :]
  place = positions[1 - queries] - positions[queries] + bias.center
  place = jnp.where(place < 0, bias.position.shape[0], place)
  found = bias.position[...].at[place].get(mode="fill", fill_value=math.nan)
  return s + unit * (found + bias.time[...][bucket]), bucket


def _add(bias: Bias, s, unit: float, own, own_position, other, other_position, queries: int):
  """Pair by pair: whole arrays of places and distances would not fit into registers."""
  types = tuple(plgpu.ShapeDtypeStruct(s.shape, dtype, layout=_WGMMA) for dtype in (jnp.float32, jnp.int32))
  scalars = (plgpu.Layout.WG_SPLAT,) * 4

  @plgpu.inline_mgpu(arg_types=(_WGMMA, *scalars, *[plgpu.RefType()] * 5), return_type=types)
  def run(ctx, s, own, own_position, other, other_position, position, time, last, own_times, other_times):
    del ctx
    tokens, size = (ir.MemRefType(ref.type).shape[0] for ref in (own_times, position))
    position, time, last, own_times, other_times = map(
      ptx.global_address, (position, time, last, own_times, other_times)
    )
    own, own_position, other, other_position = map(ptx.scalar, (own, own_position, other, other_position))
    quad, row = ptx.quad_and_row()
    columns = arith.muli(quad, ptx.const(2))

    def time_of(times: ir.Value, token: ir.Value) -> ir.Value:
      token = arith.minsi(arith.maxsi(token, ptx.const(0)), ptx.const(tokens - 1))
      return ptx.asm((ptx.i32(),), [ptx.offset(times, token, 4)], "ld.global.nc.b32 $0, [$1];", "=r,l", pure=True)

    rows_of = [arith.addi(row, ptx.const(8 * half)) for half in range(2)]
    own_time = [time_of(own_times, arith.addi(own, r)) for r in rows_of]
    registers = s.registers.reshape(-1, 2)
    sums, buckets = np.empty_like(registers), np.empty_like(registers)
    for j in range(len(registers)):
      found = [[], []]
      for n in range(2):
        column = arith.addi(columns, ptx.const(8 * j + n))
        other_time = time_of(other_times, arith.addi(other, column))
        for half in range(2):
          positions = arith.addi(own_position, rows_of[half]), arith.addi(other_position, column)
          place = arith.addi(arith.subi(positions[1 - queries], positions[queries]), ptx.const(bias.center))
          operands = [ptx.element(registers[j, half], n), arith.subi(own_time[half], other_time), place]
          found[half].append(
            ptx.asm((ptx.f32(), ptx.i32()), [*operands, position, time, last], text(size), _CONSTRAINTS)
          )
      for half in range(2):
        for into, kind, which in ((sums, ptx.f32(), 0), (buckets, ptx.i32(), 1)):
          elements = [pair[which] for pair in found[half]]
          into[j, half] = vector.from_elements(ir.VectorType.get((2,), kind), elements)
    array = lambda registers, signed: mgpu.FragmentedArray(
      _registers=registers.reshape(s.registers.shape), _layout=s.layout, _is_signed=signed
    )
    return array(sums, None), array(buckets, True)

  def text(size: int) -> str:
    """A logarithm says which bucket it nearly is, and the table whether it is the one above or below."""
    return (
      "{.reg .pred p; .reg .f32 f, g; .reg .b32 d, l; .reg .b64 a; abs.s32 d, $3; max.s32 d, d, 0; max.s32 l, d, 1;"
      f"cvt.rn.f32.s32 f, l; lg2.approx.f32 f, f; mul.f32 f, f, {ptx.f32_bits(_BUCKETS_OF_A_DOUBLING)};"
      "cvt.rzi.s32.f32 $1, f; mad.wide.s32 a, $1, 4, $7;"
      "ld.global.nc.b32 l, [a+4]; setp.gt.s32 p, d, l; @p add.s32 $1, $1, 1;"
      "ld.global.nc.b32 l, [a]; setp.le.s32 p, d, l; @p sub.s32 $1, $1, 1;"
      "mad.wide.s32 a, $1, 4, $6; ld.global.nc.f32 f, [a];"
      f"mov.b32 g, {ptx.f32_bits(math.nan)}; setp.lt.u32 p, $4, {size}; mad.wide.s32 a, $4, 4, $5;"
      "@p ld.global.nc.f32 g, [a]; add.f32 f, f, g;"
      f"fma.rn.f32 $0, f, {ptx.f32_bits(unit)}, $2;}}"
    )

  times = (bias.requested, bias.happened) if queries == 0 else (bias.happened, bias.requested)
  return run(s, own, own_position, other, other_position, bias.position, bias.time, bias.last, *times)


@functools.partial(jax.jit, static_argnames=("form", "num_sms", "interpret"))
def table_gradients(
  q_THK,
  k_SGK,
  v_SGK,
  d_o_THK,
  lse_HT,
  delta_HT,
  tiles: TileList,
  bias: Bias,
  form: Form,
  *,
  num_sms=None,
  interpret=False,
) -> tuple[jax.Array, jax.Array]:
  """(d_position, d_time), as the tables are; lse and delta are None without softmax.

  Args:
    q_THK: and the others as for the backward kernels.
    k_SGK: likewise.
    v_SGK: likewise.
    d_o_THK: likewise.
    lse_HT: likewise.
    delta_HT: likewise.
    tiles: of a schedule, those of the gradient of q.
    bias: what was added.
    form: what was computed.
    num_sms: one block runs on each; None: those of the device.
    interpret: run in Mosaic's interpreter.
  """
  num_sms = common.num_sms_of(num_sms, interpret=interpret)
  width, dtype, places = q_THK.shape[2], q_THK.dtype, -(-len(bias.position) // mosaic.LANES) * mosaic.LANES
  reach = schedule.TILE * interpret  # copies that reach past the end of an array are not for the interpreter
  pad = functools.partial(common.padded, reach=reach)
  sums = () if lse_HT is None else (pad(lse_HT, axis=1), pad(delta_HT, axis=1))
  operand = functools.partial(plgpu.SMEM, dtype=dtype, transforms=mosaic.operand_transforms(width))
  d_position, d_time = mosaic.kernel(
    functools.partial(_kernel, form=form, num_sms=num_sms, interpret=interpret),
    out_type=(
      jax.ShapeDtypeStruct((num_sms, places // mosaic.LANES, mosaic.LANES), jnp.float32),
      jax.ShapeDtypeStruct((num_sms, _BUCKETS, mosaic.LANES), jnp.float32),
    ),
    grid=(num_sms,),
    grid_names=("sm",),
    scratch_types=[
      [operand((rows.ROWS, width))] * 2,
      [operand((2, STEP, width))] * 2,
      [plgpu.SMEM((rows.ROWS,), jnp.float32)] * len(sums),
      plgpu.SMEM((rows.ROWS * _STAGING,), jnp.float32),
      plgpu.SMEM((places // mosaic.LANES, mosaic.LANES), jnp.float32),
      plgpu.SMEM((_BUCKETS, mosaic.LANES), jnp.float32),
      plgpu.Barrier(num_arrivals=2 + len(sums)),
      plgpu.Barrier(num_arrivals=2, num_barriers=2),
    ],
    compiler_params=plgpu.CompilerParams(approx_math=True),
    kernel_name="jagged_table_gradients",
    interpret=interpret,
  )((pad(q_THK), pad(d_o_THK)), (pad(k_SGK), pad(v_SGK)), sums, bias, *tiles)
  scale = 1.0 if form.is_softmax else form.post_scale
  d_position = scale * jnp.sum(d_position, axis=0).reshape(-1)[: len(bias.position)]
  d_time = scale * jnp.sum(d_time, axis=(0, 2))
  return d_position, jnp.pad(d_time, (0, len(bias.time) - _BUCKETS))


def _kernel(
  item_refs, step_refs, sum_refs, bias: Bias, tiles_ref, counts_ref, d_position_ref, d_time_ref, item_smem, step_smem,
  sum_smem, staging_smem, places_smem, times_smem, item_full, step_full, *, form: Form, num_sms: int, interpret: bool,
):  # fmt: skip
  sm, heads = lax.axis_index("sm"), item_refs[0].shape[1]
  group = heads // step_refs[0].shape[1]
  items = common.Items(counts_ref[0], heads, sm, num_sms)
  for smem in (places_smem, times_smem):
    strided = plgpu.Layout.WG_STRIDED(smem.shape, vec_size=1)
    smem[...] = plgpu.layout_cast(jnp.zeros(smem.shape, jnp.float32), strided)

  def compute_half(n, step):
    """Of an item's tile: 64 queries of one head, against all steps of keys."""
    entry_number, head = items[lax.div(n, 2)]
    entry = {field: tiles_ref[entry_number, field] for field in Field}
    first = lax.rem(n, 2) * rows.ROWS
    own = pl.ds(pl.multiple_of(entry[Field.TOKEN] + first, schedule.ALIGNMENT), rows.ROWS)
    plgpu.commit_smem()  # what is there has been read
    for ref, smem in zip(item_refs, item_smem):
      plgpu.copy_gmem_to_smem(ref.at[own, head], smem, item_full)
    for ref, smem in zip(sum_refs, sum_smem):
      plgpu.copy_gmem_to_smem(ref.at[head, own], smem, item_full)

    def load(t):
      slot = lax.rem(step + t, 2)
      run = pl.ds(pl.multiple_of(entry[Field.OTHER_TOKEN] + t * STEP, schedule.ALIGNMENT), STEP)
      for ref, smem in zip(step_refs, step_smem):
        plgpu.copy_gmem_to_smem(ref.at[run, lax.div(head, group)], smem.at[slot], step_full.at[slot])

    load(0)
    plgpu.barrier_wait(item_full)
    sums = [plgpu.load(smem, layout=_WGMMA.reduce(1)) for smem in sum_smem]

    def compute_step(t, _):
      slot = lax.rem(step + t, 2)
      plgpu.commit_smem()
      pl.when(t + 1 < entry[Field.STEPS])(lambda: load(t + 1))
      plgpu.barrier_wait(step_full.at[slot])
      (q_smem, d_o_smem), (k_smem, v_smem) = item_smem, [smem.at[slot] for smem in step_smem]
      s_QC, d_p_QC = common.two_products((q_smem, k_smem), (d_o_smem, v_smem))
      key = entry[Field.OTHER_TOKEN] + t * STEP
      tile = entry, first, key, s_QC.shape
      buckets = []

      def add(s_QC, unit):
        s_QC, bucket_QC = bias.adder(*tile[:3], queries=0, interpret=interpret)(s_QC, unit)
        buckets.append(bucket_QC)
        return s_QC

      visible = lambda: common.visible(form, *tile, queries=0)
      _, d_s_QC = common.weights_and_gradient(
        form, head, s_QC, add, d_p_QC, sums, common.is_masked(entry, t), visible, queries=0
      )
      # What other tokens of the tile do to the query gradient is not stored; here it would be added.
      token_QC = plgpu.broadcasted_iota(jnp.int32, s_QC.shape, 0, layout=_WGMMA) + (entry[Field.TOKEN] + first)
      d_s_QC = jnp.where((token_QC >= entry[Field.BEGIN]) & (token_QC < entry[Field.END]), d_s_QC, 0.0)
      to_place = (key - entry[Field.OTHER_BEGIN]) - (entry[Field.TOKEN] + first - entry[Field.BEGIN]) + bias.center
      histograms = staging_smem, places_smem, times_smem
      _accumulate(d_s_QC, *buckets, to_place, *histograms, bias.position.shape[0], interpret=interpret)

    lax.fori_loop(0, entry[Field.STEPS], compute_step, None)
    return step + entry[Field.STEPS]

  lax.fori_loop(0, 2 * items.number, compute_half, jnp.int32(0))
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(places_smem, d_position_ref.at[sm])
  plgpu.copy_smem_to_gmem(times_smem, d_time_ref.at[sm])
  plgpu.wait_smem_to_gmem(0)


def _accumulate(
  d_s_QC, bucket_QC, to_place, staging_smem, places_smem, times_smem, size: int, *, interpret: bool
) -> None:
  """Adds a tile to the histograms; `to_place` is the place of its first pair, and those outside are dropped."""
  if interpret:
    place_QC = to_place + jnp.arange(STEP)[None, :] - jnp.arange(rows.ROWS)[:, None]
    inside_QC = (place_QC >= 0) & (place_QC < size)
    flat = places_smem[...].reshape(-1)
    flat = flat.at[jnp.where(inside_QC, place_QC, len(flat))].add(d_s_QC, mode="drop")
    places_smem[...] = flat.reshape(places_smem.shape)
    times_smem[...] = times_smem[...].at[bucket_QC, 0].add(d_s_QC)
    return

  @plgpu.inline_mgpu(
    arg_types=(_WGMMA, _WGMMA, plgpu.Layout.WG_SPLAT, plgpu.RefType(), plgpu.RefType(), plgpu.RefType()),
    return_type=None,
  )
  def run(ctx, d_s, bucket, to_place, staging, places, times):
    del ctx
    staging, places, times = map(ptx.shared_address, (staging, places, times))
    thread = ptx.thread_of_warpgroup()
    quad, row = ptx.quad_and_row()
    own_times, own_staging = ptx.offset(times, thread, 4), ptx.offset(ptx.offset(staging, row, 4 * _STAGING), quad, 8)
    values, buckets = d_s.registers.reshape(-1, 2), bucket.registers.reshape(-1, 2)
    for (j, half), pair in np.ndenumerate(values):
      for n in range(2):
        value, at = ptx.element(pair, n), ptx.element(buckets[j, half], n)
        add = "{.reg .f32 t; ld.shared.f32 t, [$0]; add.f32 t, t, $1; st.shared.f32 [$0], t;}"
        ptx.asm((), [ptx.offset(own_times, at, 4 * mosaic.LANES), value], add, "r,f")
        place = 4 * (half * 8 * _STAGING + 8 * j + n)
        ptx.asm((), [own_staging, value], f"st.shared.f32 [$0+{place}], $1;", "r,f")
    mgpu.utils.warpgroup_barrier()
    # Thread n adds up the diagonal of key - query = n - 63, from the first query that has it to the last.
    diagonal = arith.subi(thread, ptx.const(rows.ROWS - 1))
    first = arith.maxsi(arith.subi(ptx.const(0), diagonal), ptx.const(0))
    last = arith.minsi(arith.subi(ptx.const(STEP), diagonal), ptx.const(rows.ROWS))
    start = ptx.offset(staging, diagonal, 4)

    def add_one(query, carry):
      address = ptx.offset(start, query, 4 * (_STAGING + 1))
      value = ptx.asm((ptx.f32(),), [address], "ld.shared.f32 $0, [$1];", "=f,r")
      return [arith.addf(carry[0], value)]

    (total,) = ptx.for_each(first, last, 1, add_one, [ptx.const_f32(0.0)])
    place = arith.addi(ptx.scalar(to_place), diagonal)
    inside = arith.andi(
      arith.cmpi(arith.CmpIPredicate.ult, place, ptx.const(size)), arith.cmpi(arith.CmpIPredicate.slt, first, last)
    )
    add = "{.reg .f32 t; @$2 ld.shared.f32 t, [$0]; @$2 add.f32 t, t, $1; @$2 st.shared.f32 [$0], t;}"
    ptx.asm((), [ptx.offset(places, place, 4), total, inside], add, "r,f,b")
    mgpu.utils.warpgroup_barrier()
    return []

  run(d_s_QC, bucket_QC, to_place, staging_smem, places_smem, times_smem)
