"""Public operations of the attention family: argument checks, choice of implementation, derivatives.

Dimension key: T query tokens, S key tokens, B rows, H query heads, G key heads, K head width.
"""

import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import dispatch, row_offsets
from pallas_kernels.jagged import reference
from pallas_kernels.jagged import schedule as schedules
from pallas_kernels.jagged.activations import ACTIVATIONS
from pallas_kernels.jagged.bias import RelativeBias
from pallas_kernels.jagged.form import SOFTMAX, Form
from pallas_kernels.jagged.geometry import Mask
from pallas_kernels.jagged.rotary import Rotary
from pallas_kernels.jagged.schedule import Schedule

_OP = "jagged.attention"
_NO_LIMIT = 1 << 29


class _Arguments(NamedTuple):
  q_THK: jax.Array
  k_SGK: jax.Array
  v_SGK: jax.Array
  bias: RelativeBias | None
  rotary: Rotary | None
  q_offsets: jax.Array
  k_offsets: jax.Array
  history_B: jax.Array | None  # tokens of a row that are no targets
  schedule: Schedule | None


def make_schedule(
  q_offsets: jax.Array,
  k_offsets: jax.Array | None = None,
  *,
  num_queries: int,
  num_keys: int | None = None,
  causal: bool = False,
  window: int | None = None,
  block: int | None = None,
  num_targets: jax.Array | None = None,
) -> Schedule:
  """Who computes what in the kernels: made once for a batch, on the device, for all layers and the backward pass.

  Tiles of rows, longest first, dealt out to the SMs in a zigzag. A call without one makes its own.

  Args:
    q_offsets: as of the calls; with broadcast_q of L queries, jnp.arange(B + 1, dtype=jnp.int32) * L.
    k_offsets: of the keys; None: those of the queries, and only then do kernels for blocks of 64 tokens serve.
    num_queries: T of the calls; with broadcast_q B * L.
    num_keys: S of the calls; None: num_queries.
    causal: as of the calls, and so are the next three.
    window: likewise.
    block: likewise.
    num_targets: likewise.

  Returns:
    For `schedule=`; its `imbalance(heads, num_sms)` predicts how uneven the SMs' shares are.
  """
  num_keys = num_queries if num_keys is None else num_keys
  mask, same_tokens = _mask(causal, window, block, num_targets), k_offsets is None
  q_offsets, k_offsets = _offsets(q_offsets, k_offsets, num_queries, num_keys, False, dict(num_targets=num_targets))
  history_B = _history(num_targets, q_offsets)
  return schedules.make(q_offsets, k_offsets, history_B, mask, num_queries, num_keys, same_tokens=same_tokens)


