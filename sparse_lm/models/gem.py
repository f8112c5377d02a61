"""The GEM-style recommender: Kunlun's blocks, the history of a user on one side, interaction tokens on the other.

Dimension key: B samples, N interaction tokens, D width, T packed events.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_lm.models.features import FeatureTokens, Inputs, LogitHead, wukong_config
from sparse_lm.models.interformer import TokenSummary
from sparse_lm.models.mlp import MLP
from sparse_lm.models.packed import clear_padding, places
from sparse_lm.models.seed_pooling import SeedPooling
from sparse_lm.models.sequence import PersonalisedFfn, TimeRotary, WindowAttention
from sparse_lm.models.wukong import Wukong
from sparse_lm.precision.recipes import Recipe
from sparse_lm.recsys_config import RecommenderConfig


class GemBlock(nnx.Module):
  """One layer of the GEM-style model   (Kunlun, section 4).

  X_sum = summary of X;  S' = window attention(personalised FFN(S, X_sum));  H = seed pooling(S');  X' = Wukong([X | H])
  """

  def __init__(self, config: RecommenderConfig, tokens: int, longest: int, recipe: Recipe, *, rngs: nnx.Rngs):
    width, heads = config.width, config.num_heads
    self.summary = TokenSummary(width, recipe, tokens=tokens, summary_tokens=config.summary_tokens, rngs=rngs)
    self.personalised = PersonalisedFfn(
      width,
      heads,
      recipe,
      summary_tokens=config.summary_tokens,
      neurons=config.neurons,
      tau=max(longest, 1),
      rngs=rngs,
    )
    self.attention = WindowAttention(width, heads, recipe, window=config.window, rngs=rngs)
    self.pooling = SeedPooling(
      width, heads, recipe, seeds=config.seeds, tokens=config.pooled_tokens, terms=2, rngs=rngs
    )
    self.interact = Wukong(tokens + config.pooled_tokens, width, wukong_config(config, 1), recipe, rngs=rngs)

  def __call__(self, x_BND: jax.Array, s_TD: jax.Array, offsets: jax.Array, rotary) -> tuple[jax.Array, jax.Array]:
    """(x_BND, s_TD)."""
    s_TD = self.personalised(s_TD, self.summary(x_BND), offsets)
    s_TD = self.attention(s_TD, offsets, rotary)
    x_BND = jnp.concatenate([x_BND, self.pooling(s_TD, offsets)], axis=1)
    return self.interact(x_BND), s_TD


class GemRecommender(nnx.Module):
  """logit = MLP(X of the last block); S begins as the history, X as the features.

  Each event meets the item that is predicted before the first block, s + MLP([s | s * i | i]): our addition, for what
  the blocks pool is otherwise a mean that knows the item by the personalised network alone.
  """

  def __init__(
    self, config: RecommenderConfig, features: int, numeric: int, longest: int, recipe: Recipe, *, rngs: nnx.Rngs
  ):
    self.tokens = FeatureTokens(config, features, numeric, recipe, rngs=rngs)
    self.meeting = MLP((3 * config.width, config.head_width, config.width), "relu", recipe, rngs=rngs)
    self.rotary = TimeRotary(head_width=config.width // config.num_heads, t_scale=config.time_scale)
    tokens = (self.tokens.number, *[config.tokens] * (config.num_layers - 1))
    self.blocks = nnx.List([GemBlock(config, number, longest, recipe, rngs=rngs) for number in tokens])
    self.head = LogitHead(config.tokens * config.width, config, recipe, rngs=rngs)

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    x_BND, s_TD = self.tokens(inputs), clear_padding(inputs.history_TD, inputs.offsets)
    row_T, _ = places(inputs.offsets, len(s_TD))
    item_TD = inputs.item_BD.at[row_T].get(mode="fill", fill_value=0)  # padding has row B, which is none
    s_TD = s_TD + self.meeting(jnp.concatenate([s_TD, s_TD * item_TD, item_TD], axis=1))
    rotary = self.rotary(inputs.age_T, inputs.offsets)
    for block in self.blocks:
      x_BND, s_TD = block(x_BND, s_TD, inputs.offsets, rotary)
    return self.head(x_BND.reshape(len(x_BND), -1))
