"""What the forward pass keeps for gradients: the entries of all tokens, one after another.

The packed gate itself has room for every tile of every token, 8 % of what dense blocks keep; these lists are a quarter
of it. There is room for so many entries a token in the mean, and tokens that find none are for the caller to compute
densely, in the backward pass alone.

Dimension key: M tokens, S words of a tile, E entries.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.twell.format import ROW_CAPACITY

_SHARE = 0.016  # entries a token, as a share of F: a little more than where dense products are faster
_LEAST = 32  # of a token
_MULTIPLE = 128


class Places(NamedTuple):
  """Where the entries of each token are."""

  first_M: jax.Array  # i32[M], -1: it does not fit, here or in the forward pass
  counts_M: jax.Array  # i32[M], of tokens that fit

  @property
  def total(self) -> jax.Array:
    """i32[], entries of all tokens."""
    return jnp.max(jnp.where(self.first_M >= 0, self.first_M + self.counts_M, 0), initial=0)


class Lists(NamedTuple):
  """What lies at no token's place means nothing."""

  entries_E: jax.Array  # u32[E], as in a tile
  up_E: jax.Array | None  # f32[E], x . Wu[n] of each; None without a gate


class Kept(NamedTuple):
  places: Places
  lists: Lists


def room(num_tokens: int, num_neurons: int) -> int:
  """E for so many tokens."""
  a_token = min(max(math.ceil(_SHARE * num_neurons), _LEAST), ROW_CAPACITY)
  return -(-num_tokens * a_token // _MULTIPLE) * _MULTIPLE


def places(words_MTS: jax.Array, room: int) -> Places:
  """Token by token, until there is no room."""
  counts_MT = words_MTS[:, :, 0].astype(jnp.int32)
  counts_M = jnp.sum(counts_MT, axis=1)
  fits_M = jnp.all(counts_MT < words_MTS.shape[2], axis=1) & (counts_M <= ROW_CAPACITY)
  counts_M = jnp.where(fits_M, counts_M, 0)
  upto_M = jnp.cumsum(counts_M)
  fits_M &= upto_M <= room  # from the first that does not find room on: none
  return Places(jnp.where(fits_M, upto_M - counts_M, -1), counts_M)


def nothing(num_tokens: int, room: int, *, gated: bool) -> Kept:
  """Zeros of the same shapes, for a pass that keeps nothing."""
  zeros = lambda size, dtype: jnp.zeros((size,), dtype)
  kept_places = Places(zeros(num_tokens, jnp.int32), zeros(num_tokens, jnp.int32))
  return Kept(kept_places, Lists(zeros(room, jnp.uint32), zeros(room, jnp.float32) if gated else None))
