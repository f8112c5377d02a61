"""What the training loop asks of what it trains: a language model, a recommender."""

import abc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from sparse_lm import config_io
from sparse_lm.config import CheckpointConfig, TrainingConfig
from sparse_lm.errors import UserError

_SHOWN = 8  # differences of configs that a message names

Json = dict[str, Any]
Metrics = dict[str, Any]  # of one step; arrays, among them `loss` and `first_bad_step`
# A pytree of arrays on the mesh. It has, among others, `step` (i32[], steps done), `model` and `first_bad_step` (i32[],
# the first whose loss or gradient was NaN or infinite; -1 while there is none).
State = Any


class RunConfig(Protocol):
  """What every config of a run has."""

  training: TrainingConfig
  checkpoint: CheckpointConfig

  def validate(self) -> None:
    """Raises UserError at the first thing that cannot work."""


class Batches(Iterator[Any], Protocol):
  """Endless batches of the host, which can go on from where another iterator was."""

  def state(self) -> Json:
    """Where it is, after the batches that were taken."""

  def restore(self, state: Json) -> None:
    """Goes there."""

  def close(self) -> None:
    """Ends what works ahead."""


class Step(Protocol):
  """(state, placed batch) -> (state, metrics), compiled ahead of time; it consumes the state."""

  def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]: ...

  def memory_analysis(self) -> Any:
    """What the compiler says of its memory; None: nothing."""


class Task(abc.ABC):
  """One kind of training. The loop calls all methods inside `jax.set_mesh(self.mesh)`."""

  config: RunConfig
  mesh: Mesh
  identity: Json  # of the data, saved with each checkpoint
  unit: str  # that speed is measured in, such as "token"
  units_per_step: int
  remedy: str  # what to lower when a loss is not finite
  validates: bool  # whether there is anything to evaluate on

  @abc.abstractmethod
  def training_batches(self) -> Batches:
    """Batches of this process."""

  @abc.abstractmethod
  def make_init(self) -> jax.stages.Wrapped:
    """The jitted maker of a fresh state."""

  @abc.abstractmethod
  def compile(self, state: State, variant: str) -> Step:
    """The step by a program."""

  @abc.abstractmethod
  def place(self, batch: Any) -> Any:
    """A training batch on the mesh."""

  @abc.abstractmethod
  def entry(self, values: Json, variant: str) -> Json:
    """What metrics.jsonl says of a step, from its metrics on the host."""

  @abc.abstractmethod
  def evaluate(self, state: State, variant: str) -> Json:
    """What metrics.jsonl says of the validation data, `validation_loss` among it."""

  @abc.abstractmethod
  def refuse_other_run(self, directory: Path, metadata: Json) -> None:
    """Raises UserError for a checkpoint in a work folder that is not one of this run."""

  @abc.abstractmethod
  def foreign_parameters(self, given: str, path: Path, abstract: Any) -> Any:
    """Those of the checkpoint of another run; raises UserError if they do not fit. `given` names the field."""

  def utilisation(self, units_per_second: float) -> float | None:
    """Share of the devices' peak that the model's operations take; None: not known."""
    return None

  def highlights(self, entry: Json) -> list[str]:
    """What the progress line says beside losses and speed."""
    return []

  @abc.abstractmethod
  def write_files(self, workdir: Path) -> None:
    """Into the work folder, at the start."""

  # A task may have several programs for a step, and change from one to another; the device decides.

  def wanted_variant(self, state: State) -> str:
    """The program that is to compute the next step."""
    return ""

  def may_change_after(self, steps: int) -> bool:
    """Whether the wanted program may be another one after so many steps."""
    return False

  def change_line(self, variant: str, metrics: Metrics) -> str:
    """Says why the program changes, from the metrics of the last step."""
    raise NotImplementedError


def refuse_differences(
  where: str,
  old: Json,
  config: Any,
  *,
  free: tuple[str, ...],
  compared: tuple[str, ...] = ("",),
) -> None:
  """Raises UserError if a config differs from that of a run, beside fields whose names start as those of `free`."""
  changed = [
    f"{name}: {before!r} -> {now!r}"
    for name, before, now in config_io.differences(old, config_io.to_dict(config))
    if name.startswith(compared) and not name.startswith(free)
  ]
  if changed:
    more = [f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []  # of another kind of model, say
    raise UserError(
      f"{where} holds a run with another config ({'; '.join([*changed[:_SHOWN], *more])});"
      " change the fields back to go on from it, or give another one"
    )
