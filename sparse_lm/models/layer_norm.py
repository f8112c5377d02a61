"""LayerNorm (Ba et al., 2016) without scale and shift, so that a kernel may fuse it with what follows."""

import jax
import jax.numpy as jnp


def layer_norm(x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
  """(x - mean) / sqrt(variance + epsilon) over the last axis, computed in float32 and rounded once."""
  x32 = x.astype(jnp.float32)
  centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
  variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
  return (centred * jax.lax.rsqrt(variance + epsilon)).astype(x.dtype)
