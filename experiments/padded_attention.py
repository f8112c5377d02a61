"""Attention as it is written without jagged kernels: rows padded to the longest, masked, by XLA. A baseline.

It stands in for `pallas_kernels.jagged.attention` where a model calls it; `installed` puts it there.

Dimension key: T query tokens, S key tokens, B rows, L queries and M keys of the longest row, H heads, K head width.
"""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp

from pallas_kernels import jagged


@contextlib.contextmanager
def installed(longest: int) -> Iterator[None]:
  """Inside, models that are traced pad rows to `longest` tokens."""
  with mock.patch.object(jagged, "attention", functools.partial(attention, longest=longest)):
    yield


def attention(
  q,
  k_SHK,
  v_SHK,
  offsets,
  k_offsets=None,
  *,
  longest: int,
  activation: str | None = None,
  pre_scale: float | None = None,
  window: int | None = None,
  block: int | None = None,
  rotary: jagged.Rotary | None = None,
  broadcast_q: bool = False,
  schedule=None,
  implementation=None,
) -> jax.Array:
  """Returns o_THK, with the arguments of `jagged.attention` that the recommenders use; the last two are not read."""
  del schedule, implementation
  if rotary is not None:
    q, k_SHK = rotary.turned(q), rotary.turned(k_SHK)
  k_offsets = offsets if k_offsets is None else k_offsets
  rows = len(k_offsets) - 1
  # Personalised neurons: as many for every row.
  keys = len(k_SHK) // rows if activation is not None else longest
  k_BMHK, v_BMHK = (_padded(x, k_offsets, keys) for x in (k_SHK, v_SHK))
  q_BLHK = jnp.broadcast_to(q, (rows, *q.shape)) if broadcast_q else _padded(q, offsets, longest)
  if activation is not None:
    scores_BHLM = pre_scale * jnp.einsum("BLHK,BMHK->BHLM", q_BLHK, k_BMHK, preferred_element_type=jnp.float32)
    weights_BHLM = jagged.ACTIVATIONS[activation].value(scores_BHLM).astype(q.dtype)
    o_BLHK = jnp.einsum("BHLM,BMHK->BLHK", weights_BHLM, v_BMHK)
  else:
    o_BLHK = jax.nn.dot_product_attention(
      q_BLHK, k_BMHK, v_BMHK, mask=_mask(jnp.diff(k_offsets), q_BLHK.shape[1], keys, window, block)
    )
  if broadcast_q:
    return o_BLHK.reshape(-1, *q.shape[1:])
  return _packed(o_BLHK, offsets, len(q))


def _mask(length_B: jax.Array, queries: int, keys: int, window: int | None, block: int | None) -> jax.Array:
  """bool[B, 1, L or 1, M]; a row without keys sees its first, which is zeros."""
  i_L, j_M = jnp.arange(queries)[None, None, :, None], jnp.arange(keys)[None, None, None, :]
  visible = j_M < jnp.maximum(length_B, 1)[:, None, None, None]
  if window is not None:
    visible = visible & (jnp.abs(i_L - j_M) <= window)
  if block is not None:
    visible = visible & (i_L // block == j_M // block)
  return visible


# Copies whose derivatives are copies: XLA would add up the gradient of a gather number by number.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _padded(x_TD: jax.Array, offsets: jax.Array, longest: int) -> jax.Array:
  return jagged.jagged_to_dense(x_TD, offsets, longest)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _packed(x_BLD: jax.Array, offsets: jax.Array, num_tokens: int) -> jax.Array:
  return jagged.dense_to_jagged(x_BLD, offsets, num_tokens)


_padded.defvjp(
  lambda x_TD, offsets, longest: (_padded(x_TD, offsets, longest), (offsets, len(x_TD))),
  lambda longest, kept, d_BLD: (_packed(d_BLD, *kept), None),
)
_packed.defvjp(
  lambda x_BLD, offsets, num_tokens: (_packed(x_BLD, offsets, num_tokens), (offsets, x_BLD.shape[1])),
  lambda num_tokens, kept, d_TD: (_padded(d_TD, *kept), None),
)
