"""Embedding tables of a recommender, what of them a batch reads, and what all recommenders begin and end with.

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
from sparse_lm.models.mlp import MLP, Affine, Identity
from sparse_lm.models.wukong import WukongConfig
from sparse_lm.precision.recipes import Recipe
from sparse_lm.recsys_config import RecommenderConfig

Tables = dict[str, jax.Array]  # [V, D] each, by feature
Sinks = dict[str, jax.Array]  # f32[bags, D] of zeros, one for each lookup


class Lookup(NamedTuple):
  """Rows of a table that are read, pooled by bags."""

  table: str
  ids_T: jax.Array
  offsets: jax.Array


class Stream(NamedTuple):
  """Events of the samples' users, newest last, packed."""

  events_TD: jax.Array  # item and action of each event, added
  age_T: jax.Array  # f32, seconds from an event to the one that is predicted
  offsets: jax.Array  # i32[B + 1]


class Inputs(NamedTuple):
  """What a model gets, in the compute dtype, as wide as the tables' rows."""

  tokens_BFD: jax.Array  # one for each feature of user and item
  item_BD: jax.Array  # the one among them that events are compared with
  numeric_BN: jax.Array
  streams: tuple[Stream, ...]


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
    item_BD=found["item"],
    numeric_BN=jnp.asarray(batch.numeric_BN, recipe.compute_dtype),
    streams=(
      Stream(
        events_TD=found["history.item"] + found["history.action"],
        age_T=jnp.asarray(batch.history.age_T),
        offsets=jnp.asarray(batch.history.offsets),
      ),
    ),
  )


def to_width(width_in: int, width_out: int, recipe: Recipe, *, rngs: nnx.Rngs) -> Affine | Identity:
  """From one width to another, learnt where they differ."""
  return Identity() if width_in == width_out else Affine(width_in, width_out, recipe, rngs=rngs)


class FeatureTokens(nnx.Module):
  """The features' tokens, and one more made of the numeric features if there are any."""

  def __init__(self, config: RecommenderConfig, features: int, numeric: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.widen = to_width(config.table_width, config.width, recipe, rngs=rngs)
    self.of_numeric = Affine(numeric, config.width, recipe, rngs=rngs) if numeric else None
    self.features = features
    self.number = features + (numeric > 0)

  def __call__(self, inputs: Inputs) -> jax.Array:
    """x_BND, N = `number`."""
    x_BND = self.widen(inputs.tokens_BFD)
    if self.of_numeric is None:
      return x_BND
    return jnp.concatenate([x_BND, self.of_numeric(inputs.numeric_BN)[:, None, :]], axis=1)

  def flops(self) -> int:
    """Of a sample: 2 F D E to widen rows of E, and 2 N D for the numeric features."""
    return self.features * self.widen.flops() + (0 if self.of_numeric is None else self.of_numeric.flops())


class LogitHead(nnx.Module):
  """logit = MLP(x), in float32."""

  def __init__(self, width_in: int, config: RecommenderConfig, recipe: Recipe, *, rngs: nnx.Rngs):
    self.mlp = MLP((width_in, config.head_width, 1), "relu", recipe, rngs=rngs)

  def __call__(self, x_BD: jax.Array) -> jax.Array:
    return self.mlp(x_BD)[:, 0].astype(jnp.float32)

  def flops(self) -> int:
    """Of a sample: those of the MLP."""
    return self.mlp.flops()


def wukong_config(config: RecommenderConfig, num_layers: int) -> WukongConfig:
  """Layers that put out `config.tokens` tokens, half of them by the factorisation machine."""
  half = config.tokens // 2
  return WukongConfig(
    rank=config.rank,
    hidden=(config.mlp_width,) * config.mlp_layers,
    num_layers=num_layers,
    fmb_tokens=half,
    lcb_tokens=half,
  )
