"""What an event says by its age: a learnt function of the logarithm of the time that has passed since.

  a(dt) = sum_k max(0, 1 - |x - k|) v_k,   x = log2(1 + dt) KNOTS_PER_OCTAVE

It is linear between the knots v_k, so that ages which are alike have vectors which are: no bucket's edge parts them.
Rotary angles tell an attention how far apart two events are; only this tells how old one is.

Dimension key: T packed events, B rows, A knots, D width. `offsets` is i32[B + 1]; see `packed`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_lm.models.packed import clear_padding
from sparse_lm.precision.linear import linear
from sparse_lm.precision.recipes import Recipe

KNOTS_PER_OCTAVE = 2
KNOTS = 64  # seconds of a century; older events are as old as that


class AgeEmbedding(nnx.Module):
  """The module's equation. It begins at zero."""

  def __init__(self, width: int, recipe: Recipe):
    self.knots_DA = nnx.Param(jnp.zeros((width, KNOTS), jnp.float32))
    self.recipe = recipe

  def __call__(self, age_T: jax.Array, offsets: jax.Array) -> jax.Array:
    """a_TD of ages in seconds, below 0 as 0; zeros for padding, whose age may be anything."""
    age_T = jnp.maximum(clear_padding(age_T, offsets), 0)
    place_T = jnp.minimum(KNOTS_PER_OCTAVE * jnp.log2(1 + age_T), KNOTS - 1)
    share_TA = jnp.maximum(1 - jnp.abs(place_T[:, None] - jnp.arange(KNOTS, dtype=jnp.float32)[None, :]), 0)
    share_TA = clear_padding(share_TA.astype(self.recipe.compute_dtype), offsets)
    return linear("TA,DA->TD", share_TA, self.knots_DA[...], self.recipe)

  def flops(self) -> int:
    """2 A D for each event."""
    width, _ = self.knots_DA.shape
    return 2 * KNOTS * width
