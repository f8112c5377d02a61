"""A trained recommender as the teacher of another one (gem, 1.10 and 2.7).

A teacher may have been trained on a part of its student's events, such as the earlier ones; it is stale then, and the
others are fresh to it. It must not have been trained on an event that judges the student, who would learn its label.

The teacher predicts all training events of the student once, before the first step.

Dimension key: N events.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_lm import config_io
from sparse_lm.data.interactions import histories
from sparse_lm.data.recsys import Parts, history_length, split_events
from sparse_lm.data.samples import Samples, Teaching
from sparse_lm.errors import UserError
from sparse_lm.evaluation.prediction import PredictionSums
from sparse_lm.recsys_config import RecsysConfig
from sparse_lm.training import checkpoint
from sparse_lm.training.recommender_state import dataset_fingerprint, make_init, predict


class Teacher(NamedTuple):
  """A finished run."""

  given: str  # how a message about it begins
  path: Path  # of its last checkpoint
  config: RecsysConfig
  dataset: str  # fingerprint of its log and split
  fingerprint: str  # of its parameters


def open_teacher(workdir: str) -> Teacher:
  """Reads what a work folder says of its run, and not yet its parameters.

  Raises:
    UserError: there is no finished run of a recommender.
  """
  given = f"distillation.teacher={workdir!r}"
  steps = checkpoint.steps(directory := Path(os.path.expanduser(workdir)) / "checkpoints")
  if not steps:
    raise UserError(f"{given} holds no checkpoint; give the --workdir of a finished run of a recommender")
  path = directory / str(steps[-1])
  try:
    metadata = checkpoint.read_metadata(path)
  except checkpoint.DamagedError as error:
    raise _damaged(given, path, error) from None
  try:
    config = config_io.from_dict(RecsysConfig, metadata["config"])
  except UserError as error:
    raise UserError(f"{given} holds no run of a recommender of this version: {error}") from None
  if steps[-1] < config.training.steps:
    raise UserError(f"{given} is at step {steps[-1]} of {config.training.steps}; finish that run first")
  parameters = {name: crc for name, crc in metadata["checksums"].items() if name.startswith(("model/", "tables/"))}
  fingerprint = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()
  return Teacher(given, path, config, metadata["dataset"], fingerprint)


def teach(teacher: Teacher, config: RecsysConfig, parts: Parts, report: Callable[[str], None]) -> Teaching:
  """Returns what a teacher says of all training samples of a student.

  Args:
    teacher: of any kind, and of any split of the same log.
    config: of the student.
    parts: the student's.
    report: takes a line.

  Raises:
    UserError: the teacher knows another log, predicts another label, was trained on what judges the student, leaves an
      adapter nothing to learn from, is damaged, or predicts NaN or infinity.
  """
  given, train = teacher.given, parts.train
  learnt_N = _training_events(teacher, config, train)
  judging_N = np.concatenate([parts.validation.events_N, parts.test.events_N])
  if leaked := int(np.isin(judging_N, learnt_N).sum()):
    raise UserError(
      f"{given} was trained on {leaked:,} of the {len(judging_N):,} events that judge this run; give one that was"
      " trained on earlier events, by larger fractions for its validation and test"
    )
  is_fresh_N = ~np.isin(train.events_N, learnt_N)
  if config.distillation.adapter and not is_fresh_N.any():
    raise UserError(
      f"distillation.adapter=True, but {given} was trained on all {len(train):,} training events, and no label is fresh"
      " to it; give one that was trained on earlier events, or set adapter=False"
    )
  report(f"{given}: {teacher.config.model.kind} at step {teacher.path.name} predicts {len(train):,} events")
  logit_N = _predictions(teacher, train)
  if (bad := np.flatnonzero(~np.isfinite(logit_N))).size:
    raise UserError(
      f"{given} predicts {logit_N[bad[0]]} for {len(bad):,} of {len(train):,} events, first for event"
      f" {train.events_N[bad[0]]}; give a run that did not diverge"
    )
  if is_fresh_N.any():
    ne = PredictionSums.of(logit_N[is_fresh_N], train.labels[train.events_N[is_fresh_N]]).ne
    report(f"{given}: {is_fresh_N.sum():,} of these events are fresh to it; NE {ne:.4f} on them")
  return Teaching(logit_N, is_fresh_N.astype(np.float32))


def _training_events(teacher: Teacher, config: RecsysConfig, train: Samples) -> np.ndarray:
  """Of the teacher, by its own split of the student's log."""
  events = split_events(train.log, teacher.config.data)
  if dataset_fingerprint(train, events) != teacher.dataset:
    raise UserError(
      f"{teacher.given} was trained on other interactions than this run; give one of the same data.source, path and"
      " synthetic_* fields"
    )
  theirs, ours = teacher.config.data.positive_from, config.data.positive_from
  if theirs != ours:
    raise UserError(
      f"{teacher.given} predicts labels of data.positive_from={theirs}, but this run has {ours}; make them equal"
    )
  return events[0]


def _predictions(teacher: Teacher, train: Samples) -> np.ndarray:
  """logit_N, f32."""
  longest = history_length(teacher.config)
  samples = dataclasses.replace(train, past=histories(train.log, longest=longest), longest=longest)
  state = jax.eval_shape(make_init(teacher.config, samples))
  on_mesh = NamedSharding(jax.sharding.get_mesh(), P())
  place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_mesh)
  try:
    found = checkpoint.load(teacher.path, jax.tree.map(place, {"model": state.model, "tables": state.tables}))
  except checkpoint.DamagedError as error:
    raise _damaged(teacher.given, teacher.path, error) from None
  recipe = teacher.config.precision.recipe
  return predict(found["model"], found["tables"], samples, len(samples), recipe=recipe)


def _damaged(given: str, path: Path, error: checkpoint.DamagedError) -> UserError:
  return UserError(f"{given}: checkpoint {path} is damaged ({error}); restore it from a copy, or train that run again")