def attention(
  q_THK: jax.Array,
  k_SGK: jax.Array,
  v_SGK: jax.Array,
  q_offsets: jax.Array | None,
  k_offsets: jax.Array | None = None,
  *,
  activation: str | Sequence[str] = SOFTMAX,
  pre_scale: float | None = None,
  post_scale: float = 1.0,
  causal: bool = False,
  window: int | None = None,
  block: int | None = None,
  num_targets: jax.Array | None = None,
  bias: RelativeBias | None = None,
  rotary: Rotary | None = None,
  broadcast_q: bool = False,
  schedule: Schedule | None = None,
  implementation: dispatch.Implementation | None = None,
) -> jax.Array:
  """Attention inside the rows of packed tokens: o = p v, p = post_scale * act(pre_scale * (q . k) + bias).

  One family with many names: `activation="softmax"` is jagged flash attention, an elementwise one generalised
  dot-product attention (GDPA), with `causal` and a `bias` that of HSTU; `block=64` is block attention; `broadcast_q`
  pools rows with learned seeds. Positions i of a query and j of a key count from the start of their row.

  A query that sees no key gives 0. Tokens behind the last row are never read: their output and gradients are 0 even if
  they hold NaN. A token that is not finite may spoil its own row, and no other. First derivatives in reverse
  mode with respect to q, k, v and the tables of the bias are offered, and computed from recomputed scores.

  Args:
    q_THK: floating queries; with broadcast_q [L, H, K], the same for all rows.
    k_SGK: of the dtype of q; G divides H, and query head h reads key head h // (H / G).
    v_SGK: as k.
    q_offsets: int32[B + 1], from 0, never decreasing; checked when concrete, which waits for the device. None with
      broadcast_q.
    k_offsets: of the keys; None: those of the queries.
    activation: "softmax", or one of `jagged.ACTIVATIONS`, or one of these for each head.
    pre_scale: None: 1 / sqrt(K) for softmax, 1 for any other activation.
    post_scale: also of softmax.
    causal: j <= i.
    window: |i - j| <= window, so that 0 leaves a token itself alone.
    block: i // block == j // block.
    num_targets: int32[B]: the last so many tokens of a row are seen by themselves alone, and see all before them.
    bias: added to scaled scores; of queries and keys that are the same tokens.
    rotary: turns q and k, and v if it says so, before anything else; also of tokens that are the same.
    broadcast_q: every row has these queries.
    schedule: of `jagged.make_schedule`, so that kernels need not make one. Its mask and numbers of tokens are checked;
      its offsets are not, and with others than these the result is wrong.
    implementation: "reference", "interpret", "hopper"; None takes hopper where it can serve.

  Returns:
    o_THK in the dtype of q; with broadcast_q [B * L, H, K].

  Raises:
    NotImplementedError: what is asked for cannot serve the call.
    ValueError: shapes or options that do not fit together.
  """
  q_THK, k_SGK, v_SGK = (jnp.asarray(a) for a in (q_THK, k_SGK, v_SGK))
  _check_tokens(q_THK, k_SGK, v_SGK)
  for name, given, kind in (("bias", bias, RelativeBias), ("rotary", rotary, Rotary), ("schedule", schedule, Schedule)):
    if given is not None and not isinstance(given, kind):
      raise TypeError(f"{_OP}: {name} must be a jagged.{kind.__name__} or None, got {type(given).__name__}")
  mask = _mask(causal, window, block, num_targets)
  form = Form(
    **_scores(activation, pre_scale, post_scale, *q_THK.shape[1:]),
    mask=mask,
    broadcast_q=bool(broadcast_q),
    own_blocks=k_offsets is None,
    turn_values=rotary is not None and rotary.values,
  )
  of_same_tokens = dict(num_targets=num_targets, bias=bias, rotary=rotary)
  q_offsets, k_offsets = _offsets(q_offsets, k_offsets, len(q_THK), len(k_SGK), broadcast_q, of_same_tokens)
  dispatch.refuse_sharded(_OP, q_THK=q_THK, k_SGK=k_SGK, v_SGK=v_SGK, q_offsets=q_offsets, k_offsets=k_offsets)
  history_B = _history(num_targets, q_offsets)
  _check_schedule(schedule, mask, len(q_THK) * (len(q_offsets) - 1 if broadcast_q else 1), len(k_SGK))
  if bias is not None:
    bias.check(_OP, len(q_THK))  # before JAX makes 32-bit arrays of wider ones
    bias = jax.tree.map(jnp.asarray, bias)
  if rotary is not None:
    rotary.check(_OP, len(q_THK), len(k_SGK), q_THK.shape[2])
    rotary = jax.tree.map(lambda a: lax.stop_gradient(jnp.asarray(a)), rotary).until(q_offsets[-1])
  places = 0 if bias is None else len(bias.position)
  unsupported = lambda: _kernels().unsupported(q_THK.dtype, q_THK.shape[2], places)
  chosen = dispatch.choose(_OP, implementation, unsupported)
  tokens = q_THK, k_SGK, v_SGK, bias, rotary
  return _attention(form, chosen, _Arguments(*tokens, q_offsets, k_offsets, history_B, schedule))


def _check_tokens(q_THK, k_SGK, v_SGK) -> None:
  if q_THK.ndim != 3 or not jnp.issubdtype(q_THK.dtype, jnp.floating):
    raise ValueError(f"{_OP}: q_THK must be floating [T, H, K], got {q_THK.dtype}{q_THK.shape}")
  for name, a in (("k_SGK", k_SGK), ("v_SGK", v_SGK)):
    if a.dtype != q_THK.dtype:
      raise TypeError(f"{_OP}: {name} is {a.dtype} and q_THK is {q_THK.dtype}; cast one, no dtype is chosen for you")
    if a.ndim != 3 or a.shape[2] != q_THK.shape[2]:
      raise ValueError(f"{_OP}: {name} must be [S, G, K] with the K={q_THK.shape[2]} of q_THK, got shape {a.shape}")
  if k_SGK.shape != v_SGK.shape:
    raise ValueError(f"{_OP}: v_SGK has shape {v_SGK.shape} and k_SGK has {k_SGK.shape}; they must be the same")
  if q_THK.shape[2] == 0:
    raise ValueError(f"{_OP}: q_THK{q_THK.shape} has heads of no width")
  heads, key_heads = q_THK.shape[1], k_SGK.shape[1]
  if heads == 0 or key_heads == 0 or heads % key_heads:
    raise ValueError(f"{_OP}: H={heads} query heads must be a positive multiple of the G={key_heads} key heads")


