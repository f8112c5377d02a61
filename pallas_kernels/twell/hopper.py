"""The feed-forward block on Hopper: the kernels joined, the routes, what does not fit.

Dimension key: M tokens, D model width, F hidden neurons, S words of a tile.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.twell import (
  active_hopper,
  decode_hopper,
  gather_hopper,
  gradient_hopper,
  gradients,
  pack_hopper,
  reference,
  routing,
)
from pallas_kernels.twell import kept as kept_lists
from pallas_kernels.twell.format import Spec, Twell
from pallas_kernels.twell.gradients import Weights
from pallas_kernels.twell.kept import Kept
from pallas_kernels.twell.reference import Sums
from pallas_kernels.twell.routing import DENSE, SPARSE

_MAX_WIDTH = 8192  # what the four warps of a warpgroup hold of one token


def unsupported(dtype, num_neurons: int, width: int, spec: Spec) -> str | None:
  """Why the kernels cannot serve such arguments, or None if they can."""
  if dtype not in (jnp.bfloat16, jnp.float16):
    return f"{jnp.dtype(dtype).name} is neither bfloat16 nor float16"
  if dtype != spec.value_dtype:
    return f"x is {jnp.dtype(dtype).name}, but the values of {spec} are {spec.value_dtype.name}"
  if spec.tile != pack_hopper.TILE:
    return f"tiles of {spec.tile} columns; the kernel's have {pack_hopper.TILE}"
  if spec.compression not in (2, 4, 8):
    return f"compression={spec.compression}; the kernel has 2, 4 and 8"
  if num_neurons == 0 or num_neurons % 128:
    return f"F={num_neurons} neurons are no positive multiple of 128; pad the weights with zero rows"
  if width == 0 or width % 128:
    return f"model width D={width} is no positive multiple of 128; pad x and the weights with zero columns"
  if width > _MAX_WIDTH:
    return f"model width D={width} is above {_MAX_WIDTH}"
  return None


def pack(x_MD: jax.Array, w_FD: jax.Array, spec: Spec, *, interpret: bool) -> Twell:
  """relu(x @ w.T), packed."""
  return Twell(pack_hopper.pack(x_MD, w_FD, spec, interpret=interpret), spec, w_FD.shape[0])


def feedforward(
  x_MD: jax.Array,
  w_gate_FD: jax.Array | None,
  w_up_FD: jax.Array,
  w_down_FD: jax.Array,
  *,
  spec: Spec,
  route: str,
  density_hint: float | jax.Array | None,
  hot: int,
  with_active: bool,
  keep: bool,
  interpret: bool,
) -> tuple[jax.Array, Sums, jax.Array, Kept | None]:
  """Returns y_MD, sums over the tokens, i32[] the route, and what is kept; the caller has checked all arguments.

  What is kept is None unless asked for, and means nothing where the dense route was taken.

  Args:
    x_MD: tokens.
    w_gate_FD: None for the non-gated block.
    w_up_FD: row n belongs to neuron n.
    w_down_FD: row n belongs to neuron n.
    spec: of the packed form.
    route: "sparse" or "auto".
    density_hint: for "auto".
    hot: neurons at the start that are computed densely.
    with_active: also say which neurons fired.
    keep: what `backward` needs; of more than `routing.FEW_TOKENS` tokens, and without hot neurons. Tokens for which it
      finds no room then count as overflowing, too.
    interpret: run the kernels in Mosaic's interpreter.
  """
  weights = w_gate_FD, w_up_FD, w_down_FD
  sparse: Callable = functools.partial(
    _sparse, spec=spec, hot=hot, with_active=with_active, keep=keep, interpret=interpret
  )
  nothing = _nothing(x_MD, w_up_FD, gated=w_gate_FD is not None) if keep else None
  dense = functools.partial(_dense, with_active=with_active, kept=nothing)
  few = x_MD.shape[0] <= routing.FEW_TOKENS
  if few:
    decode = functools.partial(decode_hopper.feedforward, with_active=with_active, interpret=interpret)
    sparse = lambda *arrays: (*decode(*arrays), None)
  found = lambda results, taken: (*results[:2], taken, results[2])
  if route == "sparse" or (few and density_hint is None):
    return found(sparse(x_MD, *weights), jnp.int32(SPARSE))

  limit = routing.pays_below((w_down_FD,) if w_gate_FD is None else (w_up_FD, w_down_FD))
  if density_hint is None:
    # The hot neurons are dense on either route.
    density_hint = routing.sample_density(x_MD, w_up_FD if w_gate_FD is None else w_gate_FD, hot)
  if isinstance(density_hint, int | float):
    chosen, known = (sparse, SPARSE) if density_hint < limit else (dense, DENSE)
    return found(chosen(x_MD, *weights), jnp.int32(known))
  pays = density_hint < limit
  taken = jnp.where(pays, SPARSE, DENSE).astype(jnp.int32)
  return found(jax.lax.cond(pays, sparse, dense, x_MD, *weights), taken)


def backward(
  x_MD, weights: Weights, kept: Kept, d_y_MD, d_l1, *, always_sparse: bool, taken, interpret: bool
) -> tuple[jax.Array, Weights]:
  """(d_x_MD, gradients of the weights), by the route that was taken; all rows are in them.

  Args:
    x_MD: tokens.
    weights: gate or None, up, down.
    kept: of the forward pass.
    d_y_MD: cotangent of y.
    d_l1: f32[], cotangent of the sum of |h|.
    always_sparse: whether there was no other route.
    taken: i32[], the route.
    interpret: run the kernels in Mosaic's interpreter.
  """

  # Rounded in the branches: what leaves them lives on.
  def sparse():
    found = gradient_hopper.gradients(x_MD, kept, *weights, d_y_MD, d_l1, interpret=interpret)
    d_weights = found.d_gate_FD, found.d_up_FD, found.d_down_FD
    d_x_MD, d_weights = routing.add_misfit_gradients(
      x_MD, weights, ~found.fits_M, d_y_MD, d_l1, found.d_x_MD, d_weights
    )
    return d_x_MD, gradients.rounded(d_weights, weights)

  def dense():
    d_x_MD, d_weights = gradients.dense(x_MD, weights, d_y_MD, d_l1)
    return d_x_MD, gradients.rounded(d_weights, weights)

  return sparse() if always_sparse else jax.lax.cond(taken == SPARSE, sparse, dense)


def _nothing(x_MD: jax.Array, firing_FD: jax.Array, *, gated: bool) -> Kept:
  """What the dense route keeps."""
  num_tokens = x_MD.shape[0]
  zeros = kept_lists.nothing(num_tokens, kept_lists.room(num_tokens, firing_FD.shape[0]), gated=gated)
  # Both branches of a cond must vary over the same mesh axes, and a constant varies over none.
  varying = tuple(jax.typeof(x_MD).mat.varying | jax.typeof(firing_FD).mat.varying)
  return jax.tree.map(lambda a: jax.lax.pcast(a, varying, to="varying"), zeros) if varying else zeros


def _dense(x_MD, w_gate_FD, w_up_FD, w_down_FD, *, with_active, kept) -> tuple[jax.Array, Sums, Kept | None]:
  y_MD, sums = reference.feedforward(x_MD, w_gate_FD, w_up_FD, w_down_FD, spec=None, hot=0, with_active=with_active)
  # Both branches of a cond must vary over the same mesh axes, and a constant varies over none.
  return y_MD, sums._replace(overflow_rows=jnp.zeros_like(sums.l0, jnp.int32)), kept


def _sparse(
  x_MD, w_gate_FD, w_up_FD, w_down_FD, *, spec, hot, with_active, keep, interpret
) -> tuple[jax.Array, Sums, Kept | None]:
  gated = w_gate_FD is not None
  firing_FD = w_gate_FD if gated else w_up_FD
  words = pack_hopper.pack(x_MD, firing_FD, spec, first=hot, interpret=interpret)
  start_MD = None
  if hot:
    firing_MH = reference.gate(x_MD, firing_FD[:hot])
    h_MH = firing_MH * jnp.einsum("MD,FD->MF", x_MD, w_up_FD[:hot]) if gated else firing_MH
    start_MD = jnp.einsum("MF,FD->MD", h_MH, w_down_FD[:hot])
    hot_l1_M = jnp.sum(jnp.abs(h_MH), axis=1, dtype=jnp.float32)
    hot_l0_M = jnp.sum(firing_MH != 0, axis=1, dtype=jnp.int32)
  room = kept_lists.room(x_MD.shape[0], firing_FD.shape[0]) if keep else 0
  places = kept_lists.places(words, room) if keep else None
  y_MD, l1_M, counts_M, lists = gather_hopper.gather(
    x_MD,
    words,
    w_up_FD if gated else None,
    w_down_FD,
    start_MD,
    None if places is None else places.first_M,
    room=room,
    interpret=interpret,
  )
  misfit_M = counts_M < 0
  if hot:
    l1_M, counts_M = l1_M + hot_l1_M, counts_M + hot_l0_M
  active_F = None
  if with_active:
    active_F = active_hopper.active(words, firing_FD.shape[0], interpret=interpret)
    if hot:
      active_F = active_F.at[:hot].set(jnp.any(firing_MH != 0, axis=0))
  sums = Sums(
    l1=jnp.sum(jnp.where(misfit_M, 0, l1_M)),
    l0=jnp.sum(jnp.where(misfit_M, 0, counts_M), dtype=jnp.float32),
    overflow_rows=jnp.sum(misfit_M, dtype=jnp.int32),
    active_F=active_F,
  )
  weights = w_gate_FD, w_up_FD, w_down_FD
  y_MD, sums = routing.compute_misfits(x_MD, weights, misfit_M, y_MD, sums)
  if places is None:
    return y_MD, sums, None
  dense_M = misfit_M | (places.first_M < 0)
  return y_MD, sums._replace(overflow_rows=jnp.sum(dense_M, dtype=jnp.int32)), Kept(places, lists)
