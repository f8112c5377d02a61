"""Public operations on sparse feed-forward blocks: argument checks, choice of implementation, derivatives.

Dimension key: M tokens, D model width, F hidden neurons. Weights are neuron-major: row n of each [F, D] belongs to
neuron n, for the down projection too.
"""

import functools
from types import ModuleType
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import dispatch
from pallas_kernels.twell import format, gradients, reference
from pallas_kernels.twell.format import Spec, Twell
from pallas_kernels.twell.routing import DENSE, FEW_TOKENS

Route = Literal["sparse", "dense", "auto"]
KEPT = "twell_kept"  # what the sparse route keeps for gradients, as policies of jax.checkpoint know it


class Stats(NamedTuple):
  """What a call saw; means over its M tokens (0 if there are none)."""

  l1: jax.Array  # f32[], mean over tokens of sum_n |h_n|; differentiable
  l0: jax.Array  # f32[], mean number of neurons that fire for a token
  # i32[], tokens computed densely: the packed form cannot hold them (too many non-zeros), they are not finite, or, in a
  # call that is differentiated, their gradients find no room
  overflow_rows: jax.Array
  route: jax.Array  # i32[], DENSE or SPARSE, what computed y
  active: jax.Array | None  # bool[F], fired for at least one token; None without with_active


class _Options(NamedTuple):
  spec: Spec | None  # None: a dtype that no spec holds
  route: Route
  density_hint: float | None  # known when the call is traced; as an argument, jit would make a tracer of it
  hot: int
  with_active: bool
  implementation: dispatch.Implementation


def pack(
  x_MD: jax.Array,
  w_FD: jax.Array,
  *,
  spec: Spec | None = None,
  implementation: dispatch.Implementation | None = None,
) -> Twell:
  """relu(x @ w.T), packed (TwELL, section 3.2). The dense matrix is never in memory where the kernel runs.

  Args:
    x_MD: bfloat16 or float16; other floating types are served by the reference.
    w_FD: of the same dtype, F at most 65536.
    spec: None: the default, with values of the dtype of x if that has 16 bits.
    implementation: "reference", "interpret", "hopper"; None takes "hopper" where it can serve, else "reference".

  Raises:
    NotImplementedError: what is asked for cannot serve the call.
  """
  x_MD, w_FD = jnp.asarray(x_MD), jnp.asarray(w_FD)
  _check_matrices("twell.pack", x_MD=x_MD, w_FD=w_FD)
  spec = _spec("twell.pack", spec, x_MD.dtype)
  spec.tiles(w_FD.shape[0])
  dispatch.refuse_sharded("twell.pack", x_MD=x_MD, w_FD=w_FD)
  unsupported = lambda: _kernels().unsupported(x_MD.dtype, *w_FD.shape, spec)
  chosen = dispatch.choose("twell.pack", implementation, unsupported)
  if chosen == "reference":
    return format.from_dense(reference.gate(x_MD, w_FD), spec=spec)
  return _kernels().pack(x_MD, w_FD, spec, interpret=chosen == "interpret")


def gated_feedforward(
  x_MD: jax.Array,
  w_gate_FD: jax.Array,
  w_up_FD: jax.Array,
  w_down_FD: jax.Array,
  *,
  spec: Spec | None = None,
  route: Route = "auto",
  density_hint: float | jax.Array | None = None,
  hot: int = 0,
  with_active: bool = False,
  implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, Stats]:
  """y = (relu(x Wg^T) * (x Wu^T)) Wd (TwELL, eq. 1), computing only what ReLU lets through.

  The sparse route reads the rows of Wu and Wd of those neurons alone that fire for a token. Tokens with more firing
  neurons than a tile of the format holds, and tokens that are not finite, are computed densely in the same call. So
  every route gives the same y for any tokens, as long as a neuron that does not fire adds nothing: 0 * (x . w_up) is
  NaN in the dense block if w_up or w_down is not finite, or the product overflows, and is left out by the sparse one.

  First derivatives of y and of Stats.l1 in reverse mode are offered. On the sparse route the kernels keep the entries
  of the gate and their products with Wu, 2 to 3 % of what dense blocks keep, and compute gradients from them without
  atomics (TwELL, section 3.4); tokens that overflow there, or that find no room (1.6 % of F a token in the mean), are
  recomputed densely, in chunks, as all tokens are on the dense route. Under `jax.checkpoint` a policy that saves the
  name `twell.KEPT` spares the recomputation.

  Args:
    x_MD: bfloat16 or float16, D a multiple of 128; anything else floating is served by the reference.
    w_gate_FD: of the dtype of x, as the other weights; F a multiple of 128 for the kernels.
    w_up_FD: row n belongs to neuron n, as in the other weights.
    w_down_FD: in particular, this is the transpose of a [D, F] projection.
    spec: the packed layout of the gate; None: the default for the dtype of x.
    route: "sparse", "dense", or "auto", which decides on the device, from density_hint if given, else from the gate of
      a small sample of rows. For at most 64 tokens "auto" takes the sparse kernels, which then read each weight at most
      once a token.
    density_hint: share of neurons that fire, in [0, 1]; a Python number decides when the call is traced.
    hot: the first `hot` neurons, a multiple of 128, are always computed densely, on the tensor cores; see
      `twell.sort_neurons`.
    with_active: also say which neurons fired.
    implementation: "reference", "interpret", "hopper"; None takes "hopper" where it can serve, else "reference".

  Returns:
    y_MD in the dtype of x, and what the call saw. The kernels for at most 64 tokens pack nothing, so that nothing
    overflows there.

  Raises:
    NotImplementedError: what is asked for cannot serve the call.
    ValueError: shapes, dtypes or options that do not fit together.
  """
  weights = dict(w_gate_FD=w_gate_FD, w_up_FD=w_up_FD, w_down_FD=w_down_FD)
  return _call("twell.gated_feedforward", x_MD, weights, spec, route, density_hint, hot, with_active, implementation)


