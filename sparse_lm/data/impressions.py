"""Impressions: lines that carry their label, their features and their history, as BARS and Criteo publish them.

Elsewhere features belong to users and items, and a history is what the log holds of a user before an event. Here the
file says both, a line at a time, so that `Impressions.items` has one row a line.

Ids count from 1 in the order in which values first appear in training. Row 0 of every table is for values that
training does not have; no training line reads it, so it stays as it was drawn. An empty token is a value like others.

A number becomes log(1 + x), with mean 0 and variance 1 over training. Where it is empty or negative it is unknown: then
it is 0, that mean, and if training has such lines, a second number NAME.unknown tells them from those of average.

No line says when its history happened. The age of an event is the steps back to it, 1 for the newest, in place of
seconds: beside `model.time_scale` of a day that is nothing, and models tell events apart by their positions.

Dimension key: N lines, B lines of a batch, T packed ids, V rows of a table.
"""

import array
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparse_lm.data import delimited
from sparse_lm.data.delimited import Column, Table
from sparse_lm.data.interactions import Categories, Entities, Histories, Interactions
from sparse_lm.data.samples import Bag, Batch, History, Samples, Teaching
from sparse_lm.errors import UserError

_LINES_AT_ONCE = 64  # column by column, these are read in half the time of a line by line; more fall out of the cache
_MOST_ENTRIES = 2**31 - 1  # of a column of sequences, whose offsets are i32
_LABELS = {"0": 0.0, "1": 1.0}
_HISTORY = "history."  # begins the names of what is no feature of its own


class Roles(NamedTuple):
  """Columns that models know by a name of their own; all others are features under the name that they have."""

  label: str
  item: str  # what events of a history are compared with
  user: str | None = None  # within whom AUC is taken; None: all lines are of one
  history: str | None = None  # sequences of items
  action: str | None = None  # sequences beside it: what else is known of each event


@dataclasses.dataclass(frozen=True, eq=False)
class Impressions(Interactions):
  """A log whose event n is line n: `item_N` and `time_N` are its number, and `items` has the features of line n.

  Among them are "item", which models compare a history with, and if there are histories "history.item" and
  "history.action", event by event.
  """

  parts: tuple[np.ndarray, np.ndarray, np.ndarray]  # lines of training, validation and test

  def __post_init__(self) -> None:
    super().__post_init__()
    features = self.items.categorical
    past, action = (features.get(f"{_HISTORY}{of}") for of in ("item", "action"))
    if past is None or action is None:
      return
    if past.table_size != (size := features["item"].table_size):
      raise ValueError(f"feature history.item has a table of {past.table_size} rows, but that of item has {size}")
    if not np.array_equal(past.offsets, action.offsets):
      raise ValueError("features history.item and history.action must have as many ids in every row")


# Reading -------------------------------------------------------------------------------------------------------------


class _Tokens:
  """Columns of names and of sequences of names, read a chunk at a time; those of one vocabulary share its ids."""

  def __init__(self, column: Column, vocabulary: dict[str, int]):
    self.separator = column.separator if column.kind == "token_seq" else None
    self.vocabulary = vocabulary
    self.ids, self.offsets = array.array("i"), array.array("q", [0])

  def extend(self, texts: Sequence[str]) -> None:
    id_of = self.vocabulary.__getitem__
    if self.separator is None:
      self.ids.extend(map(id_of, texts))
      return
    for text in texts:
      if text:
        self.ids.extend(map(id_of, text.split(self.separator)))
      self.offsets.append(len(self.ids))


class _Numbers:
  """A column of numbers; -1 stands for one that is unknown."""

  def __init__(self, parse: Callable[[str], float], allowed: str):
    self.parse, self.allowed = parse, allowed
    self.values = array.array("f")

  def extend(self, texts: Sequence[str]) -> None:
    self.values.extend(map(self.parse, texts))


def _count(text: str) -> float:
  return delimited.number(text) if text else -1


def _label(text: str) -> float:
  if text not in _LABELS:
    raise ValueError
  return _LABELS[text]


