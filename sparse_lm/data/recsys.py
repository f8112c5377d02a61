"""From a config to the samples of a recommender: read, split, pack.

Dimension key: N events of a log.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparse_lm.data import bars, criteo, impressions, kuairand, movielens, synthetic_interactions
from sparse_lm.data.cache import cache_root
from sparse_lm.data.impressions import Impressions
from sparse_lm.data.interactions import Interactions, split_by_time, split_by_user_time
from sparse_lm.data.progress import Report
from sparse_lm.data.samples import Samples, samples
from sparse_lm.errors import UserError
from sparse_lm.recsys_config import KUAIRAND_LABELS, MODELS_WITH_HISTORY, InteractionsConfig, RecsysConfig

_BINARY_POSITIVE = 1.0  # of labels that are 0 or 1


class Parts(NamedTuple):
  """Samples, each part later than the one before: of each user, if users are split. Histories reach back over parts."""

  train: Samples
  validation: Samples  # may be empty
  test: Samples  # may be empty
  logit_N: np.ndarray | None  # f64, of a positive label, as a teacher knows it, of all events of the log


def open_samples(config: RecsysConfig, report: Report) -> Parts:
  """Returns the same value for the same config and files, on any machine.

  Raises:
    UserError: there is nothing to train on, or the files cannot be read.
  """
  data = config.data
  log, logit_N = _read(config, report)
  sizes = {"longest": history_length(config), "batch_size": config.training.batch_size}
  if isinstance(log, Impressions):
    train, validation, test = impressions.samples(log, **sizes)
    tables = train.table_sizes
    known = f"{len(tables) - 1} features and {train.num_numeric} numbers, {sum(tables.values()):,} rows of tables"
  else:
    positive_from = data.positive_from if data.reads("positive_from") else _BINARY_POSITIVE
    train, validation, test = samples(log, split_events(log, data), positive_from=positive_from, **sizes)
    known = f"{len(log.users):,} users, {len(log.items):,} items"
  parts = {"training": train, "validation": validation, "test": test}
  counts = ", ".join(f"{len(part):,} {name}" for name, part in parts.items())
  report(f"data: {known}, {len(log):,} events: {counts}")
  for name, part in parts.items():
    if len(part) and len(np.unique(part.labels[part.events_N])) < 2:
      raise UserError(_one_label(len(part), name, data))
  if not len(train):
    raise UserError("data: there are no events to train on; give more, or lower the fractions that are held out")
  return Parts(train, validation, test, logit_N)


def _one_label(number: int, part: str, data: InteractionsConfig) -> str:
  only = f"data: all {number:,} {part} events are of one label"
  if data.reads("positive_from"):
    only += f" (positive from {data.positive_from:g})"
  fields = [f"data.{name}" for name in ("positive_from", "label") if data.reads(name)]
  rest = "the split" if data.reads("test_fraction") else "the files"
  return f"{only}; change {' or '.join([*fields, rest])}"


def split_events(log: Interactions, data: InteractionsConfig) -> list[np.ndarray]:
  """Numbers of the events of training, validation and test."""
  if isinstance(log, Impressions):  # whose ids are made from its training lines
    return list(log.parts)
  split = {"time": split_by_time, "user_time": split_by_user_time}[data.split]
  held_out = data.validation_fraction, data.test_fraction
  return split(log, (1 - sum(held_out), *held_out))


def history_length(config: RecsysConfig) -> int:
  """Events at most; what no model reads is not packed."""
  return config.data.longest if config.model.kind in MODELS_WITH_HISTORY else 0


def _read(config: RecsysConfig, report: Report) -> tuple[Interactions, np.ndarray | None]:
  data = config.data
  if data.source == "synthetic":
    report(f"data: drawing synthetic interactions of {data.synthetic_users:,} users")
    drawn = synthetic_interactions.generate(
      num_users=data.synthetic_users, num_items=data.synthetic_items, seed=data.synthetic_seed
    )
    return drawn.log, drawn.logit_N
  folder = Path(data.path or "").expanduser()
  if data.source == "kuairand":
    return kuairand.read(folder, KUAIRAND_LABELS[0] if data.label is None else data.label, report), None
  if data.source == "bars":
    return bars.read(folder, data.validation_fraction, report), None
  if data.source == "criteo":
    held_out = data.validation_fraction, data.test_fraction
    return criteo.read(folder, (1 - sum(held_out), *held_out), report), None
  if data.source == "movielens_100k":
    folder = movielens.fetch_100k(cache_root(data), report)
  return movielens.read(folder, report), None
