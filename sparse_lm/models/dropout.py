"""Dropout with a key of its own: who wants none gives none."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Each element 0 with probability `rate`, else x / (1 - rate); x itself without a key, as in evaluation."""
  if key is None or rate == 0:
    return x
  kept = jax.random.bernoulli(key, 1 - rate, x.shape)
  return jnp.where(kept, x / (1 - rate), jnp.zeros((), x.dtype))