def read(
  tables: Iterable[Table], roles: Roles, cut: Callable[[list[int]], Sequence[int]], report: Callable[[str], None]
) -> Impressions:
  """Lines of all tables, one after another.

  Args:
    tables: of the same columns, perhaps in another order, none without a line. Kinds are token, token_seq, count and
      unread; the label has kind float.
    roles: of these columns.
    cut: takes the number of lines of each table; returns how many are of training, validation and test, in this order.
    report: is told of histories whose actions do not fit.
  """
  columns: dict[str, _Tokens | _Numbers] = {}
  vocabularies: dict[str, dict[str, int]] = {}
  lengths = []
  for table in tables:
    if not columns:
      columns = _empty_columns(table, roles, vocabularies)
    lengths.append(_read_table(table, columns))
  sizes = cut(lengths)
  ends = np.cumsum(sizes)
  parts = np.split(np.arange(ends[-1]), ends[:-1])
  return _impressions(columns, roles, (parts[0], parts[1], parts[2]), report)


def _empty_columns(
  table: Table, roles: Roles, vocabularies: dict[str, dict[str, int]]
) -> dict[str, _Tokens | _Numbers]:
  columns: dict[str, _Tokens | _Numbers] = {}
  for column in table.columns:
    if column.name == roles.label:
      columns[column.name] = _Numbers(_label, "it must be 0 or 1")
    elif column.kind == "count":
      columns[column.name] = _Numbers(_count, "it must be a finite number, or empty")
    elif column.kind != "unread":
      shared = roles.item if column.name == roles.history else column.name
      columns[column.name] = _Tokens(column, vocabularies.setdefault(shared, delimited.Ids()))
  return columns


def _read_table(table: Table, columns: dict[str, _Tokens | _Numbers]) -> int:
  """Adds its lines to the columns and returns their number."""
  places = [(k, columns[it.name]) for k, it in enumerate(table.columns) if it.name in columns]
  rows = delimited.checked_rows(table)
  number = 0
  while chunk := list(itertools.islice(rows, _LINES_AT_ONCE)):
    number += len(chunk)
    by_column = list(zip(*(fields for _, fields in chunk)))
    for k, values in places:
      try:
        values.extend(by_column[k])
      except ValueError:
        assert isinstance(values, _Numbers), "any text is a token"
        raise _first_refusal(table, chunk, k, values) from None
      if isinstance(values, _Tokens) and len(values.ids) > _MOST_ENTRIES:
        raise UserError(
          f"{table.file}: column {k + 1} ({table.columns[k].name}): up to line {chunk[-1][0]} it has"
          f" {len(values.ids):,} entries; there can be {_MOST_ENTRIES:,}; give fewer lines"
        )
  if not number:
    raise UserError(f"{table.file}: holds no lines with an impression")
  return number


def _first_refusal(table: Table, chunk: list[tuple[int, list[str]]], place: int, values: _Numbers) -> UserError:
  """Of the column's first field in the chunk that cannot be read."""
  for line, fields in chunk:
    try:
      values.parse(fields[place])
    except ValueError:
      return delimited.refusal(table, line, place, fields[place], values.allowed)
  raise AssertionError("a field of the chunk was refused")


# From values to ids --------------------------------------------------------------------------------------------------


