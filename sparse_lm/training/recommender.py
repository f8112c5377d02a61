"""Training of a recommender, as the loop sees it.

Weights of the model go by AdamW; embedding tables by row-wise Adagrad, which reads and writes the rows that a batch has
looked up. The gradient of a table never exists as an array of its size.

Dimension key: B samples, D width, V rows of a table, T packed ids.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from pallas_kernels import embedding
from sparse_lm.data import training_batches
from sparse_lm.data.batches import BatchIterator
from sparse_lm.data.recsys import open_samples
from sparse_lm.data.samples import Batch, Samples
from sparse_lm.evaluation.prediction import PredictionSums, grouped_auc, reliability
from sparse_lm.models.features import Lookup, Sinks, Tables, front_end, lookups, zero_sinks
from sparse_lm.models.recommender import make_recommender
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.recsys_config import RecsysConfig
from sparse_lm.training import loop
from sparse_lm.training.adamw import adamw
from sparse_lm.training.interaction_task import FREE_FIELDS, InteractionTask, fingerprint
from sparse_lm.training.progress import Progress
from sparse_lm.training.state import COMPILE_FAST, COMPILER_OPTIONS, learning_rate

Json = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecsysState:
  """A pytree; every leaf is an array on the device."""

  step: jax.Array  # i32[], steps done
  model: nnx.Module  # float32 master weights
  optimizer: optax.OptState
  tables: Tables
  moments: dict[str, jax.Array]  # f32[V] of each table
  first_bad_step: jax.Array  # i32[], first step whose loss or gradient was NaN or infinite; -1 while there is none


def train(config: RecsysConfig, workdir: Path, *, progress: Progress | None = None) -> Json:
  """Trains until `training.steps`, from the newest whole checkpoint in the work folder if there is one.

  Args:
    config: validated here.
    workdir: a leading ~ is the home folder; receives config.json, env.json, metrics.jsonl and checkpoints/.
    progress: where lines and the bar go; standard output unless given.

  Returns:
    The last object of metrics.jsonl, {} if a finished run has lost it.

  Raises:
    UserError, NonFiniteError, SaveError, Preempted: as `loop.train`.
  """
  config.validate()
  workdir = Path(os.path.expanduser(workdir))
  make_task = lambda report: RecommenderTask(config, report)
  return loop.train(config, workdir, make_task, check=lambda workdir: None, free_fields=FREE_FIELDS, progress=progress)


class RecommenderTask(InteractionTask):
  """Prediction of a label from the features of an event and the events before it."""

  unit = "sample"
  remedy = "training.learning_rate or tables.learning_rate"

  def __init__(self, config: RecsysConfig, report: Callable[[str], None]):
    super().__init__()
    self.config: RecsysConfig = config
    self.train, self.validation, self.test, self.logit_N = open_samples(config, report)
    self.units_per_step = config.training.batch_size
    self.validates = len(self.validation) + len(self.test) > 0
    self.identity = {"dataset": _fingerprint(self.train, self.validation, self.test)}

  def training_batches(self) -> BatchIterator:
    config = self.config
    return training_batches(
      self.train, batch_size=config.training.batch_size, seed=config.seed, loader=config.data.loader
    )

  def make_init(self) -> jax.stages.Wrapped:
    return make_init(self.config, self.train)

  def compile(self, state: RecsysState, variant: str) -> "_Steps":
    step = make_train_step(self.config)
    batches = {capacity: self.place(self.train.padding(capacity)) for capacity in self.train.capacities}
    return _Steps({capacity: step.lower(state, batch).compile() for capacity, batch in batches.items()})

  def evaluate(self, state: RecsysState, variant: str) -> Json:
    parts = {"validation": self.validation}
    if int(state.step) == self.config.training.steps:
      parts["test"] = self.test
    judged = {part: self._judge(state, samples) for part, samples in parts.items() if len(samples)}
    return {f"{part}_{name}": x for part, found in judged.items() for name, x in found.items()}

  def highlights(self, entry: Json) -> list[str]:
    names = {"validation_ne": "NE", "validation_auc": "AUC"}
    return [f"{title} {entry[name]:.4f}" for name, title in names.items() if name in entry]

  def _judge(self, state: RecsysState, samples: Samples) -> Json:
    """Over all samples, or the first `training.eval_batches` batches of them."""
    training, logits = self.config.training, []
    number = len(samples)
    if training.eval_batches is not None:
      number = min(number, training.eval_batches * samples.batch_size)
    for first in range(0, number, samples.batch_size):
      numbers_B = np.arange(first, min(first + samples.batch_size, number))
      batch = self.place(samples.gather(numbers_B))
      logit_B = _predict(state.model, state.tables, batch, recipe=self.config.precision.recipe)
      logits.append(np.asarray(logit_B)[: len(numbers_B)])
    events_N = samples.events_N[:number]
    logits_N, labels_N = np.concatenate(logits), samples.labels[events_N]
    if not np.isfinite(logits_N).all():
      return {"loss": float("nan")}  # for which the loop stops
    sums = PredictionSums.of(logits_N, labels_N)
    within = grouped_auc(logits_N, labels_N, samples.log.user_N[events_N])
    metrics: Json = {"loss": sums.logloss, "ne": sums.ne, "auc": sums.auc, "gauc": within.value}
    metrics |= {"calibration": sums.calibration, "users_left_out_of_gauc": within.left_out}
    metrics["mean_predicted"], metrics["mean_observed"] = reliability(logits_N, labels_N)  # by groups
    if self.logit_N is not None:
      metrics["bayes_ne"] = PredictionSums.of(self.logit_N[events_N].astype(np.float32), labels_N).ne
    return metrics


class _Steps:
  """A compiled step for each capacity of a batch's histories."""

  def __init__(self, by_capacity: dict[int, jax.stages.Compiled]):
    self._by_capacity = by_capacity

  def __call__(self, state: RecsysState, batch: Batch) -> tuple[RecsysState, Json]:
    return self._by_capacity[len(batch.history.item_T)](state, batch)

  def memory_analysis(self):
    """Of the largest."""
    return self._by_capacity[max(self._by_capacity)].memory_analysis()


