"""Changing the hidden neurons of a block and not what it computes: leaving out dead ones, sorting by firing rate.

y is a sum over neurons, so their order is free, and one that never fires may go. The counts come from calls with
`with_active` or from hidden values that the caller counts; they have to be known, since shapes follow from them.

Weights may have a leading axis of scanned layers, [layers, F, D] with counts [layers, F]. All layers then share one
width and one `hot`, because a scan has one shape.

Dimension key: D model width, F hidden neurons.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 256  # neurons that are computed densely together: a tile of the default Spec, so that the others stay aligned
# Non-zeros a token in a block from which on dense is faster: for 131072 tokens of D=2048 on an H200 (2026-11-30), a
# dense block costs 0.50 ms net of the packing that it saves, and a non-zero a token 0.124 ms in the gather. Both grow
# with D and with the number of projections, so that their ratio holds for other blocks.
_BREAK_EVEN = 4.0
_PADDING = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neurons:
  """The weights of a block with other neurons, or with the same in another order."""

  w_gate_FD: jax.Array | None  # None: a non-gated block
  w_up_FD: jax.Array
  w_down_FD: jax.Array
  order: np.ndarray  # i32[F] (or [layers, F]), the former place of each neuron; -1: a row of zeros, which never fires
  hot: int  # for the argument of that name

  def take(self, values: jax.Array | np.ndarray) -> jax.Array:
    """Brings anything with a row for each former neuron into the new order, such as counts; padding gets zeros.

    Raises:
      ValueError: values have fewer rows than there were neurons.
    """
    rows = values.shape[self.order.ndim - 1]
    if self.order.size and self.order.max() >= rows:
      raise ValueError(
        f"Neurons.take: values{values.shape} have {rows} rows, but neuron {self.order.max()} is among those kept; give"
        " a row for each neuron of before"
      )
    return _take(values, self.order)


def prune_dead(
  w_gate_FD: jax.Array | None,
  w_up_FD: jax.Array,
  w_down_FD: jax.Array,
  counts_F: jax.Array | np.ndarray,
  *,
  width: int | None = None,
  multiple: int = 128,
) -> Neurons:
  """Leaves out neurons that never fired, and keeps the others in their order.

  The block computes what it did for every finite token for which the neurons left out do not fire: those that were
  counted, and most likely their kind.

  Args:
    w_gate_FD: None for a non-gated block.
    w_up_FD: [F, D], or [layers, F, D] as the other weights.
    w_down_FD: row n belongs to neuron n.
    counts_F: for how many tokens each neuron fired, or whether it did; [F] or [layers, F].
    width: neurons of the result; None: as many as are live (in the layer that has most), rounded up to `multiple`.
    multiple: 128 is what the kernels ask for.

  Returns:
    Weights of `width` neurons, filled up with zeros behind the live ones.

  Raises:
    ValueError: shapes that do not fit together, counts below 0, or a width that does not hold the live neurons.
    TypeError: traced counts.
  """
  counts = _checked_counts("twell.prune_dead", w_gate_FD, w_up_FD, w_down_FD, counts_F)
  live = int(np.max(np.sum(counts > 0, axis=-1), initial=0))
  if multiple < 1:
    raise ValueError(f"twell.prune_dead: multiple={multiple} must be at least 1")
  if width is None:
    width = -(-max(live, 1) // multiple) * multiple
  if width < max(live, 1):
    raise ValueError(f"twell.prune_dead: width={width} must be at least 1 and hold the {live} neurons that fired")
  # Stable, so that the live ones keep their order; places past the end are padding, as are those of dead neurons.
  places = np.argsort(counts == 0, axis=-1, kind="stable").astype(np.int32)[..., :width]
  kept = np.where(np.take_along_axis(counts, places, axis=-1) > 0, places, _PADDING)
  missing = [(0, 0)] * (kept.ndim - 1) + [(0, width - kept.shape[-1])]
  return _reordered(w_gate_FD, w_up_FD, w_down_FD, np.pad(kept, missing, constant_values=_PADDING), hot=0)


def sort_neurons(
  w_gate_FD: jax.Array | None,
  w_up_FD: jax.Array,
  w_down_FD: jax.Array,
  counts_F: jax.Array | np.ndarray,
  num_tokens: int,
  *,
  hot: int | None = None,
) -> Neurons:
  """Sorts neurons by falling firing rate, so that the first `hot` of them are worth computing densely.

  Cost model: the dense blocks of 256 take from the sparse part as many non-zeros a token as their firing rates sum up
  to. A block pays if that is more than 4.0, in the mean over layers; rates fall, so the blocks that pay come first.

  Args:
    w_gate_FD: None for a non-gated block.
    w_up_FD: [F, D], or [layers, F, D] as the other weights.
    w_down_FD: row n belongs to neuron n.
    counts_F: for how many tokens each neuron fired; [F] or [layers, F]. Equal counts keep their order.
    num_tokens: how many tokens were counted, in each layer.
    hot: a multiple of 256; None: what the cost model says.

  Raises:
    ValueError: shapes that do not fit together, counts outside 0..num_tokens, or a `hot` that is no such multiple.
    TypeError: traced counts.
  """
  counts = _checked_counts("twell.sort_neurons", w_gate_FD, w_up_FD, w_down_FD, counts_F)
  if (most := np.max(counts, initial=0)) > num_tokens or num_tokens < 1:
    raise ValueError(
      f"twell.sort_neurons: num_tokens={num_tokens} must be at least 1 and the largest of counts_F, which is {most:g}"
    )
  order = np.argsort(-counts, axis=-1, kind="stable").astype(np.int32)
  num_neurons = counts.shape[-1]
  if hot is None:
    blocks = num_neurons // _BLOCK
    rates = np.atleast_2d(np.take_along_axis(counts, order, axis=-1))[:, : blocks * _BLOCK] / num_tokens
    non_zeros = rates.reshape(len(rates), blocks, _BLOCK).sum(axis=2).mean(axis=0)
    hot = _BLOCK * int(np.sum(non_zeros > _BREAK_EVEN))
  elif hot % _BLOCK or not 0 <= hot <= num_neurons:
    raise ValueError(f"twell.sort_neurons: hot={hot} must be a multiple of {_BLOCK} in 0..F={num_neurons}")
  return _reordered(w_gate_FD, w_up_FD, w_down_FD, order, hot)


def _checked_counts(op, w_gate_FD, w_up_FD, w_down_FD, counts_F) -> np.ndarray:
  """Returns counts as float64."""
  shape = w_up_FD.shape
  if len(shape) not in (2, 3):
    raise ValueError(f"{op}: w_up_FD must be [F, D] or [layers, F, D], got shape {shape}")
  for name, w in (("w_gate_FD", w_gate_FD), ("w_down_FD", w_down_FD)):
    if w is not None and w.shape != shape:
      raise ValueError(f"{op}: {name} has shape {w.shape} and w_up_FD has {shape}; all weights share F neurons")
  if isinstance(counts_F, jax.core.Tracer):
    raise TypeError(f"{op}: counts_F is traced, but its values decide the result's shape; call it outside of jit")
  counts = np.asarray(counts_F, np.float64)
  if counts.shape != shape[:-1]:
    raise ValueError(f"{op}: counts_F must have one count for each neuron, {shape[:-1]}, got shape {counts.shape}")
  if not np.all(counts >= 0):
    raise ValueError(f"{op}: counts_F must be at least 0, got {counts[~(counts >= 0)][0]:g}")
  return counts


def _reordered(w_gate_FD, w_up_FD, w_down_FD, order, hot) -> Neurons:
  return Neurons(
    w_gate_FD=None if w_gate_FD is None else _take(w_gate_FD, order),
    w_up_FD=_take(w_up_FD, order),
    w_down_FD=_take(w_down_FD, order),
    order=order,
    hot=hot,
  )


def _take(values: jax.Array | np.ndarray, order: np.ndarray) -> jax.Array:
  take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)  # zeros for places past the end
  places = np.where(order == _PADDING, values.shape[order.ndim - 1], order)
  return (take if order.ndim == 1 else jax.vmap(take))(jnp.asarray(values), jnp.asarray(places))
