"""RMSNorm (Zhang & Sennrich, 2019).   Dimension key: B batch, L length, D model width."""

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_lm.parallel import sharding


class RmsNorm(nnx.Module):
  """y = x / sqrt(mean(x^2) + epsilon) * scale, computed in float32 and rounded once."""

  def __init__(self, width: int, epsilon: float):
    self.scale_D = nnx.Param(jnp.ones((width,), jnp.float32))
    self.epsilon = epsilon

  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    """Normalises over the last axis; dtype in, dtype out."""
    x32_BLD = x_BLD.astype(jnp.float32)
    inverse_BL1 = jax.lax.rsqrt(jnp.mean(jnp.square(x32_BLD), axis=-1, keepdims=True) + self.epsilon)
    scale_11D = sharding.gather(self.scale_D[...])[None, None, :]
    return (x32_BLD * inverse_BL1 * scale_11D).astype(x_BLD.dtype)
