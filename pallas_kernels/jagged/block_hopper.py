"""Block attention on Hopper: rows cut into blocks of 64 tokens, which see nothing but themselves.

A block and a head are an item; all it needs are its 64 queries, keys and values, so forward and backward read each
array once and write each result once, and memory bounds them. A warpgroup computes whole items by itself; several of
them, each with slots of its own, keep the memory busy, and one more loads.

An item begins at any token: copies go to shared memory as plain rows, in pieces as wide as a swizzle. So no block
reaches into the one before, and only the last block of a row holds tokens of others, behind its end. Where they would
be multiplied with a 0 they are cleared, so that what is not finite in them cannot reach this row.

The backward pass needs neither o nor sums: scores, and for softmax their sums, are computed anew, once with queries as
rows for dq, and once with keys as rows for dk and dv. Only numbers of a query change hands, through shared memory.

Dimension key: T tokens, H heads, K head width, P columns of a piece of it, Q queries and C keys of a block.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.jagged import common_hopper as common
from pallas_kernels.jagged import rows, schedule
from pallas_kernels.jagged.form import Form
from pallas_kernels.jagged.schedule import BLOCK, Field, TileList

_WARPGROUPS = 3  # that compute
_SMEM_BESIDE_SLOTS = 8 * 1024  # entries, numbers and barriers


@functools.partial(jax.jit, static_argnames=("form", "num_sms", "interpret"))
def forward(
  q_THK: jax.Array,
  k_THK: jax.Array,
  v_THK: jax.Array,
  blocks: TileList,
  form: Form,
  *,
  num_sms: int | None = None,
  interpret: bool = False,
) -> jax.Array:
  """o_THK, zeros for tokens in no row. The caller has checked shapes and dtypes."""
  return _launch("jagged_block", _attend, (q_THK, k_THK, v_THK), 1, blocks, form, num_sms, interpret)[0]


@functools.partial(jax.jit, static_argnames=("form", "num_sms", "interpret"))
def backward(
  q_THK, k_THK, v_THK, d_o_THK, blocks: TileList, turn: tuple, form: Form, *, num_sms=None, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(d_q_THK, d_k_THK, d_v_THK), zeros for tokens in no row; turn is empty, or what `Rotary` holds."""
  operands = q_THK, k_THK, v_THK, d_o_THK
  return _launch("jagged_block_gradients", _differentiate, operands, 3, blocks, form, num_sms, interpret, turn)