def _impressions(
  columns: dict[str, _Tokens | _Numbers],
  roles: Roles,
  parts: tuple[np.ndarray, np.ndarray, np.ndarray],
  report: Callable[[str], None],
) -> Impressions:
  """`columns` is emptied on the way: of real files, there is no room for all of it twice."""
  train, number = len(parts[0]), sum(map(len, parts))
  label = columns.pop(roles.label)
  assert isinstance(label, _Numbers), "a label is a number"
  user_N, users = np.zeros(number, np.int32), ["all"]
  if roles.user is not None:
    of_user = columns[roles.user]
    assert isinstance(of_user, _Tokens), "a user is a token"
    user_N, users = np.array(of_user.ids, np.int32), list(of_user.vocabulary)
  one_each = np.arange(number + 1, dtype=np.int32)
  known = {roles.item: "item", roles.user: "user", roles.history: "history.item", roles.action: "history.action"}
  rows_of = _rows(columns, roles, train)
  categorical: dict[str, Categories] = {}
  numeric: dict[str, np.ndarray] = {}
  for name in list(columns):
    values = columns.pop(name)
    if isinstance(values, _Numbers):
      numeric |= _standardised(name, np.asarray(values.values), train)
      continue
    row_V = rows_of[roles.item if name == roles.history else name]
    offsets = one_each if values.separator is None else np.asarray(values.offsets).astype(np.int32)
    ids_T = row_V[np.asarray(values.ids)] if len(values.ids) else np.zeros(0, np.int32)
    categorical[known.get(name, name)] = Categories(ids_T, offsets, int(row_V.max(initial=0)) + 1)
  if roles.history is not None:
    categorical["history.action"] = _actions(categorical, roles, report)
  return Impressions(
    user_N=user_N,
    item_N=one_each[:-1],
    time_N=np.arange(number),
    label_N=np.asarray(label.values),
    users=Entities(users),
    items=Entities([""] * number, numeric=numeric, categorical=categorical),
    parts=parts,
  )


def _rows(columns: dict[str, _Tokens | _Numbers], roles: Roles, train: int) -> dict[str, np.ndarray]:
  """i32[V] of every vocabulary: the row of each of its values, 0 for those that the training lines do not have."""
  is_known: dict[str, np.ndarray] = {}
  for name, values in columns.items():
    if isinstance(values, _Tokens):
      end = train if values.separator is None else values.offsets[train]
      known_V = is_known.setdefault(
        roles.item if name == roles.history else name, np.zeros(len(values.vocabulary), bool)
      )
      known_V[np.asarray(values.ids)[:end]] = True
  return {name: np.where(known_V, np.cumsum(known_V), 0).astype(np.int32) for name, known_V in is_known.items()}


def _standardised(name: str, values_N: np.ndarray, train: int) -> dict[str, np.ndarray]:
  """The numeric features that a column becomes."""
  is_known_N = values_N >= 0
  log_N = np.log1p(np.where(is_known_N, values_N, 0))
  log_K = log_N[:train][is_known_N[:train]]
  mean, std = (float(log_K.mean(dtype=np.float64)), float(log_K.std(dtype=np.float64))) if len(log_K) else (0.0, 1.0)
  features = {name: np.where(is_known_N, (log_N - np.float32(mean)) / np.float32(max(std, 1e-6)), np.float32(0))}
  if not is_known_N[:train].all():
    features[f"{name}.unknown"] = (~is_known_N).astype(np.float32)
  return features


def _actions(categorical: dict[str, Categories], roles: Roles, report: Callable[[str], None]) -> Categories:
  """As many in every line as the history has events."""
  past = categorical["history.item"]
  if roles.action is None:
    return Categories(np.broadcast_to(np.int32(0), past.ids_T.shape), past.offsets, 1)  # takes no memory
  action = categorical["history.action"]
  length_N = np.diff(past.offsets)
  fits_N = length_N == np.diff(action.offsets)
  if fits_N.all():
    return action
  report(
    f"data: {(~fits_N).sum():,} of {len(fits_N):,} lines have another number of entries in {roles.action} than in"
    f" {roles.history}; these actions are read as unknown"
  )
  ids_T = np.zeros(len(past.ids_T), np.int32)
  ids_T[np.repeat(fits_N, length_N)] = action.ids_T[np.repeat(fits_N, np.diff(action.offsets))]
  return Categories(ids_T, past.offsets, action.table_size)


