"""Samples of a recommender: an event to predict, the features of its user and item, and what the user did before.

All is packed: a feature's ids lie one after another, as the events of all histories do. A history ends before the
second of the event that is to be predicted, so neither that event nor its consequences are in it. A sample is the same
whoever shares its batch.

Dimension key: B samples of a batch, N numeric features, T packed ids or events.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparse_lm.data.interactions import Categories, Entities, Histories, Interactions, histories
from sparse_lm.errors import UserError

_MOST_ACTIONS = 64  # kinds of labels; more would be measurements


class Bag(NamedTuple):
  """Ids of a feature; what lies behind offsets[-1] is padding."""

  ids_T: np.ndarray  # i32
  offsets: np.ndarray  # i32[B + 1]


class History(NamedTuple):
  """Earlier events of the samples' users, newest last."""

  item_T: np.ndarray  # i32
  action_T: np.ndarray  # i32, which of the log's labels the event had
  age_T: np.ndarray  # f32, seconds from it to the event that is to be predicted
  offsets: np.ndarray  # i32[B + 1]


class Teaching(NamedTuple):
  """What another model, the teacher, says of samples."""

  logit_B: np.ndarray  # f32
  fresh_B: np.ndarray  # f32, 1 for a sample that the teacher was not trained on, else 0


