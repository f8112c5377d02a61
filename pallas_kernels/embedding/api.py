"""Public operations on embedding tables: argument checks, choice of implementation, derivatives.

Dimension key: V table rows, D row width, T ids, B bags.
"""

import functools
from types import ModuleType
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, row_offsets
from pallas_kernels.embedding import reference
from pallas_kernels.embedding.reference import Mode


def bag(
  table_VD: jax.Array,
  ids: jax.Array,
  offsets: jax.Array,
  weights: jax.Array | None = None,
  *,
  mode: Mode = "sum",
  sink: jax.Array | None = None,
  implementation: dispatch.Implementation | None = None,
) -> jax.Array:
  """Adds up rows of a table: out[b] = sum over offsets[b] <= t < offsets[b + 1] of weights[t] * table[ids[t]].

  A table has no gradient as an array: it would be as large as the table and nearly all zeros. Give a `sink` and
  differentiate with respect to it; its gradient is d_out, which the fused row updates take. `weights` have an
  ordinary gradient (in plain jnp, with a temporary of T x D); asking for one of `table_VD` raises.

  Args:
    table_VD: float32 or bfloat16; other floating types are served by the reference.
    ids: int32[T]. An id outside [0, V) adds nothing.
    offsets: int32[B + 1], from 0, never decreasing. Checked when concrete, which waits for the device. Tokens from
      offsets[-1] on are padding: whatever their ids and weights are, they change nothing.
    weights: float32[T], ones if None.
    mode: "sum", or "mean", which divides by the number of ids in the bag (also those that do not exist, and whatever
      the weights are). An empty bag is zeros in either mode.
    sink: float32[B, D] of zeros, a place for d_out. Its values are not read.
    implementation: "reference", "interpret", "hopper"; None takes "hopper" where it can serve, else "reference".

  Returns:
    out_BD in the dtype of the table, summed in float32.
  """
  ids, offsets = (x if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x) for x in (ids, offsets))
  _check(table_VD, ids, weights, mode)
  arrays = dict(table_VD=table_VD, ids=ids, offsets=offsets, weights=weights, sink=sink)
  arrays = {name: None if x is None else jnp.asarray(x) for name, x in arrays.items()}
  dispatch.refuse_sharded("embedding.bag", **arrays)
  row_offsets.check("embedding.bag", "offsets", offsets, ids.shape[0])
  out_shape = (offsets.shape[0] - 1, table_VD.shape[1])
  if sink is not None and (sink.shape != out_shape or sink.dtype != jnp.float32):
    raise ValueError(f"embedding.bag: sink must be float32{out_shape} like the result, got {sink.dtype}{sink.shape}")
  unsupported = lambda: _kernel().unsupported(table_VD.shape[1], table_VD.dtype)
  chosen = dispatch.choose("embedding.bag", implementation, unsupported)
  return _bag(mode, chosen, *arrays.values())


def _check(table_VD, ids, weights, mode) -> None:
  if table_VD.ndim != 2 or not jnp.issubdtype(table_VD.dtype, jnp.floating):
    raise TypeError(f"embedding.bag: table_VD must be floating [V, D], got {table_VD.dtype}{table_VD.shape}")
  if ids.dtype != jnp.int32:
    # Narrowing here would wrap: 2**32 + 3 would silently read row 3.
    raise TypeError(f"embedding.bag: ids must be int32, got {ids.dtype}; cast them where their range is known to fit")
  if ids.ndim != 1:
    raise ValueError(f"embedding.bag: ids must be one row of T ids, got shape {ids.shape}")
  if weights is not None and (weights.shape != ids.shape or weights.dtype != jnp.float32):
    raise ValueError(
      f"embedding.bag: weights must be float32{ids.shape}, one for each id, got {weights.dtype}{weights.shape}"
    )
  if mode not in get_args(Mode):
    raise ValueError(f"embedding.bag: mode={mode!r} must be one of {get_args(Mode)}")


def _kernel() -> ModuleType:
  from pallas_kernels.embedding import bag_hopper  # a second to import, and of no use on most machines

  return bag_hopper


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _bag(mode, implementation, table_VD, ids_T, offsets, weights_T, sink_BD):
  del sink_BD
  if implementation == "reference":
    return reference.bag(table_VD, ids_T, offsets, weights_T, mode)
  return _kernel().bag(table_VD, ids_T, offsets, weights_T, mode, interpret=implementation == "interpret")


def _bag_forward(mode, implementation, table_VD, ids_T, offsets, weights_T, sink_BD):
  if table_VD.perturbed:
    raise TypeError(
      f"embedding.bag: table_VD{table_VD.value.shape} has no dense gradient; differentiate with respect to `sink`"
      " (float32[B, D] zeros) to obtain d_out; jax.lax.stop_gradient keeps a table out that is among your parameters"
    )
  # The keys are part of the structure, hence known at trace time: what nobody asks for is neither kept nor computed.
  kept = {"sink": ()} if sink_BD is not None and sink_BD.perturbed else {}
  if weights_T is not None and weights_T.perturbed:
    kept["weights"] = (table_VD.value, ids_T.value, offsets.value)
  weights_T = None if weights_T is None else weights_T.value
  return _bag(mode, implementation, table_VD.value, ids_T.value, offsets.value, weights_T, None), kept


def _bag_backward(mode, implementation, kept, d_out_BD):
  del implementation  # the gradient of the weights is plain jnp in any case
  d_weights_T = reference.weights_gradient_T(*kept["weights"], d_out_BD, mode) if "weights" in kept else None
  d_sink_BD = d_out_BD.astype(jnp.float32) if "sink" in kept else None
  return None, None, None, d_weights_T, d_sink_BD


# With symbolic zeros the forward rule sees which arguments are differentiated, and can refuse the table.
_bag.defvjp(_bag_forward, _bag_backward, symbolic_zeros=True)