def feedforward(
  x_MD: jax.Array,
  w_up_FD: jax.Array,
  w_down_FD: jax.Array,
  *,
  spec: Spec | None = None,
  route: Route = "auto",
  density_hint: float | jax.Array | None = None,
  hot: int = 0,
  with_active: bool = False,
  implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, Stats]:
  """y = relu(x Wu^T) Wd (TwELL, appendix C.2): the non-gated block. Arguments as for `gated_feedforward`."""
  weights = dict(w_up_FD=w_up_FD, w_down_FD=w_down_FD)
  return _call("twell.feedforward", x_MD, weights, spec, route, density_hint, hot, with_active, implementation)


def _call(op, x_MD, weights, spec, route, density_hint, hot, with_active, implementation):
  x_MD, weights = jnp.asarray(x_MD), {name: jnp.asarray(w) for name, w in weights.items()}
  _check_matrices(op, x_MD=x_MD, **weights)
  num_tokens, (num_neurons, width) = x_MD.shape[0], weights["w_up_FD"].shape
  if route not in get_args(Route):
    raise ValueError(f"{op}: route={route!r} must be one of {get_args(Route)}")
  known_hint, traced_hint = _split_hint(op, density_hint)
  if not isinstance(hot, int | np.integer) or hot % 128 or not 0 <= hot <= num_neurons:
    raise ValueError(f"{op}: hot={hot!r} must be a multiple of 128 in 0..F={num_neurons}")
  hot = int(hot)
  spec = _spec(op, spec, x_MD.dtype)
  if hot == num_neurons or (route == "auto" and num_neurons > format.MAX_COLUMNS):
    route = "dense"  # nothing to pack, or nothing to pack into
  if route != "dense":
    spec.tiles(num_neurons)
  dispatch.refuse_sharded(op, x_MD=x_MD, **weights)
  unsupported = lambda: None if route == "dense" else _kernels().unsupported(x_MD.dtype, num_neurons, width, spec)
  chosen = dispatch.choose(op, implementation, unsupported)
  options = _Options(spec if route != "dense" else None, route, known_hint, hot, with_active, chosen)
  w_gate_FD = weights.get("w_gate_FD")
  y_MD, sums, taken = _feedforward(options, x_MD, w_gate_FD, weights["w_up_FD"], weights["w_down_FD"], traced_hint)
  tokens = max(num_tokens, 1)
  return y_MD, Stats(sums.l1 / tokens, sums.l0 / tokens, sums.overflow_rows, taken, sums.active_F)


def _spec(op: str, spec: Spec | None, dtype) -> Spec:
  if spec is not None and not isinstance(spec, Spec):
    raise TypeError(f"{op}: spec={spec!r} must be a twell.Spec or None")
  return format.spec_for(dtype) if spec is None else spec


