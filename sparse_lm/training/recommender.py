"""Training of a recommender, as the loop sees it.

Weights of the model go by AdamW; embedding tables by row-wise Adagrad, which reads and writes the rows that a batch has
looked up. The gradient of a table never exists as an array of its size.

A student's logit s learns from the label y and from its teacher's logit z (gem, 2.7):

  loss = CE(s, y) + weight CE(s, sigmoid(z)),   CE(s, p) = -p log sigmoid(s) - (1 - p) log sigmoid(-s)

With an adapter, a = `Adapter`(z, features) takes the place of z. In the same step it learns, by CE(a, y), from those
samples alone that the teacher was not trained on. Neither loss has a gradient in what the other one trains.

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

from pallas_kernels import embedding
from sparse_lm.data import training_batches
from sparse_lm.data.batches import BatchIterator
from sparse_lm.data.recsys import open_samples
from sparse_lm.data.samples import Batch, Samples
from sparse_lm.errors import UserError
from sparse_lm.evaluation.prediction import PredictionSums, grouped_auc, reliability
from sparse_lm.models.features import Inputs, Lookup, Sinks, Tables, front_end, lookups, zero_sinks
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.recsys_config import RecsysConfig
from sparse_lm.training import loop
from sparse_lm.training.adamw import adamw
from sparse_lm.training.interaction_task import FREE_FIELDS, InteractionTask
from sparse_lm.training.progress import Progress
from sparse_lm.training.recommender_state import AdapterState, RecsysState, dataset_fingerprint, make_init, predict
from sparse_lm.training.state import COMPILER_OPTIONS, learning_rate
from sparse_lm.training.teacher import open_teacher, teach

Json = dict[str, Any]


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
    given = config.distillation.teacher
    teacher = None if given is None else open_teacher(given)
    parts = open_samples(config, report)
    self.train, self.validation, self.test, self.logit_N = parts
    self.units_per_step = config.training.batch_size
    self.validates = len(self.validation) + len(self.test) > 0
    for part, samples in (("validation", self.validation), ("test", self.test)):
      labels_N = samples.labels[self._judged(samples)]
      if len(labels_N) and labels_N.min() == labels_N.max():  # of all samples, `open_samples` refuses it
        raise UserError(
          f"training.eval_batches={config.training.eval_batches} judges {len(labels_N):,} of {len(samples):,} {part}"
          f" events, which all have the label {labels_N[0]:g}: NE and AUC would be undefined; raise it"
        )
    events = [samples.events_N for samples in (self.train, self.validation, self.test)]
    self.identity = {"dataset": dataset_fingerprint(self.train, events), "teacher": None}
    if teacher is not None:
      self.identity["teacher"] = teacher.fingerprint
      with jax.set_mesh(self.mesh):
        self.train = dataclasses.replace(self.train, teaching=teach(teacher, config, parts, report))

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

  def refuse_other_run(self, directory: Path, metadata: Json) -> None:
    super().refuse_other_run(directory, metadata)
    before, now = (of.get("teacher") for of in (metadata, self.identity))
    if before != now:
      name = lambda fingerprint: "none" if fingerprint is None else fingerprint[:12]
      raise UserError(
        f"the checkpoints in {directory.parent} had another teacher (fingerprint {name(before)}, now {name(now)});"
        " set distillation.teacher back, or give another --workdir"
      )

  def _judged(self, samples: Samples) -> np.ndarray:
    """Events of all samples, or of the first `training.eval_batches` batches of them."""
    batches = self.config.training.eval_batches
    return samples.events_N[: None if batches is None else batches * samples.batch_size]

  def _judge(self, state: RecsysState, samples: Samples) -> Json:
    events_N = self._judged(samples)
    logits_N = predict(state.model, state.tables, samples, len(events_N), recipe=self.config.precision.recipe)
    labels_N = samples.labels[events_N]
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


def make_train_step(config: RecsysConfig) -> jax.stages.Wrapped:
  """Returns the jitted `step(state, batch) -> (state, metrics)`, which consumes the state."""
  optimizer, schedule = adamw(config.training), learning_rate(config.training)
  recipe, tables_config, weight = RECIPES[config.precision.recipe], config.tables, config.distillation.weight

  def step(state: RecsysState, batch: Batch) -> tuple[RecsysState, Json]:
    sinks = zero_sinks(batch, config.model.table_width)
    adapter, adapter_metrics = state.adapter, dict[str, jax.Array]()
    teacher_B = None if batch.teaching is None else jnp.asarray(batch.teaching.logit_B)
    if adapter is not None:
      inputs = front_end(state.tables, sinks, batch, recipe)
      adapter, teacher_B, adapter_metrics = fit_adapter(adapter, inputs, batch, optimizer)

    def loss(model, sinks):
      logit_B = model(front_end(state.tables, sinks, batch, recipe))
      by_label = cross_entropy(logit_B, batch.label_B, batch.weight_B)
      if teacher_B is None or weight == 0:
        return by_label, {}
      by_teacher = cross_entropy(logit_B, jax.nn.sigmoid(teacher_B), batch.weight_B)
      return by_label + weight * by_teacher, {"label_loss": by_label, "teacher_loss": by_teacher}

    (value, terms), (grads, d_sinks) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(state.model, sinks)
    updates, optimizer_state = optimizer.update(grads, state.optimizer, state.model)
    rate = tables_config.learning_rate * schedule(state.step) / config.training.learning_rate
    tables, moments = update_tables(
      state.tables, state.moments, lookups(batch), d_sinks, learning_rate=rate, eps=tables_config.epsilon
    )
    grad_norm = optax.tree.norm((grads, d_sinks))
    finite = jnp.isfinite(jnp.stack([value, grad_norm, *adapter_metrics.values()])).all()
    first_bad_step = jnp.where((state.first_bad_step < 0) & ~finite, state.step + 1, state.first_bad_step)
    new = RecsysState(
      step=state.step + 1,
      model=optax.apply_updates(state.model, updates),
      optimizer=optimizer_state,
      tables=tables,
      moments=moments,
      adapter=adapter,
      first_bad_step=first_bad_step,
    )
    metrics = {"loss": value, "grad_norm": grad_norm, "learning_rate": schedule(state.step)}
    return new, metrics | terms | adapter_metrics | {"first_bad_step": first_bad_step}

  return jax.jit(step, donate_argnums=0, compiler_options=COMPILER_OPTIONS)


def fit_adapter(
  adapter: AdapterState, inputs: Inputs, batch: Batch, optimizer: optax.GradientTransformation
) -> tuple[AdapterState, jax.Array, Json]:
  """(adapter after a step on the labels that are fresh, the teacher's logits as corrected before it, metrics)."""
  teaching = batch.teaching
  assert teaching is not None, "a config with an adapter has a teacher"

  def loss(model):
    logit_B = model(teaching.logit_B, inputs)
    return cross_entropy(logit_B, batch.label_B, batch.weight_B * teaching.fresh_B), logit_B

  (value, logit_B), grads = jax.value_and_grad(loss, has_aux=True)(adapter.model)
  updates, optimizer_state = optimizer.update(grads, adapter.optimizer, adapter.model)
  after = AdapterState(optax.apply_updates(adapter.model, updates), optimizer_state)
  return after, logit_B, {"adapter_loss": value, "adapter_grad_norm": optax.tree.norm(grads)}


def cross_entropy(logit_B: jax.Array, target_B: jax.Array, weight_B: jax.Array) -> jax.Array:
  """Mean over samples, in nats; 0 for none. Of a target 0 or 1 it is -log p(target).

  A sample of weight 0 reaches neither it nor a gradient.
  """
  counts_B = weight_B > 0
  loss_B = optax.sigmoid_binary_cross_entropy(jnp.where(counts_B, logit_B, 0), target_B)
  total = jnp.sum(jnp.where(counts_B, weight_B * loss_B, 0))
  return total / jnp.maximum(jnp.sum(weight_B), 1)


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