class Batch(NamedTuple):
  """A pytree; a sample of weight 0 fills up."""

  bags: dict[str, Bag]  # by feature
  numeric_BN: np.ndarray  # f32
  history: History
  label_B: np.ndarray  # f32, 0 or 1
  weight_B: np.ndarray  # f32
  teaching: Teaching | None  # of a teacher, where there is one


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
  """Some events of a log as samples. `gather` packs any of them, `len` counts them."""

  log: Interactions  # labels 0 and 1
  events_N: np.ndarray  # those that are samples
  past: Histories
  action_N: np.ndarray  # i32, of all events of the log
  num_actions: int
  batch_size: int
  longest: int  # history
  teaching: Teaching | None = None  # of all samples

  def __len__(self) -> int:
    return len(self.events_N)

  @property
  def table_sizes(self) -> dict[str, int]:
    """Rows of each table: of every feature, and of the actions of a history. Its items are those of the feature."""
    log = self.log
    sizes = {"user": len(log.users), "item": len(log.items), "action": self.num_actions}
    for prefix, entities in (("user", log.users), ("item", log.items)):
      sizes |= {f"{prefix}.{name}": it.table_size for name, it in entities.categorical.items()}
    return sizes

  @property
  def labels(self) -> np.ndarray:
    """f32, of all events of the log."""
    assert self.log.label_N is not None, "`samples` refuses a log without labels"
    return self.log.label_N

  @property
  def num_numeric(self) -> int:
    return len(self.log.users.numeric) + len(self.log.items.numeric)

  @property
  def capacities(self) -> tuple[int, ...]:
    """Events of all histories of a batch are padded to the smallest of these, for each of which a step is compiled."""
    most = max(self.batch_size * self.longest, 1)
    return tuple(sorted({-(-most // part) for part in (2, 1)}))

  def gather(self, numbers_B: np.ndarray) -> Batch:
    """The samples of these numbers, at most `batch_size`; filled up with samples of weight 0."""
    size, log = self.batch_size, self.log
    events_B = self.events_N[numbers_B]
    user_B, item_B = log.user_N[events_B], log.item_N[events_B]
    fill = lambda values_B: np.concatenate([values_B, np.zeros(size - len(values_B), values_B.dtype)])
    bags = {"user": _one_each(user_B, size), "item": _one_each(item_B, size)}
    numeric = []
    for prefix, entities, row_B in (("user", log.users, user_B), ("item", log.items, item_B)):
      bags |= {f"{prefix}.{name}": _packed(it, row_B, size) for name, it in entities.categorical.items()}
      numeric += [fill(values[row_B]) for values in entities.numeric.values()]
    weight_B = fill(np.ones(len(events_B), np.float32))
    return Batch(
      bags=bags,
      numeric_BN=np.stack(numeric, axis=1) if numeric else np.zeros((size, 0), np.float32),
      history=self._history(events_B),
      label_B=fill(self.labels[events_B]),
      weight_B=weight_B,
      teaching=None if self.teaching is None else Teaching(*(fill(values[numbers_B]) for values in self.teaching)),
    )

  def padding(self, capacity: int) -> Batch:
    """A batch without samples, whose histories have room for so many events."""
    batch = self.gather(np.zeros(0, np.int64))
    return batch._replace(history=_padded(batch.history, capacity))

  def _history(self, events_B: np.ndarray) -> History:
    offsets, past_T = self.past.gather(events_B)
    now_T = np.repeat(self.log.time_N[events_B], np.diff(offsets))
    offsets = np.concatenate([offsets, np.full(self.batch_size - len(events_B), offsets[-1])])
    history = History(
      item_T=self.log.item_N[past_T],
      action_T=self.action_N[past_T],
      age_T=(now_T - self.log.time_N[past_T]).astype(np.float32),
      offsets=offsets.astype(np.int32),
    )
    return _padded(history, next(c for c in self.capacities if c >= len(past_T)))


def samples(
  log: Interactions, parts: Sequence[np.ndarray], *, positive_from: float, longest: int, batch_size: int
) -> list[Samples]:
  """Returns the samples of each part of a log.

  Args:
    log: with labels, such as ratings.
    parts: numbers of events, as the splits of `interactions` give them.
    positive_from: label from which an event counts as positive.
    longest: events of a history at most.
    batch_size: samples of a batch.

  Raises:
    UserError: the log has no labels, or too many different ones to tell actions apart.
  """
  if log.label_N is None:
    raise UserError("a recommender learns from labels, but these interactions have none")
  kinds, action_N = np.unique(log.label_N, return_inverse=True)
  if len(kinds) > _MOST_ACTIONS:
    raise UserError(
      f"the labels have {len(kinds)} different values and can be {_MOST_ACTIONS} kinds of action at most; round them"
    )
  past, binary = histories(log, longest=longest), log.with_binary_labels(at_least=positive_from)
  binary = dataclasses.replace(binary, users=_standardised(log.users), items=_standardised(log.items))
  make = lambda events_N: Samples(
    binary, events_N, past, action_N.astype(np.int32), max(len(kinds), 1), batch_size, longest
  )
  return [make(events_N) for events_N in parts]


def _standardised(entities: Entities) -> Entities:
  """With numeric features of mean 0 and variance 1 over all users or items, unless they are all the same."""
  scale = lambda values_R: (values_R - values_R.mean()) / max(float(values_R.std()), 1e-6)
  numeric = {name: scale(values_R) if len(values_R) else values_R for name, values_R in entities.numeric.items()}
  return dataclasses.replace(entities, numeric=numeric)


def _one_each(ids_B: np.ndarray, size: int) -> Bag:
  """A feature with one id a sample, and none for what fills up."""
  return _bag(ids_B, np.arange(len(ids_B) + 1), size, most=1)


def _packed(it: Categories, row_B: np.ndarray, size: int) -> Bag:
  """The ids of these rows."""
  length_R = np.diff(it.offsets)
  length_B = length_R[row_B]
  offsets = np.concatenate([[0], np.cumsum(length_B)])
  places_T = np.repeat(it.offsets[row_B] - offsets[:-1], length_B) + np.arange(offsets[-1])
  return _bag(it.ids_T[places_T], offsets, size, most=int(length_R.max(initial=1)))


def _bag(ids_T: np.ndarray, offsets: np.ndarray, size: int, most: int) -> Bag:
  """Of one shape, whatever the samples: room for `most` ids each."""
  room = np.zeros(size * most - len(ids_T), np.int32)
  offsets = np.concatenate([offsets, np.full(size + 1 - len(offsets), offsets[-1])])
  return Bag(np.concatenate([ids_T, room]).astype(np.int32), offsets.astype(np.int32))


def _padded(history: History, capacity: int) -> History:
  pad = lambda values_T: np.concatenate([values_T, np.zeros(capacity - len(values_T), values_T.dtype)])
  return History(pad(history.item_T), pad(history.action_T), pad(history.age_T), history.offsets)
