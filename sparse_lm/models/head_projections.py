"""The four projections of multi-head attention on packed tokens.

Dimension key: T packed tokens, D width, H heads, K head width.
"""

import jax
from flax import nnx

from sparse_lm.models.initial import normal_weight
from sparse_lm.precision.linear import linear
from sparse_lm.precision.recipes import Recipe


def head_width(width: int, num_heads: int) -> int:
  """K = D / H.

  Raises:
    ValueError: heads do not share the width evenly.
  """
  if num_heads < 1 or width % num_heads:
    raise ValueError(f"num_heads={num_heads} must divide width={width}")
  return width // num_heads


class HeadProjections(nnx.Module):
  """q, k, v = x W^T for each head, and y = o W_o, heads added up. All heads together are as wide as the tokens."""

  def __init__(self, width: int, num_heads: int, recipe: Recipe, *, rngs: nnx.Rngs):
    shape_HKD = (num_heads, head_width(width, num_heads), width)
    self.w_query_HKD = normal_weight(shape_HKD, width, rngs=rngs)
    self.w_key_HKD = normal_weight(shape_HKD, width, rngs=rngs)
    self.w_value_HKD = normal_weight(shape_HKD, width, rngs=rngs)
    self.w_out_HKD = normal_weight(shape_HKD, width, rngs=rngs)
    self.recipe = recipe

  def query(self, x_TD: jax.Array) -> jax.Array:
    """q_THK."""
    return linear("TD,HKD->THK", x_TD, self.w_query_HKD[...], self.recipe)

  def key(self, x_TD: jax.Array) -> jax.Array:
    """k_THK."""
    return linear("TD,HKD->THK", x_TD, self.w_key_HKD[...], self.recipe)

  def value(self, x_TD: jax.Array) -> jax.Array:
    """v_THK."""
    return linear("TD,HKD->THK", x_TD, self.w_value_HKD[...], self.recipe)

  def merge(self, o_THK: jax.Array) -> jax.Array:
    """y_TD."""
    return linear("THK,HKD->TD", o_THK, self.w_out_HKD[...], self.recipe)
