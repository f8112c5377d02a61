"""From a config to the samples of a recommender: read, split, pack.

Dimension key: N events of a log.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparse_lm.data import movielens, synthetic_interactions
from sparse_lm.data.cache import cache_root
from sparse_lm.data.interactions import Interactions, split_by_time, split_by_user_time
from sparse_lm.data.progress import Report
from sparse_lm.data.samples import Samples, samples
from sparse_lm.errors import UserError
from sparse_lm.recsys_config import MODELS_WITH_HISTORY, RecsysConfig

_SYNTHETIC_POSITIVE = 1.0  # a click


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
  split = {"time": split_by_time, "user_time": split_by_user_time}[data.split]
  held_out = data.validation_fraction, data.test_fraction
  numbers = split(log, (1 - sum(held_out), *held_out))
  longest = data.longest if config.model.kind in MODELS_WITH_HISTORY else 0  # what no model reads is not packed
  positive_from = _SYNTHETIC_POSITIVE if data.source == "synthetic" else data.positive_from
  train, validation, test = samples(
    log, numbers, positive_from=positive_from, longest=longest, batch_size=config.training.batch_size
  )
  parts = {"training": train, "validation": validation, "test": test}
  counts = ", ".join(f"{len(part):,} {name}" for name, part in parts.items())
  report(f"data: {len(log.users):,} users, {len(log.items):,} items, {len(log):,} events: {counts}")
  for name, part in parts.items():
    if len(part) and len(np.unique(part.labels[part.events_N])) < 2:
      only = f"all {len(part):,} {name} events are of one label (positive from {positive_from:g})"
      raise UserError(f"data: {only}; change data.positive_from or the split")
  if not len(train):
    raise UserError("data: there are no events to train on; give more, or lower the fractions that are held out")
  return Parts(train, validation, test, logit_N)


def _read(config: RecsysConfig, report: Report) -> tuple[Interactions, np.ndarray | None]:
  data = config.data
  if data.source == "synthetic":
    report(f"data: drawing synthetic interactions of {data.synthetic_users:,} users")
    drawn = synthetic_interactions.generate(
      num_users=data.synthetic_users, num_items=data.synthetic_items, seed=data.synthetic_seed
    )
    return drawn.log, drawn.logit_N
  if data.source == "movielens_100k":
    folder = movielens.fetch_100k(cache_root(data), report)
  else:
    folder = Path(data.path or "").expanduser()
  return movielens.read(folder, report), None
