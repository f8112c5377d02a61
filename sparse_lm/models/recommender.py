"""Recommenders: embedding tables, the front end that reads them, and models from its tokens to one logit a sample.

Tables are no parameters of a model. They are looked up, and what the loss says of a looked-up row comes back through
its sink; `training.recommender` updates the rows that were read and no others.

Dimension key: B samples, N interaction tokens, D width, F features, T packed ids or events, V rows of a table.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import embedding
from sparse_lm.data.samples import Batch
from sparse_lm.models.crossing import CrossNetwork, pairwise_dots
from sparse_lm.models.interformer import TokenSummary
from sparse_lm.models.mlp import MLP, Affine
from sparse_lm.models.packed import clear_padding
from sparse_lm.models.seed_pooling import SeedPooling
from sparse_lm.models.sequence import PersonalisedFfn, TimeRotary, WindowAttention
from sparse_lm.models.wukong import Wukong, WukongConfig
from sparse_lm.precision.recipes import Recipe
from sparse_lm.recsys_config import RecommenderConfig

Tables = dict[str, jax.Array]  # [V, D] each, by feature
Sinks = dict[str, jax.Array]  # f32[bags, D] of zeros, one for each lookup


class Lookup(NamedTuple):
  """Rows of a table that are read, pooled by bags."""

  table: str
  ids_T: jax.Array
  offsets: jax.Array


class Inputs(NamedTuple):
  """What a model gets, in the compute dtype."""

  tokens_BFD: jax.Array  # one for each feature of user and item
  numeric_BN: jax.Array
  history_TD: jax.Array  # item and action of each event, added
  age_T: jax.Array  # f32, seconds from an event to the one that is predicted
  offsets: jax.Array  # i32[B + 1], of the histories


def lookups(batch: Batch) -> dict[str, Lookup]:
  """All that a batch reads, by name. A history reads the items' own table."""
  history = batch.history
  # Behind the last event: bags without ids, which read and update nothing.
  events = jnp.minimum(jnp.arange(len(history.item_T) + 1, dtype=jnp.int32), history.offsets[-1])
  read = lambda table, ids_T, offsets: Lookup(table, jnp.asarray(ids_T), jnp.asarray(offsets))
  return {feature: read(feature, *bag) for feature, bag in batch.bags.items()} | {
    "history.item": read("item", history.item_T, events),
    "history.action": read("action", history.action_T, events),
  }


def zero_sinks(batch: Batch, width: int) -> Sinks:
  """A place for the gradient of each lookup."""
  return {name: jnp.zeros((len(it.offsets) - 1, width), jnp.float32) for name, it in lookups(batch).items()}


def front_end(tables: Tables, sinks: Sinks, batch: Batch, recipe: Recipe) -> Inputs:
  """Looks everything up; several ids of a feature are averaged."""
  found = {
    name: embedding.bag(tables[it.table], it.ids_T, it.offsets, mode="mean", sink=sinks[name]).astype(
      recipe.compute_dtype
    )
    for name, it in lookups(batch).items()
  }
  return Inputs(
    tokens_BFD=jnp.stack([found[feature] for feature in sorted(batch.bags)], axis=1),
    numeric_BN=jnp.asarray(batch.numeric_BN, recipe.compute_dtype),
    history_TD=found["history.item"] + found["history.action"],
    age_T=jnp.asarray(batch.history.age_T),
    offsets=jnp.asarray(batch.history.offsets),
  )