def _launch(name, compute, operands, num_results, blocks: TileList, form: Form, num_sms, interpret, turn=()) -> tuple:
  """`compute` of every item; its results have shape and dtype of the operands, and are turned back by `turn`."""
  num_sms = common.num_sms_of(num_sms, interpret=interpret)
  _, _, width = operands[0].shape
  piece = mosaic.swizzle_bytes(width) // 2
  bytes_of_item = len(operands) * BLOCK * width * 2
  # Items on their way: as many for each warpgroup as fit.
  slots = _WARPGROUPS * ((mosaic.SMEM_BYTES - _SMEM_BESIDE_SLOTS) // (_WARPGROUPS * bytes_of_item))
  slots_of_piece = mosaic.rows_operand((slots, BLOCK, piece), operands[0].dtype, interpret=interpret)
  # The interpreter's copies must not reach past the end of an array; on the GPU what lies there is read as zeros.
  pad = lambda a: jnp.pad(a, ((0, BLOCK * interpret), *((0, 0) for _ in a.shape[1:])))
  return mosaic.kernel(
    functools.partial(_kernel, compute=compute, form=form, slots=slots, num_sms=num_sms, interpret=interpret),
    out_type=tuple(jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype) for _ in range(num_results)),
    grid=(num_sms,),
    grid_names=("sm",),
    num_threads=_WARPGROUPS + 1,
    thread_name="wg",
    scratch_types=[
      [[slots_of_piece] * (width // piece)] * len(operands),
      plgpu.SMEM((slots, schedule.FIELDS), jnp.int32),
      plgpu.SMEM((_WARPGROUPS, 2, BLOCK), jnp.float32),
      plgpu.Barrier(num_arrivals=len(operands) * (width // piece) + 1, num_barriers=slots),
      plgpu.Barrier(num_barriers=slots),
    ],
    compiler_params=plgpu.CompilerParams(approx_math=True),
    kernel_name=name,
    interpret=interpret,
  )(tuple(map(pad, operands)), tuple(map(pad, turn)), *blocks)


def _kernel(
  operand_refs, turn_refs, tiles_ref, counts_ref, *refs, compute, form: Form, slots: int, num_sms: int, interpret: bool
):
  *out_refs, operand_smem, entry_smem, numbers_smem, full, free = refs
  views = [[mosaic.views(smem, interpret=interpret) for smem in of_operand] for of_operand in operand_smem]
  wg, sm = lax.axis_index("wg"), lax.axis_index("sm")
  items = common.Items(counts_ref[0], out_refs[0].shape[1], sm, num_sms)

  def load():
    plgpu.set_max_registers(32, action="decrease")

    def load_item(n, _):
      (entry, head), slot = items[n], lax.rem(n, slots)
      pl.when(n >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
      run = pl.ds(tiles_ref[entry, Field.TOKEN], BLOCK)
      for ref, of_operand in zip(operand_refs, views):
        for p, (rows_smem, _) in enumerate(of_operand):
          piece = rows_smem.shape[2]
          plgpu.copy_gmem_to_smem(ref.at[run, head, pl.ds(p * piece, piece)], rows_smem.at[slot], full.at[slot])
      plgpu.copy_gmem_to_smem(tiles_ref.at[entry], entry_smem.at[slot], full.at[slot])

    lax.fori_loop(0, items.number, load_item, None)
    common.wait_for_last(items.number, slots, free)

  def compute_items():
    plgpu.set_max_registers(160, action="increase")

    def compute_item(own, _):
      n = own * _WARPGROUPS + wg
      (_, head), slot = items[n], lax.rem(n, slots)
      plgpu.barrier_wait(full.at[slot])
      entry = common.read_entry(entry_smem, slot)
      operands = [[tiles_smem.at[slot] for _, tiles_smem in of_operand] for of_operand in views]
      item = _Item(form, head, entry[Field.TOKEN], entry[Field.END], numbers_smem.at[wg], interpret)

      def store(which: int, results: Iterable[jax.Array]) -> None:
        for p, result_QP in enumerate(results):
          place = head, item.token, item.token, item.end
          first_column = p * result_QP.shape[1]
          turn = turn_refs if which < 2 or form.turn_values else ()
          result_QP = rows.turned_back(
            result_QP, turn, item.token, item.end, first_column=first_column, interpret=interpret
          )
          rows.store(result_QP, out_refs[which], *place, first_column=first_column, interpret=interpret)

      compute(item, store, *operands)
      plgpu.commit_smem()  # what was read by plain loads will be overwritten by copies
      plgpu.barrier_arrive(free.at[slot])

    of_this = lax.div(items.number - wg + _WARPGROUPS - 1, _WARPGROUPS)
    lax.fori_loop(0, of_this, compute_item, None)
    for out_ref in out_refs:
      worker = _WARPGROUPS * sm + wg
      common.clear_tail(out_ref, counts_ref[1], worker, _WARPGROUPS * num_sms, interpret=interpret)

  lax.cond(wg < _WARPGROUPS, compute_items, load)


class _Item(NamedTuple):
  """A block of one head: tokens token <= t < end of it belong to the row."""

  form: Form
  head: jax.Array
  token: jax.Array
  end: jax.Array
  numbers_smem: Any
  interpret: bool

  def scores(self, a: list, b: list) -> jax.Array:
    """a b^T."""

    def multiply(acc):
      for a_QP, b_CP in zip(a, b):
        plgpu.wgmma(acc, a_QP, b_CP.transpose((1, 0)))
      return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((BLOCK, BLOCK), jnp.float32))

  def product(self, p_QC: jax.Array, b: list, scale: jax.Array | float) -> Iterator[jax.Array]:
    """scale * (p @ b), piece by piece; a scale for each query, or one number."""
    for b_CP in b:
      b_CP = rows.clear_others(b_CP, self._has_others, self.token, self.token, self.end, interpret=self.interpret)
      zeros_QP = plgpu.layout_cast(jnp.zeros(b_CP.shape, jnp.float32), plgpu.Layout.WGMMA)
      result_QP = mosaic.mma(zeros_QP, p_QC, b_CP, interpret=self.interpret)
      if isinstance(scale, jax.Array):
        scale_QP = lax.broadcast_in_dim(scale, result_QP.shape, [0])
        yield result_QP * scale_QP
      else:
        yield common.scaled(result_QP, scale)

  def where_own(self, x: jax.Array, value: float) -> jax.Array:
    """`value` for columns of other rows; rows of others are never stored."""

    def replace():
      column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=plgpu.Layout.WGMMA)
      return jnp.where(column < self.end - self.token, x, value)

    return lax.cond(self._has_others, replace, lambda: x)

  @property
  def _has_others(self):
    return self.token + BLOCK > self.end


def _attend(item: _Item, store, q: list, k: list, v: list) -> None:
  form, s_QC = item.form, item.scores(q, k)
  if not form.is_softmax:
    p_QC = item.where_own(form.activate_one(common.scores(form, s_QC, None), item.head), 0.0)
    store(0, item.product(p_QC.astype(q[0].dtype), v, form.post_scale))
    return
  s_QC = item.where_own(s_QC * (form.pre_scale * common.LOG2_E), -jnp.inf)
  p_QC = jnp.exp2(s_QC - _rows_of(s_QC.max(axis=1), s_QC))
  store(0, item.product(p_QC.astype(q[0].dtype), v, form.post_scale / p_QC.sum(axis=1)))


def _differentiate(item: _Item, store, q: list, k: list, v: list, d_o: list) -> None:
  form, dtype = item.form, q[0].dtype
  s_QC, d_p_QC = item.scores(q, k), item.where_own(item.scores(d_o, v), 0.0)
  if form.is_softmax:
    scale = form.pre_scale * common.LOG2_E
    s_QC = item.where_own(s_QC * scale, -jnp.inf)
    most_Q = s_QC.max(axis=1)
    lse_Q = most_Q + jnp.log2(jnp.exp2(s_QC - _rows_of(most_Q, s_QC)).sum(axis=1))
    p_QC, d_p_QC = jnp.exp2(s_QC - _rows_of(lse_Q, s_QC)), common.scaled(d_p_QC, form.post_scale)
    delta_Q = (p_QC * d_p_QC).sum(axis=1)
    d_s_QC = p_QC * (d_p_QC - _rows_of(delta_Q, s_QC))
    for n, numbers_Q in enumerate((lse_Q, delta_Q)):
      item.numbers_smem[n, :] = numbers_Q
  else:
    d_s_QC = item.where_own(d_p_QC * form.slope_one(common.scaled(s_QC, form.pre_scale), item.head), 0.0)
  store(0, item.product(d_s_QC.astype(dtype), k, common.score_scale(form)))

  # The same with keys as rows.
  s_CQ, d_p_CQ = item.scores(k, q), item.scores(v, d_o)
  if form.is_softmax:
    lse_CQ, delta_CQ = (
      lax.broadcast_in_dim(plgpu.load(item.numbers_smem.at[n], layout=plgpu.Layout.WGMMA.reduce(0)), s_CQ.shape, [1])
      for n in range(2)
    )
    p_CQ = item.where_own(jnp.exp2(s_CQ * scale - lse_CQ), 0.0)
    d_s_CQ = item.where_own(p_CQ * (common.scaled(d_p_CQ, form.post_scale) - delta_CQ), 0.0)
  else:
    s_CQ = common.scaled(s_CQ, form.pre_scale)
    p_CQ = item.where_own(form.activate_one(s_CQ, item.head), 0.0)
    d_s_CQ = item.where_own(d_p_CQ * form.slope_one(s_CQ, item.head), 0.0)
  store(2, item.product(p_CQ.astype(dtype), d_o, form.post_scale))
  store(1, item.product(d_s_CQ.astype(dtype), q, common.score_scale(form)))


def _rows_of(x_Q: jax.Array, like: jax.Array) -> jax.Array:
  return lax.broadcast_in_dim(x_Q, like.shape, [0])
