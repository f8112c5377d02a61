"""RMSNorm (Zhang & Sennrich, 2019) without scale, so that a kernel may fuse it with what follows."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
  """x / sqrt(mean(x^2) + epsilon) over the last axis, computed in float32 and rounded once; zeros stay zeros."""
  x32 = x.astype(jnp.float32)
  return (x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)).astype(x.dtype)