def _mask(causal, window, block, num_targets) -> Mask:
  limits = {}
  for name, value, least in (("window", window, 0), ("block", block, 1)):
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least):
      raise ValueError(f"{_OP}: {name}={value!r} must be an integer from {least} on, or None")
    # No row is so long, and sums of positions stay inside int32.
    limits[name] = None if value is None else min(int(value), _NO_LIMIT)
  return Mask(causal=bool(causal), **limits, targets=num_targets is not None)


def _scores(activation, pre_scale, post_scale, heads, width) -> dict:
  """What a `Form` says of scores and weights."""
  if not isinstance(activation, str | Sequence):
    raise TypeError(f"{_OP}: activation={activation!r} must be a name, or one for each head")
  names = (activation,) if isinstance(activation, str) else tuple(activation)
  allowed = (SOFTMAX, *ACTIVATIONS)
  if unknown := [name for name in names if name not in allowed]:
    raise ValueError(f"{_OP}: activation={unknown[0]!r} must be one of {', '.join(allowed)}")
  if not isinstance(activation, str) and len(names) != heads:
    raise ValueError(f"{_OP}: activation has {len(names)} names, one for each of the H={heads} heads is needed")
  if len(set(names)) == 1:
    names = names[:1]
  elif SOFTMAX in names:
    raise ValueError(f"{_OP}: activation mixes softmax with {', '.join(sorted({*names} - {SOFTMAX}))}; make two calls")
  if pre_scale is None:
    pre_scale = 1 / math.sqrt(width) if names[0] == SOFTMAX else 1.0
  scales = {"pre_scale": pre_scale, "post_scale": post_scale}
  for name, scale in scales.items():
    if not isinstance(scale, int | float | np.number):
      raise TypeError(f"{_OP}: {name} must be a Python number, got {scale!r}; scale q or v for one that is traced")
    if not math.isfinite(scale):
      raise ValueError(f"{_OP}: {name}={scale} must be finite")
  return dict(activations=names, pre_scale=float(pre_scale), post_scale=float(post_scale))


def _offsets(q_offsets, k_offsets, num_q, num_k, broadcast_q, of_same_tokens: dict) -> tuple[jax.Array, jax.Array]:
  keep = lambda offsets: offsets if isinstance(offsets, jax.Array | np.ndarray) else jnp.asarray(offsets)
  same = k_offsets is None
  if broadcast_q:
    if q_offsets is not None or same:
      raise ValueError(f"{_OP}: broadcast_q=True takes q_offsets=None, and k_offsets for the rows")
    k_offsets = keep(k_offsets)
    row_offsets.check(_OP, "k_offsets", k_offsets, num_k)
    q_offsets = jnp.arange(len(k_offsets), dtype=jnp.int32) * num_q
  elif q_offsets is None:
    raise ValueError(f"{_OP}: q_offsets=None is for broadcast_q=True; without it rows of q are needed")
  else:
    q_offsets = keep(q_offsets)
    k_offsets = q_offsets if same else keep(k_offsets)
    row_offsets.check(_OP, "q_offsets", q_offsets, num_q)
    row_offsets.check(_OP, "q_offsets (as those of the keys)" if same else "k_offsets", k_offsets, num_k)
  if q_offsets.shape != k_offsets.shape:
    raise ValueError(
      f"{_OP}: q_offsets have {len(q_offsets) - 1} rows and k_offsets {len(k_offsets) - 1}; row b of the queries reads"
      " row b of the keys"
    )
  for name, given in of_same_tokens.items():
    if given is not None and not same:
      raise ValueError(f"{_OP}: {name} is for queries and keys that are the same tokens; leave k_offsets out")
  return jnp.asarray(q_offsets), jnp.asarray(k_offsets)


def _history(num_targets, q_offsets: jax.Array) -> jax.Array | None:
  """Tokens of each row that are no targets."""
  if num_targets is None:
    return None
  num_targets, num_rows = jnp.asarray(num_targets), len(q_offsets) - 1
  if num_targets.dtype != jnp.int32 or num_targets.shape != (num_rows,):
    raise ValueError(
      f"{_OP}: num_targets must be int32[{num_rows}], one for each row, got {num_targets.dtype}{num_targets.shape}"
    )
  history_B = jnp.diff(q_offsets) - num_targets
  if not isinstance(history_B, jax.core.Tracer):
    wrong = np.flatnonzero((np.asarray(num_targets) < 0) | (np.asarray(history_B) < 0))
    if wrong.size:
      b = int(wrong[0])
      length = int(q_offsets[b + 1] - q_offsets[b])
      raise ValueError(
        f"{_OP}: num_targets[{b}] = {int(num_targets[b])} must lie in 0..{length}, the tokens of its row"
      )
  return history_B