# Samples -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ImpressionSamples(Samples):
  """Some lines as samples. `past` has no event: the lines themselves say what came before, and by which actions."""

  @functools.cached_property
  def features(self) -> dict[str, Categories]:
    """Without what is known of events of a history."""
    return {name: it for name, it in self.log.items.categorical.items() if not name.startswith(_HISTORY)}

  @functools.cached_property
  def most_ids(self) -> dict[str, int]:
    """Of a line, by feature."""
    return {name: int(np.diff(it.offsets).max(initial=1)) for name, it in self.features.items()}

  @property
  def table_sizes(self) -> dict[str, int]:
    return {name: it.table_size for name, it in self.features.items()} | {"action": self.num_actions}

  def gather(self, numbers_B: np.ndarray) -> Batch:
    size, events_B = self.batch_size, self.events_N[numbers_B]
    fill = lambda values_B: np.concatenate([values_B, np.zeros(size - len(values_B), values_B.dtype)])
    numeric = [fill(values[events_B]) for values in self.log.items.numeric.values()]
    return Batch(
      bags={name: self._bag(it, events_B, self.most_ids[name]) for name, it in self.features.items()},
      numeric_BN=np.stack(numeric, axis=1) if numeric else np.zeros((size, 0), np.float32),
      history=self._history(events_B),
      label_B=fill(self.labels[events_B]),
      weight_B=fill(np.ones(len(events_B), np.float32)),
      teaching=None if self.teaching is None else Teaching(*(fill(values[numbers_B]) for values in self.teaching)),
    )

  def _bag(self, it: Categories, events_B: np.ndarray, most: int) -> Bag:
    offsets, places_T = _newest(it.offsets, events_B, most, self.batch_size)
    return Bag(_padded(it.ids_T[places_T], self.batch_size * most), offsets)

  def _history(self, events_B: np.ndarray) -> History:
    past = self.log.items.categorical.get(f"{_HISTORY}item")
    if past is None:
      past = action = Categories(np.zeros(0, np.int32), np.zeros(len(self.log) + 1, np.int32), 1)
    else:
      action = self.log.items.categorical[f"{_HISTORY}action"]
    offsets, places_T = _newest(past.offsets, events_B, self.longest, self.batch_size)
    steps_back_T = np.repeat(offsets[1:], np.diff(offsets)) - np.arange(offsets[-1])
    room = next(capacity for capacity in self.capacities if capacity >= len(places_T))
    return History(
      item_T=_padded(past.ids_T[places_T], room),
      action_T=_padded(action.ids_T[places_T], room),
      age_T=_padded(steps_back_T.astype(np.float32), room),
      offsets=offsets,
    )


def _newest(offsets_N: np.ndarray, lines_B: np.ndarray, most: int, size: int) -> tuple[np.ndarray, np.ndarray]:
  """(offsets i32[size + 1], places_T) of the last entries of these lines, and none for what fills up."""
  end_B = offsets_N[lines_B + 1].astype(np.int64)
  length_B = np.minimum(end_B - offsets_N[lines_B], most)
  offsets = np.concatenate([[0], np.cumsum(length_B)])
  places_T = np.repeat(end_B - offsets[1:], length_B) + np.arange(offsets[-1])
  return np.concatenate([offsets, np.full(size - len(lines_B), offsets[-1])]).astype(np.int32), places_T


def _padded(values_T: np.ndarray, room: int) -> np.ndarray:
  return np.concatenate([values_T, np.zeros(room - len(values_T), values_T.dtype)])


def samples(log: Impressions, *, longest: int, batch_size: int) -> list[Samples]:
  """Returns the samples of each part.

  Args:
    log: its labels are 0 and 1.
    longest: events of a history at most, the newest.
    batch_size: samples of a batch.
  """
  assert log.label_N is not None, "a line has a label"
  nothing = np.zeros(0, np.int64)
  action = log.items.categorical.get(f"{_HISTORY}action")
  make = lambda events_N: ImpressionSamples(
    log,
    events_N,
    past=Histories(nothing, nothing, nothing),
    action_N=log.label_N.astype(np.int32),
    num_actions=1 if action is None else action.table_size,
    batch_size=batch_size,
    longest=longest,
  )
  return [make(events_N) for events_N in log.parts]


def is_file(path: Path, give: str) -> bool:
  """Whether a path is a file and no folder; raises UserError where there is neither; it ends in `give`."""
  try:
    if not path.exists():
      raise UserError(f"data.path: {path}: there is no such file or folder; {give}")
    return not path.is_dir()
  except OSError as error:
    raise UserError(f"data.path: {path}: cannot be read ({error.strerror})") from error
