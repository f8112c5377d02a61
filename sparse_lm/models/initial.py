"""How weights of recommenders begin."""

import jax.numpy as jnp
from flax import nnx


def normal_weight(shape: tuple[int, ...], fan_in: int, *, rngs: nnx.Rngs) -> nnx.Param:
  """Of any rank, for sums over `fan_in` inputs, whose variance it keeps: entries from N(0, 1 / fan_in)."""
  # There may be no inputs: one token alone has no pairs.
  return nnx.Param(nnx.initializers.normal(max(fan_in, 1) ** -0.5)(rngs.params(), shape, jnp.float32))