class _Tokens(nnx.Module):
  """The features' tokens, and one more made of the numeric features if there are any."""

  def __init__(self, config: RecommenderConfig, features: int, numeric: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.of_numeric = Affine(numeric, config.width, recipe, rngs=rngs) if numeric else None
    self.number = features + (numeric > 0)

  def __call__(self, inputs: Inputs) -> jax.Array:
    if self.of_numeric is None:
      return inputs.tokens_BFD
    return jnp.concatenate([inputs.tokens_BFD, self.of_numeric(inputs.numeric_BN)[:, None, :]], axis=1)


class _Head(nnx.Module):
  """logit = MLP(x), in float32."""

  def __init__(self, width_in: int, config: RecommenderConfig, recipe: Recipe, *, rngs: nnx.Rngs):
    self.mlp = MLP((width_in, config.head_width, 1), "relu", recipe, rngs=rngs)

  def __call__(self, x_BD: jax.Array) -> jax.Array:
    return self.mlp(x_BD)[:, 0].astype(jnp.float32)


class LogisticRegression(nnx.Module):
  """logit = b + sum over features of the mean weight of its ids + w . numeric."""

  def __init__(self, config: RecommenderConfig, features: int, numeric: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.tokens = _Tokens(config, features, numeric, recipe, rngs=rngs)  # of width 1
    self.bias = nnx.Param(jnp.zeros((), jnp.float32))

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    return jnp.sum(self.tokens(inputs), axis=(1, 2), dtype=jnp.float32) + self.bias[...]


class Dlrm(nnx.Module):
  """logit = MLP([x | dots of all pairs of tokens])   (DLRM, section 2.1, with its bottom MLP one layer deep)."""

  def __init__(self, config: RecommenderConfig, features: int, numeric: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.tokens = _Tokens(config, features, numeric, recipe, rngs=rngs)
    number = self.tokens.number
    self.head = _Head(number * config.width + number * (number - 1) // 2, config, recipe, rngs=rngs)
    self.recipe = recipe

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    x_BND = self.tokens(inputs)
    flat_BD = x_BND.reshape(len(x_BND), -1)
    return self.head(jnp.concatenate([flat_BD, pairwise_dots(x_BND, self.recipe)], axis=1))


class Dcnv2(nnx.Module):
  """logit = MLP(cross layers of all tokens, one after another)   (DCNv2, its stacked form)."""

  def __init__(self, config: RecommenderConfig, features: int, numeric: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.tokens = _Tokens(config, features, numeric, recipe, rngs=rngs)
    width = self.tokens.number * config.width
    self.cross = CrossNetwork(width, config.num_layers, recipe, rngs=rngs)
    self.head = _Head(width, config, recipe, rngs=rngs)

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    x_BND = self.tokens(inputs)
    return self.head(self.cross(x_BND.reshape(len(x_BND), -1)))


class WukongRecommender(nnx.Module):
  """logit = MLP(Wukong layers)   (Wukong, section 3)."""

  def __init__(self, config: RecommenderConfig, features: int, numeric: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.tokens = _Tokens(config, features, numeric, recipe, rngs=rngs)
    self.interact = Wukong(self.tokens.number, config.width, _wukong(config, config.num_layers), recipe, rngs=rngs)
    self.head = _Head(config.tokens * config.width, config, recipe, rngs=rngs)

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    x_BND = self.interact(self.tokens(inputs))
    return self.head(x_BND.reshape(len(x_BND), -1))


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
    self.interact = Wukong(tokens + config.pooled_tokens, width, _wukong(config, 1), recipe, rngs=rngs)

  def __call__(self, x_BND: jax.Array, s_TD: jax.Array, offsets: jax.Array, rotary) -> tuple[jax.Array, jax.Array]:
    """(x_BND, s_TD)."""
    s_TD = self.personalised(s_TD, self.summary(x_BND), offsets)
    s_TD = self.attention(s_TD, offsets, rotary)
    x_BND = jnp.concatenate([x_BND, self.pooling(s_TD, offsets)], axis=1)
    return self.interact(x_BND), s_TD


class GemRecommender(nnx.Module):
  """logit = MLP(X of the last block); S begins as the history, X as the features."""

  def __init__(
    self, config: RecommenderConfig, features: int, numeric: int, longest: int, recipe: Recipe, *, rngs: nnx.Rngs
  ):
    self.tokens = _Tokens(config, features, numeric, recipe, rngs=rngs)
    self.rotary = TimeRotary(head_width=config.width // config.num_heads, t_scale=config.time_scale)
    tokens = (self.tokens.number, *[config.tokens] * (config.num_layers - 1))
    self.blocks = nnx.List([GemBlock(config, number, longest, recipe, rngs=rngs) for number in tokens])
    self.head = _Head(config.tokens * config.width, config, recipe, rngs=rngs)

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    x_BND, s_TD = self.tokens(inputs), clear_padding(inputs.history_TD, inputs.offsets)
    rotary = self.rotary(inputs.age_T, inputs.offsets)
    for block in self.blocks:
      x_BND, s_TD = block(x_BND, s_TD, inputs.offsets, rotary)
    return self.head(x_BND.reshape(len(x_BND), -1))


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
  kinds = {"logistic": LogisticRegression, "dlrm": Dlrm, "dcnv2": Dcnv2, "wukong": WukongRecommender}
  return kinds[config.kind](config, features, numeric, recipe, rngs=rngs)


def _wukong(config: RecommenderConfig, num_layers: int) -> WukongConfig:
  half = config.tokens // 2
  return WukongConfig(
    rank=config.rank, hidden=(config.mlp_width,), num_layers=num_layers, fmb_tokens=half, lcb_tokens=half
  )