def make_init(config: RecsysConfig, samples: Samples) -> jax.stages.Wrapped:
  """Returns the jitted maker of a fresh state; its values depend on the seed and on the sizes of tables alone."""
  sizes = samples.table_sizes
  features = len(sizes) - 1  # the actions are no feature

  def init() -> RecsysState:
    model_key, table_key = jax.random.split(jax.random.key(config.seed))
    model = make_recommender(
      config.model,
      features=features,
      numeric=samples.num_numeric,
      longest=config.data.longest,
      recipe=RECIPES[config.precision.recipe],
      rngs=nnx.Rngs(model_key),
    )
    keys = dict(zip(sorted(sizes), jax.random.split(table_key, len(sizes)), strict=True))
    draw = lambda name, rows: config.tables.init_std * jax.random.normal(keys[name], (rows, config.model.width))
    return RecsysState(
      step=jnp.int32(0),
      model=model,
      optimizer=adamw(config.training).init(model),
      tables={name: draw(name, rows) for name, rows in sizes.items()},
      moments={name: jnp.zeros((rows,), jnp.float32) for name, rows in sizes.items()},
      first_bad_step=jnp.int32(-1),
    )

  return jax.jit(init, compiler_options=COMPILE_FAST)


def make_train_step(config: RecsysConfig) -> jax.stages.Wrapped:
  """Returns the jitted `step(state, batch) -> (state, metrics)`, which consumes the state."""
  optimizer, schedule = adamw(config.training), learning_rate(config.training)
  recipe, tables_config = RECIPES[config.precision.recipe], config.tables

  def step(state: RecsysState, batch: Batch) -> tuple[RecsysState, Json]:
    def loss(model, sinks):
      return cross_entropy(model(front_end(state.tables, sinks, batch, recipe)), batch)

    sinks = zero_sinks(batch, config.model.width)
    value, (grads, d_sinks) = jax.value_and_grad(loss, argnums=(0, 1))(state.model, sinks)
    updates, optimizer_state = optimizer.update(grads, state.optimizer, state.model)
    rate = tables_config.learning_rate * schedule(state.step) / config.training.learning_rate
    tables, moments = update_tables(
      state.tables, state.moments, lookups(batch), d_sinks, learning_rate=rate, eps=tables_config.epsilon
    )
    grad_norm = optax.tree.norm((grads, d_sinks))
    finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
    first_bad_step = jnp.where((state.first_bad_step < 0) & ~finite, state.step + 1, state.first_bad_step)
    new = RecsysState(
      step=state.step + 1,
      model=optax.apply_updates(state.model, updates),
      optimizer=optimizer_state,
      tables=tables,
      moments=moments,
      first_bad_step=first_bad_step,
    )
    metrics = {"loss": value, "grad_norm": grad_norm, "learning_rate": schedule(state.step)}
    return new, metrics | {"first_bad_step": first_bad_step}

  return jax.jit(step, donate_argnums=0, compiler_options=COMPILER_OPTIONS)


