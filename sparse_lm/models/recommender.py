"""Recommenders: from the tokens of features to one logit a sample.

`flops(lengths_SB)` of any kind is that of a forward pass over a batch whose streams have these lengths; a multiply-add
counts two. Lookups, sums and elementwise work are left out.

Dimension key: B samples, N interaction tokens, D width, S streams.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_lm.models.crossing import CrossNetwork, pairwise_dots, pairwise_dots_flops
from sparse_lm.models.din import Din
from sparse_lm.models.features import FeatureTokens, Inputs, LogitHead, wukong_config
from sparse_lm.models.gem import GemRecommender
from sparse_lm.models.interformer import InterformerRecommender
from sparse_lm.models.wukong import Wukong
from sparse_lm.precision.recipes import Recipe
from sparse_lm.recsys_config import RecommenderConfig


class LogisticRegression(nnx.Module):
  """logit = b + sum over features of the mean weight of its ids + w . numeric."""

  def __init__(self, config: RecommenderConfig, features: int, numeric: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.tokens = FeatureTokens(config, features, numeric, recipe, rngs=rngs)  # of width 1
    self.bias = nnx.Param(jnp.zeros((), jnp.float32))

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    return jnp.sum(self.tokens(inputs), axis=(1, 2), dtype=jnp.float32) + self.bias[...]

  def flops(self, lengths_SB: Sequence[Sequence[int]]) -> int:
    """Those of the numeric features: weights of ids are added, not multiplied."""
    return len(lengths_SB[0]) * self.tokens.flops()


class Dlrm(nnx.Module):
  """logit = MLP([x | dots of all pairs of tokens])   (DLRM, section 2.1, with its bottom MLP one layer deep)."""

  def __init__(self, config: RecommenderConfig, features: int, numeric: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.tokens = FeatureTokens(config, features, numeric, recipe, rngs=rngs)
    number = self.tokens.number
    self.head = LogitHead(number * config.width + number * (number - 1) // 2, config, recipe, rngs=rngs)
    self.width = config.width
    self.recipe = recipe

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    x_BND = self.tokens(inputs)
    flat_BD = x_BND.reshape(len(x_BND), -1)
    return self.head(jnp.concatenate([flat_BD, pairwise_dots(x_BND, self.recipe)], axis=1))

  def flops(self, lengths_SB: Sequence[Sequence[int]]) -> int:
    """Those of its parts, a sample like another."""
    dots = pairwise_dots_flops(self.tokens.number, self.width)
    return len(lengths_SB[0]) * (self.tokens.flops() + dots + self.head.flops())


class Dcnv2(nnx.Module):
  """logit = MLP(cross layers of all tokens, one after another)   (DCNv2, its stacked form)."""

  def __init__(self, config: RecommenderConfig, features: int, numeric: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.tokens = FeatureTokens(config, features, numeric, recipe, rngs=rngs)
    width = self.tokens.number * config.width
    self.cross = CrossNetwork(width, config.num_layers, recipe, rngs=rngs)
    self.head = LogitHead(width, config, recipe, rngs=rngs)

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    x_BND = self.tokens(inputs)
    return self.head(self.cross(x_BND.reshape(len(x_BND), -1)))

  def flops(self, lengths_SB: Sequence[Sequence[int]]) -> int:
    """Those of its parts, a sample like another."""
    return len(lengths_SB[0]) * (self.tokens.flops() + self.cross.flops() + self.head.flops())


class WukongRecommender(nnx.Module):
  """logit = MLP(Wukong layers)   (Wukong, section 3)."""

  def __init__(self, config: RecommenderConfig, features: int, numeric: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.tokens = FeatureTokens(config, features, numeric, recipe, rngs=rngs)
    self.interact = Wukong(
      self.tokens.number, config.width, wukong_config(config, config.num_layers), recipe, rngs=rngs
    )
    self.head = LogitHead(config.tokens * config.width, config, recipe, rngs=rngs)

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    x_BND = self.interact(self.tokens(inputs))
    return self.head(x_BND.reshape(len(x_BND), -1))

  def flops(self, lengths_SB: Sequence[Sequence[int]]) -> int:
    """Those of its parts, a sample like another."""
    return len(lengths_SB[0]) * (self.tokens.flops() + self.interact.flops() + self.head.flops())


def make_recommender(
  config: RecommenderConfig, *, features: int, numeric: int, longest: int, recipe: Recipe, rngs: nnx.Rngs
) -> nnx.Module:
  """Returns the model of a kind: `Inputs` to logit_B.

  Args:
    config: validated.
    features: of user and item together.
    numeric: numeric features.
    longest: history.
    recipe: number formats.
    rngs: of the initial weights.
  """
  if config.kind == "gem":
    return GemRecommender(config, features, numeric, longest, recipe, rngs=rngs)
  kinds = {
    "logistic": LogisticRegression,
    "dlrm": Dlrm,
    "dcnv2": Dcnv2,
    "wukong": WukongRecommender,
    "din": Din,
    "interformer": InterformerRecommender,
  }
  return kinds[config.kind](config, features, numeric, recipe, rngs=rngs)
