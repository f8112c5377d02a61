"""Training of next-item models, as the loop sees it (gem, 6.3).

Each token of a row predicts the next one against uniform negatives. The negatives and what dropout drops follow from
the seed and the step, so that a run that is resumed sees the same. Beside the published recipe, gradients are clipped
and the learning rate falls by a cosine: the number of steps is fixed beforehand, and nobody picks the best epoch.

Evaluation ranks all items of the catalogue for the last event of each user, those that the user has already met among
them, as the public evaluation does.

Dimension key: B rows of a batch, T packed tokens, V items, N negatives, R rows of a part.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sparse_lm.data import training_batches
from sparse_lm.data.batches import BatchIterator
from sparse_lm.data.sequences import Batch, Sequences, open_sequences
from sparse_lm.evaluation.popularity import popularity_ranks
from sparse_lm.evaluation.ranking import hit_rate, ndcg, ranks
from sparse_lm.models.next_item import NextItemModel, next_items, sampled_softmax
from sparse_lm.next_item_config import NextItemConfig
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.training import loop
from sparse_lm.training.adamw import adamw
from sparse_lm.training.interaction_task import FREE_FIELDS, InteractionTask, fingerprint
from sparse_lm.training.progress import Progress
from sparse_lm.training.state import COMPILE_FAST, COMPILER_OPTIONS, learning_rate
from sparse_lm.training.task import Json, Step

_CUTOFFS = (10, 50)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NextItemState:
  """A pytree; every leaf is an array on the device."""

  step: jax.Array  # i32[], steps done
  model: NextItemModel  # float32 master weights
  optimizer: optax.OptState
  first_bad_step: jax.Array  # i32[], first step whose loss or gradient was NaN or infinite; -1 while there is none


def train(config: NextItemConfig, workdir: Path, *, progress: Progress | None = None) -> Json:
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
  make_task = lambda report: NextItemTask(config, report)
  return loop.train(config, workdir, make_task, check=lambda workdir: None, free_fields=FREE_FIELDS, progress=progress)


class NextItemTask(InteractionTask):
  """Prediction of the item that a user meets next."""

  unit = "sequence"
  remedy = "training.learning_rate"
  validates = True

  def __init__(self, config: NextItemConfig, report: Callable[[str], None]):
    super().__init__()
    self.config: NextItemConfig = config
    self.parts = open_sequences(config, report)
    self.units_per_step = config.training.batch_size
    log = self.parts.train.log
    columns = log.user_N, log.item_N, log.time_N
    self.identity = {"dataset": fingerprint(columns, (*log.users.names, *log.items.names))}

  def training_batches(self) -> BatchIterator:
    config = self.config
    return training_batches(
      self.parts.train, batch_size=config.training.batch_size, seed=config.seed, loader=config.data.loader
    )

  def make_init(self) -> jax.stages.Wrapped:
    return make_init(self.config, len(self.parts.counts_V))

  def compile(self, state: NextItemState, variant: str) -> Step:
    batch = self.place(self.parts.train.gather(np.zeros(0, np.int64)))
    return make_train_step(self.config).lower(state, batch).compile()

  def evaluate(self, state: NextItemState, variant: str) -> Json:
    parts = {"validation": self.parts.validation}
    if int(state.step) == self.config.training.steps:
      parts["test"] = self.parts.test
    judged = {part: self._judge(state.model, rows) for part, rows in parts.items()}
    return {f"{part}_{name}": x for part, found in judged.items() for name, x in found.items()}

  def highlights(self, entry: Json) -> list[str]:
    names = {"validation_hr@10": "HR@10", "validation_ndcg@10": "NDCG@10"}
    return [f"{title} {entry[name]:.4f}" for name, title in names.items() if name in entry]

  def _judge(self, model: NextItemModel, rows: Sequences) -> Json:
    """Over all users, or those of the first `training.eval_batches` batches; `loss` is over the whole catalogue."""
    training, number = self.config.training, len(rows)
    if training.eval_batches is not None:
      number = min(number, training.eval_batches * rows.batch_size)
    target_R = rows.last_item_R[:number]
    losses, places = [], []
    for first in range(0, number, rows.batch_size):
      numbers_B = np.arange(first, min(first + rows.batch_size, number))
      batch = self.place(rows.gather(numbers_B))
      scores_BV, loss_B = map(np.asarray, _predict(model, batch, temperature=self.config.loss.temperature))
      losses.append(loss_B[: len(numbers_B)])
      places.append(ranks(scores_BV[: len(numbers_B)], target_R[numbers_B]))
    found = {"loss": float(np.mean(np.concatenate(losses), dtype=np.float64))}  # NaN, for which the loop stops
    found |= _metrics(np.concatenate(places))
    popular = _metrics(popularity_ranks(self.parts.counts_V, target_R))
    return found | {f"popularity_{name}": x for name, x in popular.items()}


def _metrics(ranks_R: np.ndarray) -> Json:
  found = {f"hr@{k}": hit_rate(ranks_R, k) for k in _CUTOFFS}
  return found | {f"ndcg@{k}": ndcg(ranks_R, k) for k in _CUTOFFS}


def make_init(config: NextItemConfig, num_items: int) -> jax.stages.Wrapped:
  """Returns the jitted maker of a fresh state; its values depend on the seed and on the number of items alone."""

  def init() -> NextItemState:
    model_key, _ = jax.random.split(jax.random.key(config.seed))
    recipe = RECIPES[config.precision.recipe]
    model = NextItemModel(config.model, num_items, config.data.longest, recipe, rngs=nnx.Rngs(model_key))
    return NextItemState(
      step=jnp.int32(0),
      model=model,
      optimizer=adamw(config.training).init(model),
      first_bad_step=jnp.int32(-1),
    )

  return jax.jit(init, compiler_options=COMPILE_FAST)


def make_train_step(config: NextItemConfig) -> jax.stages.Wrapped:
  """Returns the jitted `step(state, batch) -> (state, metrics)`, which consumes the state."""
  optimizer, schedule = adamw(config.training), learning_rate(config.training)

  def step(state: NextItemState, batch: Batch) -> tuple[NextItemState, Json]:
    _, run_key = jax.random.split(jax.random.key(config.seed))
    dropout_key, negative_key = jax.random.split(jax.random.fold_in(run_key, state.step))

    def loss(model: NextItemModel) -> jax.Array:
      right_T, exists_T = next_items(batch)
      items_VD = model.items()
      shape_TN = len(right_T), config.loss.negatives
      negative_TN = jax.random.randint(negative_key, shape_TN, 0, len(items_VD))
      users_TD = model(batch, key=dropout_key)
      return sampled_softmax(users_TD, items_VD, right_T, exists_T, negative_TN, temperature=config.loss.temperature)

    value, grads = jax.value_and_grad(loss)(state.model)
    updates, optimizer_state = optimizer.update(grads, state.optimizer, state.model)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
    first_bad_step = jnp.where((state.first_bad_step < 0) & ~finite, state.step + 1, state.first_bad_step)
    new = NextItemState(
      step=state.step + 1,
      model=optax.apply_updates(state.model, updates),
      optimizer=optimizer_state,
      first_bad_step=first_bad_step,
    )
    metrics = {"loss": value, "grad_norm": grad_norm, "learning_rate": schedule(state.step)}
    return new, metrics | {"first_bad_step": first_bad_step}

  return jax.jit(step, donate_argnums=0, compiler_options=COMPILER_OPTIONS)


@jax.jit(static_argnames="temperature", compiler_options=COMPILER_OPTIONS)
def _predict(model: NextItemModel, batch: Batch, *, temperature: float) -> tuple[jax.Array, jax.Array]:
  """(scores_BV, loss_B): the loss of softmax over all items, of the last item of each row."""
  scores_BV = model.scores(batch)
  last_B = batch.item_T[jnp.maximum(batch.offsets[1:] - 1, 0)]
  return scores_BV, optax.softmax_cross_entropy_with_integer_labels(scores_BV / temperature, last_B)
