"""What a run of a recommender consists of, how it begins, and what it predicts.

Dimension key: B samples of a batch, N samples, V rows of a table.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sparse_lm.data.samples import Batch, Samples
from sparse_lm.models.adapter import Adapter
from sparse_lm.models.features import Tables, front_end, zero_sinks
from sparse_lm.models.recommender import make_recommender
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.recsys_config import RecsysConfig
from sparse_lm.training.adamw import adamw
from sparse_lm.training.interaction_task import fingerprint
from sparse_lm.training.state import COMPILE_FAST, COMPILER_OPTIONS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdapterState:
  """A pytree. Clipped and stepped apart from the model, which would feel it otherwise."""

  model: Adapter
  optimizer: optax.OptState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecsysState:
  """A pytree; every leaf is an array on the device."""

  step: jax.Array  # i32[], steps done
  model: nnx.Module  # float32 master weights
  optimizer: optax.OptState
  tables: Tables
  moments: dict[str, jax.Array]  # f32[V] of each table
  adapter: AdapterState | None  # of the teacher, with distillation.adapter
  first_bad_step: jax.Array  # i32[], first step whose loss or gradient was NaN or infinite; -1 while there is none


def make_init(config: RecsysConfig, samples: Samples) -> jax.stages.Wrapped:
  """Returns the jitted maker of a fresh state; its values depend on the seed and on the sizes of tables alone."""
  sizes = samples.table_sizes
  features = len(sizes) - 1  # the actions are no feature
  recipe = RECIPES[config.precision.recipe]

  def init() -> RecsysState:
    model_key, table_key, adapter_key = jax.random.split(jax.random.key(config.seed), 3)
    model = make_recommender(
      config.model,
      features=features,
      numeric=samples.num_numeric,
      longest=config.data.longest,
      recipe=recipe,
      rngs=nnx.Rngs(model_key),
    )
    adapter = None
    if config.distillation.adapter:
      width = features * config.model.table_width + samples.num_numeric
      adapter_model = Adapter(width, config.distillation.adapter_width, recipe, rngs=nnx.Rngs(adapter_key))
      adapter = AdapterState(adapter_model, adamw(config.training).init(adapter_model))
    keys = dict(zip(sorted(sizes), jax.random.split(table_key, len(sizes)), strict=True))
    draw = lambda name, rows: config.tables.init_std * jax.random.normal(keys[name], (rows, config.model.table_width))
    return RecsysState(
      step=jnp.int32(0),
      model=model,
      optimizer=adamw(config.training).init(model),
      tables={name: draw(name, rows) for name, rows in sizes.items()},
      moments={name: jnp.zeros((rows,), jnp.float32) for name, rows in sizes.items()},
      adapter=adapter,
      first_bad_step=jnp.int32(-1),
    )

  return jax.jit(init, compiler_options=COMPILE_FAST)


def predict(model: nnx.Module, tables: Tables, samples: Samples, number: int, *, recipe: str) -> np.ndarray:
  """logit_N, f32, of the first `number` samples, in batches."""
  logits = [np.zeros(0, np.float32)]
  for first in range(0, number, samples.batch_size):
    numbers_B = np.arange(first, min(first + samples.batch_size, number))
    batch = jax.tree.map(jnp.asarray, samples.gather(numbers_B))
    logits.append(np.asarray(_predict(model, tables, batch, recipe=recipe))[: len(numbers_B)])
  return np.concatenate(logits)


@jax.jit(static_argnames="recipe", compiler_options=COMPILER_OPTIONS)
def _predict(model, tables: Tables, batch: Batch, *, recipe: str) -> jax.Array:
  width = next(iter(tables.values())).shape[1]
  return model(front_end(tables, zero_sinks(batch, width), batch, RECIPES[recipe]))


def dataset_fingerprint(samples: Samples, parts: list[np.ndarray]) -> str:
  """Of the log that samples are from, its features, and its split: the numbers of the events of each part."""
  log = samples.log
  names: list[str] = []
  arrays = [log.user_N, log.item_N, log.time_N, samples.action_N, *parts]
  for entities in (log.users, log.items):
    names += entities.names
    for name, numbers in sorted(entities.numeric.items()):
      names.append(name)
      arrays.append(numbers)
    for name, it in sorted(entities.categorical.items()):
      names.append(f"{name} {it.table_size}")
      arrays += [it.ids_T, it.offsets]
  return fingerprint(arrays, names)
