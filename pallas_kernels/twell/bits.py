"""Sets of neurons as 32 bits a word: what kernels write where a bool a neuron would be eight times the bytes."""

import jax
import jax.numpy as jnp

BITS = 32


def expand(words: jax.Array) -> jax.Array:
  """bool[..., 32 W] of uint32[..., W], from the lowest bit of the first word."""
  place = jax.lax.broadcasted_iota(jnp.uint32, (*words.shape, BITS), words.ndim)
  return (words[..., None] >> place & 1).reshape(*words.shape[:-1], words.shape[-1] * BITS) != 0


def join(mask: jax.Array) -> jax.Array:
  """uint32[..., W] of bool[..., 32 W]."""
  grouped = mask.reshape(*mask.shape[:-1], mask.shape[-1] // BITS, BITS)
  place = jnp.uint32(1) << jax.lax.broadcasted_iota(jnp.uint32, grouped.shape, grouped.ndim - 1)
  return jnp.sum(grouped * place, axis=-1, dtype=jnp.uint32)
