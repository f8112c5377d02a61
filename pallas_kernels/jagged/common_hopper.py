"""What the kernels of the attention family share: items and their entries, masks, scores and weights, ends of loops.

Dimension key: Q queries, C keys.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.jagged import rows, schedule
from pallas_kernels.jagged.form import Form
from pallas_kernels.jagged.schedule import BACKWARD_STEP, Field

ITEMS = 2  # of a block that are there: one is used, one arrives
LOG2_E = math.log2(math.e)
_SMS_OF_A_TEST = 2  # the interpreter has no device to ask


def num_sms_of(num_sms: int | None, *, interpret: bool) -> int:
  """As many as asked for; None: those of the device, which must then be there."""
  if num_sms is not None:
    return num_sms
  return _SMS_OF_A_TEST if interpret else device.num_sms()


class Items:
  """The items of an SM: entries of a schedule, each once for every head."""

  def __init__(self, entries, heads: int, sm, num_sms: int):
    self._heads, self._sm, self._num_sms = heads, sm, num_sms
    self.number = schedule.items_of(sm, entries * heads, num_sms)

  def __getitem__(self, n):
    """(entry of the schedule, head) of the n-th item."""
    place = schedule.nth(n, self._sm, self._num_sms)
    return lax.div(place, self._heads), lax.rem(place, self._heads)


def read_entry(entry_smem, slot) -> dict:
  """The fields of the item in `slot`."""
  return {field: entry_smem[slot, field] for field in Field}


def is_masked(entry, t):
  """Whether step t may hold a pair that is not visible."""
  return (t < entry[Field.PLAIN_FROM]) | (t >= entry[Field.PLAIN_TO])


def visible(form: Form, entry, first, other, shape: tuple[int, int], *, queries: int) -> jax.Array:
  """bool of `shape`: pairs of the tile's tokens from `first` on, and those of the other side from token `other` on.

  `queries` is the axis of the queries; the tile's tokens are axis 0.
  """
  of = lambda axis: plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
  own = of(0) + (entry[Field.TOKEN] + first - entry[Field.BEGIN])
  others = of(1) + (other - entry[Field.OTHER_BEGIN])
  inside = (others >= 0) & (others < entry[Field.OTHER_END] - entry[Field.OTHER_BEGIN])
  i, j = (own, others) if queries == 0 else (others, own)
  seen = form.mask.visible(i, j, entry[Field.HISTORY])
  return inside if seen is None else inside & seen


def clear_others(operand_smem, masked, other, entry, *, interpret: bool):
  """The operand of a step whose first token is `other`; in a masked one, zeros for the tokens of other rows."""
  row = entry[Field.OTHER_BEGIN], entry[Field.OTHER_END]
  return rows.clear_others(operand_smem, masked, other, *row, interpret=interpret)


def clear_tail(out_ref, begin, worker, workers: int, *, interpret: bool) -> None:
  """Zeros for the tokens from `begin` on, which belong to no row; the warpgroups of all SMs share them."""
  num_tokens, heads, width = out_ref.shape
  pieces = lax.div(num_tokens - begin + rows.ROWS - 1, rows.ROWS) * heads

  def clear(n, _):
    piece = worker + n * workers
    zeros = plgpu.layout_cast(jnp.zeros((rows.ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
    token = begin + lax.div(piece, heads) * rows.ROWS
    rows.store(zeros, out_ref, lax.rem(piece, heads), token, begin, num_tokens, interpret=interpret)

  lax.fori_loop(0, lax.div(jnp.maximum(pieces - worker + workers - 1, 0), workers), clear, None)


def padded(a: jax.Array, reach: int, *, axis: int = 0) -> jax.Array:
  """With zeros behind the tokens on `axis`: copies take whole swizzle tiles of them; and `reach` more."""
  widths = [(0, 0)] * a.ndim
  widths[axis] = 0, -a.shape[axis] % schedule.ALIGNMENT + reach
  return jnp.pad(a, widths)


def score_scale(form: Form) -> float:
  """What gradients of q and k are multiplied by at the end; softmax's d_p and delta hold post_scale already."""
  return form.pre_scale if form.is_softmax else form.pre_scale * form.post_scale


def scaled(x: jax.Array, scale: float) -> jax.Array:
  """x * scale."""
  return x if scale == 1 else x * scale


def two_products(first, second) -> tuple[jax.Array, jax.Array]:
  """a b^T of two pairs of operands, f32[Q, C] each."""

  def multiply(acc_a, acc_b):
    for acc, (a, b) in ((acc_a, first), (acc_b, second)):
      plgpu.wgmma(acc, a, b.transpose((1, 0)))
    return acc_a[...], acc_b[...]

  acc = plgpu.ACC((rows.ROWS, BACKWARD_STEP), jnp.float32)
  return pl.run_scoped(multiply, acc, acc)


def scores(form: Form, products, add_bias) -> jax.Array:
  """What the activation is of, or for softmax what exp2 is of; add_bias is None, or (s, unit) -> s + unit * bias."""
  unit = LOG2_E if form.is_softmax else 1.0
  s = scaled(products, form.pre_scale * unit)
  return s if add_bias is None else add_bias(s, unit)


def weights_and_gradient(
  form: Form, head, products, add_bias, d_p, sums, masked, visible, *, queries: int
) -> tuple[jax.Array, jax.Array]:
  """p, and d_s without the scales that `score_scale` holds; 0 for pairs that a masked step does not see."""
  s = scores(form, products, add_bias)
  if form.is_softmax:
    lse, delta = (lax.broadcast_in_dim(x, s.shape, [queries]) for x in sums)
    p = jnp.exp2(s - lse * LOG2_E)
    d_s = p * (scaled(d_p, form.post_scale) - delta)
  else:
    p, d_s = form.activate_one(s, head), d_p * form.slope_one(s, head)

  def mask():
    seen = visible()
    return jnp.where(seen, p, 0.0), jnp.where(seen, d_s, 0.0)

  return lax.cond(masked, mask, lambda: (p, d_s))


def wait_for_last(number, slots: int, *barriers) -> None:
  """Waits for the releases that no later copy has waited for: the interpreter wants to see all of them."""

  def wait(n, _):
    for barrier in barriers:
      plgpu.barrier_wait(barrier.at[lax.rem(n, slots)])

  lax.fori_loop(jnp.maximum(number - slots, 0), number, wait, None)
