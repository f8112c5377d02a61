"""A log of interactions (who met which item, when, how it ended), its splits, and what came before each event.

A history holds events of the same user that lie strictly earlier: what shares a second with the predicted event may be
its consequence. Parts of a split are numbers of events in one log, so that the history of a held-out event reaches back
into training. Events may lie in any order in the log; where two share a second, the one that lies first comes first.

Dimension key: N events of a log, M events chosen from it, R users or items, T entries of packed rows, P parts.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sparse_lm.errors import UserError

_Row = Callable[[int], str]  # how an error names a row


@dataclasses.dataclass(frozen=True, eq=False)
class Categories:
  """A categorical feature: row r has the ids `ids_T[offsets[r]:offsets[r + 1]]`, one or several or none."""

  ids_T: np.ndarray  # i32, each below table_size
  offsets: np.ndarray  # i32[R + 1]
  table_size: int

  @classmethod
  def one_each(cls, ids_R: np.ndarray, table_size: int) -> "Categories":
    """Of a feature that has one value in every row."""
    return cls(ids_R, np.arange(len(ids_R) + 1, dtype=np.int32), table_size)


@dataclasses.dataclass(frozen=True, eq=False)
class Entities:
  """All users, or all items: row r is the one with id r. Columns are checked, and read-only from here on."""

  names: Sequence[str]  # as the source has them
  numeric: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # f32[R] each
  categorical: Mapping[str, Categories] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    names = tuple(self.names)
    row: _Row = lambda r: f"row {r} ({names[r]!r})"
    numeric = {feature: _numbers(feature, values, len(names), row) for feature, values in self.numeric.items()}
    categorical = {feature: _categories(feature, it, len(names), row) for feature, it in self.categorical.items()}
    _set(self, names=names, numeric=numeric, categorical=categorical)

  def __len__(self) -> int:
    return len(self.names)


@dataclasses.dataclass(frozen=True, eq=False)
class Interactions:
  """Event n: user `user_N[n]` met item `item_N[n]` at `time_N[n]`. Columns are checked, and read-only from here on."""

  user_N: np.ndarray  # i32, rows of `users`
  item_N: np.ndarray  # i32, rows of `items`
  time_N: np.ndarray  # i64, seconds
  label_N: np.ndarray | None  # f32, such as a rating or a click; None: that it happened is all that is known
  users: Entities
  items: Entities

  def __post_init__(self) -> None:
    number, row = len(self.user_N), lambda n: f"row {n}"
    time_N = _one_dimensional("time_N", self.time_N, number)
    if not np.can_cast(time_N.dtype, np.int64) and number:
      raise TypeError(f"Interactions: time_N must hold whole seconds that fit int64, got {time_N.dtype}")
    _set(
      self,
      user_N=_ids("user_N", _one_dimensional("user_N", self.user_N, number), len(self.users), row),
      item_N=_ids("item_N", _one_dimensional("item_N", self.item_N, number), len(self.items), row),
      time_N=_read_only(time_N, np.int64),
      label_N=None if self.label_N is None else _numbers("label_N", self.label_N, number, row),
    )

  def __len__(self) -> int:
    return len(self.user_N)

  def with_binary_labels(self, *, at_least: float) -> "Interactions":
    """The log whose label is 1 where it was `at_least` that much, else 0."""
    if self.label_N is None:
      raise UserError(f"labels of at least {at_least} are asked for, but these interactions have none")
    return dataclasses.replace(self, label_N=(self.label_N >= at_least).astype(np.float32))


# Splits: numbers of events, each part in the order of time -----------------------------------------------------------


def split_by_time(log: Interactions, fractions: Sequence[float]) -> list[np.ndarray]:
  """Cuts the log into parts that follow each other in time, with these shares of the events.

  A second that a cut would divide belongs to the earlier part.
  """
  return _split(log, np.zeros(len(log), np.int32), fractions)


def split_by_user_time(log: Interactions, fractions: Sequence[float]) -> list[np.ndarray]:
  """Cuts the events of every user as `split_by_time` cuts the log; of a few events, the last parts may get none."""
  return _split(log, log.user_N, fractions)


def leave_last_out(log: Interactions) -> tuple[np.ndarray, np.ndarray]:
  """Training, and the last event of every user who has more than one.

  Of several in a user's last second, the one that lies last in the log is held out; the others stay in training, and
  are not part of its history.
  """
  order_N = np.lexsort((log.time_N, log.user_N))
  user_N = log.user_N[order_N]
  last_N = np.diff(user_N, append=-1) != 0
  has_more_N = _run_starts(user_N) != np.arange(len(log))
  held_out_N = np.empty(len(log), bool)
  held_out_N[order_N] = last_N & has_more_N
  by_time_N = np.argsort(log.time_N, kind="stable")
  return by_time_N[~held_out_N[by_time_N]], by_time_N[held_out_N[by_time_N]]


def _split(log: Interactions, group_N: np.ndarray, fractions: Sequence[float]) -> list[np.ndarray]:
  shares_P = np.asarray(fractions, np.float64)
  if shares_P.ndim != 1 or not (shares_P >= 0).all() or not np.isclose(shares_P.sum(), 1):
    raise UserError(f"fractions of a split must not be negative and must add up to 1, got {fractions}")
  order_N = np.lexsort((log.time_N, group_N))
  group_sorted_N = group_N[order_N]
  # All events of a second have the rank of its first one, so that no cut falls between them.
  rank_N = _run_starts(group_sorted_N, log.time_N[order_N]) - _run_starts(group_sorted_N)
  size_N = np.bincount(group_N)[group_sorted_N]
  # 0.1 + 0.2 is a little more than 0.3: a cut that is meant to lie half way between two events must still do so.
  cuts_NP = np.rint(np.round(size_N[:, None] * np.cumsum(shares_P[:-1]), 6))
  part_N = np.empty(len(log), np.int64)
  part_N[order_N] = np.sum(cuts_NP <= rank_N[:, None], axis=1)
  by_time_N = np.argsort(log.time_N, kind="stable")
  return [by_time_N[part_N[by_time_N] == part] for part in range(len(shares_P))]


# Histories -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Histories:
  """History of event n: the events `order_N[begin_N[n]:end_N[n]]`, newest last."""

  order_N: np.ndarray  # events by user, then time
  begin_N: np.ndarray
  end_N: np.ndarray

  def gather(self, events_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(offsets, past_T) of these events: the history of the m-th is `past_T[offsets[m]:offsets[m + 1]]`."""
    length_M = self.end_N[events_M] - self.begin_N[events_M]
    offsets = np.concatenate([[0], np.cumsum(length_M)])
    positions_T = np.repeat(self.begin_N[events_M] - offsets[:-1], length_M) + np.arange(offsets[-1])
    return offsets, self.order_N[positions_T]