def _split_hint(op: str, density_hint: float | jax.Array | None) -> tuple[float | None, jax.Array | None]:
  """Returns a hint that is known when the call is traced, and one that is not; None for what it is not."""
  if density_hint is not None and not isinstance(density_hint, int | float | np.ndarray | np.number | jax.Array):
    raise TypeError(f"{op}: density_hint={density_hint!r} must be a number, an array of one, or None")
  if isinstance(density_hint, np.ndarray):
    density_hint = jnp.asarray(density_hint)
  if isinstance(density_hint, jax.Array):
    if density_hint.ndim or not jnp.issubdtype(density_hint.dtype, jnp.floating):
      raise ValueError(f"{op}: density_hint must be one floating number, got {density_hint.dtype}{density_hint.shape}")
    return None, density_hint.astype(jnp.float32)
  if density_hint is not None and not 0 <= density_hint <= 1:
    raise ValueError(f"{op}: density_hint={density_hint} is a share of the neurons and must lie in [0, 1]")
  return None if density_hint is None else float(density_hint), None


def _check_matrices(op: str, x_MD: jax.Array, **weights: jax.Array) -> None:
  first, shape = next((name, w.shape) for name, w in weights.items())
  if x_MD.ndim != 2 or not jnp.issubdtype(x_MD.dtype, jnp.floating):
    raise ValueError(f"{op}: x_MD must be floating [M, D], got {x_MD.dtype}{x_MD.shape}; reshape other axes into M")
  for name, w in weights.items():
    if w.dtype != x_MD.dtype:
      raise TypeError(f"{op}: {name} is {w.dtype} and x_MD is {x_MD.dtype}; cast one, no dtype is chosen for you")
    if w.ndim != 2 or w.shape[1] != x_MD.shape[1]:
      raise ValueError(
        f"{op}: {name} must be [F, D] with the D={x_MD.shape[1]} of x_MD{x_MD.shape}, got shape {w.shape}; weights are"
        " neuron-major, a [D, F] projection has to be transposed"
      )
    if w.shape != shape:
      raise ValueError(f"{op}: {name} has shape {w.shape} and {first} has {shape}; all weights share F neurons")


def _kernels() -> ModuleType:
  from pallas_kernels.twell import hopper  # a second to import, and of no use on most machines

  return hopper


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _feedforward(options: _Options, x_MD, w_gate_FD, w_up_FD, w_down_FD, traced_hint):
  """Returns (y_MD, sums, i32[] route). The dispatch lies inside: autodiff sees neither its branches nor the kernels."""
  return _with_kept(options, x_MD, w_gate_FD, w_up_FD, w_down_FD, traced_hint, keep=False)[:3]


def _with_kept(options: _Options, x_MD, w_gate_FD, w_up_FD, w_down_FD, traced_hint, *, keep: bool):
  """And what is kept for the backward pass, if it is wanted."""
  weights = w_gate_FD, w_up_FD, w_down_FD
  if options.implementation == "reference" or options.route == "dense":
    y_MD, sums = reference.feedforward(
      x_MD, *weights, spec=options.spec, hot=options.hot, with_active=options.with_active
    )
    return y_MD, sums, jnp.int32(DENSE), None
  return _kernels().feedforward(
    x_MD,
    *weights,
    spec=options.spec,
    route=options.route,
    density_hint=traced_hint if options.density_hint is None else options.density_hint,
    hot=options.hot,
    with_active=options.with_active,
    keep=keep,
    interpret=options.implementation == "interpret",
  )


def _forward(options, x_MD, w_gate_FD, w_up_FD, w_down_FD, traced_hint):
  arguments = x_MD, w_gate_FD, w_up_FD, w_down_FD, traced_hint
  *results, kept = _with_kept(options, *arguments, keep=_is_sparse_backward(options, len(x_MD)))
  return tuple(results), (arguments, *checkpoint_name((kept, results[-1]), KEPT))


def _is_sparse_backward(options: _Options, num_tokens: int) -> bool:
  """Whether gradients come from kept entries; else they are those of the dense block, recomputed."""
  by_kernels = options.implementation != "reference" and options.route != "dense"
  return by_kernels and options.hot == 0 and num_tokens > FEW_TOKENS


def _backward(options, kept, cotangents):
  """Weight gradients add up in float32."""
  (x_MD, *weights, traced_hint), kept, taken = kept
  d_y_MD, d_sums, _ = cotangents
  weights = tuple(weights)
  if kept is None:
    d_x_MD, d_weights = gradients.dense(x_MD, weights, d_y_MD, d_sums.l1)
    d_weights = gradients.rounded(d_weights, weights)
  else:
    d_x_MD, d_weights = _kernels().backward(
      x_MD,
      weights,
      kept,
      d_y_MD,
      d_sums.l1,
      always_sparse=options.route == "sparse",
      taken=taken,
      interpret=options.implementation == "interpret",
    )
  d_hint = jax.tree.map(jnp.zeros_like, traced_hint)  # decides how, not what
  return d_x_MD, *d_weights, d_hint


_feedforward.defvjp(_forward, _backward)