def _check_schedule(schedule: Schedule | None, mask: Mask, num_queries: int, num_keys: int) -> None:
  if schedule is None:
    return
  made = dict(mask=schedule.mask, num_queries=schedule.num_queries, num_keys=schedule.num_keys)
  asked = dict(mask=mask, num_queries=num_queries, num_keys=num_keys)
  if made != asked:
    raise ValueError(f"{_OP}: schedule is for {made}, and this call has {asked}; make one with its mask and tokens")


def _kernels() -> ModuleType:
  from pallas_kernels.jagged import hopper  # a second to import, and of no use on most machines

  return hopper


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(form: Form, implementation: str, arguments: _Arguments) -> jax.Array:
  """The dispatch lies inside: autodiff sees neither it nor the kernels."""
  return _with_sums(form, implementation, _turned(form, arguments))[0]


def _with_sums(form: Form, implementation: str, a: _Arguments) -> tuple[jax.Array, jax.Array | None, Schedule | None]:
  """o, the sums of softmax, and the schedule that a kernel used."""
  if implementation == "reference":
    o_THK, lse_HT = reference.forward(a.q_THK, a.k_SGK, a.v_SGK, a.q_offsets, a.k_offsets, a.history_B, a.bias, form)
    return o_THK, lse_HT, None
  q_THK, schedule = _for_every_row(form, a), a.schedule
  if schedule is None:
    sizes, offsets = (len(q_THK), len(a.k_SGK)), (a.q_offsets, a.k_offsets)
    schedule = schedules.make(*offsets, a.history_B, form.mask, *sizes, same_tokens=form.own_blocks)
  arrays = q_THK, a.k_SGK, a.v_SGK, _bias(a)
  o_THK, lse_HT = _kernels().forward(*arrays, schedule, form, interpret=implementation == "interpret")
  return o_THK, lse_HT, schedule


def _bias(a: _Arguments):
  """As kernels read it."""
  return None if a.bias is None else _kernels().Bias.of(a.bias, a.q_offsets)


def _for_every_row(form: Form, a: _Arguments) -> jax.Array:
  return jnp.tile(a.q_THK, (len(a.q_offsets) - 1, 1, 1)) if form.broadcast_q else a.q_THK


def _turned(form: Form, a: _Arguments) -> _Arguments:
  """With q and k as they meet; what is kept for the backward pass, in which nothing needs them as they were."""
  if a.rotary is None:
    return a
  v_SGK = a.rotary.turned(a.v_SGK) if form.turn_values else a.v_SGK
  return a._replace(q_THK=a.rotary.turned(a.q_THK), k_SGK=a.rotary.turned(a.k_SGK), v_SGK=v_SGK)


def _forward(form, implementation, arguments):
  arguments = _turned(form, arguments)
  o_THK, lse_HT, schedule = _with_sums(form, implementation, arguments)
  return o_THK, (arguments, schedule, None if lse_HT is None else o_THK, lse_HT)


def _backward(form, implementation, kept, d_o_THK):
  a, schedule, o_THK, lse_HT = kept
  if implementation == "reference":
    d = reference.backward(
      a.q_THK, a.k_SGK, a.v_SGK, a.q_offsets, a.k_offsets, a.history_B, a.bias, a.rotary, o_THK, lse_HT, d_o_THK, form
    )
  else:
    arrays = _for_every_row(form, a), a.k_SGK, a.v_SGK, o_THK, lse_HT, d_o_THK, _bias(a), a.rotary
    d = _kernels().backward(*arrays, schedule, form, interpret=implementation == "interpret")
    if form.broadcast_q:
      d_q_BLHK = d.q_THK.reshape(len(a.q_offsets) - 1, *a.q_THK.shape)
      d = d._replace(q_THK=jnp.sum(d_q_BLHK, axis=0, dtype=jnp.float32).astype(a.q_THK.dtype))
  no = lambda integers: np.zeros(integers.shape, jax.dtypes.float0)
  d_bias = None if a.bias is None else RelativeBias(d.position, d.time, no(a.bias.timestamps))
  d_rotary = jax.tree.map(jnp.zeros_like, a.rotary)  # of constants
  rest = jax.tree.map(no, (a.q_offsets, a.k_offsets, a.history_B, a.schedule))
  return (_Arguments(d.q_THK, d.k_SGK, d.v_SGK, d_bias, d_rotary, *rest),)


_attention.defvjp(_forward, _backward)