def histories(log: Interactions, *, longest: int) -> Histories:
  """Of every event: those of its user strictly earlier in time, of them the newest `longest`."""
  if longest < 0:
    raise UserError(f"a history of longest={longest} events is asked for; it must be 0 or more")
  order_N = np.lexsort((log.time_N, log.user_N))
  user_N, time_N = log.user_N[order_N], log.time_N[order_N]
  end_sorted_N = _run_starts(user_N, time_N)
  begin_sorted_N = np.maximum(_run_starts(user_N), end_sorted_N - longest)
  begin_N, end_N = np.empty_like(order_N), np.empty_like(order_N)
  begin_N[order_N], end_N[order_N] = begin_sorted_N, end_sorted_N
  return Histories(order_N, begin_N, end_N)


def _run_starts(*columns_N: np.ndarray) -> np.ndarray:
  """Of every position: where the run of positions that agree in all columns, and which it belongs to, begins."""
  first_N = np.zeros(len(columns_N[0]), bool)
  for column_N in columns_N:
    first_N[1:] |= column_N[1:] != column_N[:-1]  # a difference of huge times could overflow
  return np.maximum.accumulate(np.where(first_N, np.arange(len(first_N)), 0))


# Checks --------------------------------------------------------------------------------------------------------------


def _set(instance: object, **columns: object) -> None:
  for name, value in columns.items():
    object.__setattr__(instance, name, value)


def _read_only(array: np.ndarray, dtype: type) -> np.ndarray:
  view: np.ndarray = array.astype(dtype, copy=False).view()
  view.flags.writeable = False
  return view


def _one_dimensional(feature: str, values: np.ndarray, rows: int) -> np.ndarray:
  array = np.asarray(values)
  if array.shape != (rows,):
    raise ValueError(f"feature {feature} has shape {array.shape} and must have ({rows},)")
  return array


def _numbers(feature: str, values: np.ndarray, rows: int, row: _Row) -> np.ndarray:
  array = _one_dimensional(feature, values, rows)
  with np.errstate(over="ignore"):  # becomes infinite, which is refused
    array = array.astype(np.float32, copy=False)
  if (bad := np.flatnonzero(~np.isfinite(array))).size:
    raise UserError(f"feature {feature}: {row(bad[0])} is {values[bad[0]]}; it must be a finite number of float32")
  return _read_only(array, np.float32)


def _ids(feature: str, array: np.ndarray, table_size: int, row: _Row) -> np.ndarray:
  if array.dtype.kind not in "iu" and array.size:
    raise TypeError(f"feature {feature}: ids must be integers, got {array.dtype}")
  if (bad := np.flatnonzero((array < 0) | (array >= table_size))).size:
    raise UserError(
      f"feature {feature}: {row(bad[0])} has id {array[bad[0]]}, but its table has {table_size} rows; ids count from 0"
    )
  return _read_only(array, np.int32)


def _categories(feature: str, it: Categories, rows: int, row: _Row) -> Categories:
  offsets = _one_dimensional(f"{feature} (offsets)", it.offsets, rows + 1)
  ids_T = _one_dimensional(f"{feature} (ids)", it.ids_T, len(it.ids_T))
  if offsets[0] != 0 or offsets[-1] != len(ids_T) or (np.diff(offsets) < 0).any():
    raise ValueError(f"feature {feature}: offsets must rise from 0 to its {len(ids_T)} ids and never fall")
  row_of = lambda t: row(int(np.searchsorted(offsets, t, side="right")) - 1)
  return Categories(_ids(feature, ids_T, it.table_size, row_of), _read_only(offsets, np.int32), it.table_size)