def cross_entropy(logit_B: jax.Array, batch: Batch) -> jax.Array:
  """Mean over samples of -log p(label), in nats; 0 for none. A sample of weight 0 reaches neither it nor a gradient."""
  counts_B = batch.weight_B > 0
  loss_B = optax.sigmoid_binary_cross_entropy(jnp.where(counts_B, logit_B, 0), batch.label_B)
  total = jnp.sum(jnp.where(counts_B, batch.weight_B * loss_B, 0))
  return total / jnp.maximum(jnp.sum(batch.weight_B), 1)


def update_tables(
  tables: Tables,
  moments: dict[str, jax.Array],
  reads: dict[str, Lookup],
  d_sinks: Sinks,
  *,
  learning_rate: jax.Array,
  eps: float,
) -> tuple[Tables, dict[str, jax.Array]]:
  """(tables, moments) after one step: all lookups of a table in a batch make one."""
  tables, moments = dict(tables), dict(moments)
  for table in tables:
    names = [name for name, read in reads.items() if read.table == table]
    ids_T, offsets, d_out_BD = _joined([reads[name] for name in names], [d_sinks[name] for name in names])
    tables[table], moments[table] = embedding.rowwise_adagrad(
      tables[table], moments[table], ids_T, offsets, None, d_out_BD, learning_rate=learning_rate, eps=eps, mode="mean"
    )
  return tables, moments


def _joined(reads: list[Lookup], d_outs: list[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Several lookups as one. What pads the end of one becomes a bag of its own, without a gradient."""
  firsts = np.cumsum([0, *(len(read.ids_T) for read in reads)])
  width = d_outs[0].shape[1]
  offsets = jnp.concatenate([first + read.offsets for first, read in zip(firsts.tolist(), reads)])
  gap_1D = jnp.zeros((1, width), jnp.float32)
  d_out_BD = jnp.concatenate([part for d_out in d_outs for part in (d_out, gap_1D)][:-1])
  return jnp.concatenate([read.ids_T for read in reads]), offsets, d_out_BD


@jax.jit(static_argnames="recipe", compiler_options=COMPILER_OPTIONS)
def _predict(model, tables: Tables, batch: Batch, *, recipe: str) -> jax.Array:
  width = next(iter(tables.values())).shape[1]
  return model(front_end(tables, zero_sinks(batch, width), batch, RECIPES[recipe]))


def _fingerprint(*parts: Samples) -> str:
  """Of the log, its features and its split."""
  log = parts[0].log
  names: list[str] = []
  arrays = [log.user_N, log.item_N, log.time_N, parts[0].action_N, *(samples.events_N for samples in parts)]
  for entities in (log.users, log.items):
    names += entities.names
    for name, numbers in sorted(entities.numeric.items()):
      names.append(name)
      arrays.append(numbers)
    for name, it in sorted(entities.categorical.items()):
      names.append(f"{name} {it.table_size}")
      arrays += [it.ids_T, it.offsets]
  return fingerprint(arrays, names)
