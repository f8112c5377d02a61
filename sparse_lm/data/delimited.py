"""Users, items and events out of delimited text, such as CSV files. An error names the file, the line and the column.

A reader of a data set opens each file as a `Table`: it knows the columns, and how a line is split. Files are read line
by line into flat arrays; beside them grow dictionaries of the names of users, of items, and of each feature's values.

Dimension key: N events of a log, R users or items.
"""

import array
import csv
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparse_lm.data.interactions import Categories, Entities
from sparse_lm.data.progress import Report
from sparse_lm.errors import UserError


class Column(NamedTuple):
  name: str
  kind: str  # token, token_seq, float, count (read as log(1 + x); unknown ones as the mean of the others), unread
  separator: str = " "  # of the values in a token_seq
  unknown: frozenset[str] = frozenset([""])  # tokens that are no value; a count may be one too, or negative


class Table(NamedTuple):
  file: Path
  columns: list[Column]
  rows: Iterator[tuple[int, list[str]]]  # number of the line, its fields


# Lines and columns ----------------------------------------------------------------------------------------------------


def lines(file: Path, encoding: str) -> Iterator[tuple[int, str]]:
  """Yields (number from 1, text without its end) of the lines that are not blank."""
  try:
    with file.open("rb") as raw_lines:
      for number, raw in enumerate(raw_lines, start=1):
        try:
          line = raw.decode(encoding).rstrip("\r\n")
        except UnicodeDecodeError as error:
          found = f"byte {error.start + 1} is 0x{raw[error.start]:02x} ({error.reason})"
          raise UserError(f"{file}: line {number}: must be {encoding} text, but {found}") from error
        line = line.removeprefix("\ufeff") if number == 1 else line
        if line:
          yield number, line
  except OSError as error:
    raise UserError(f"{file}: cannot be read ({error.strerror})") from error


def split_csv(line: str) -> list[str]:
  """Fields of a line; a field with a comma is quoted, and none goes over several lines."""
  return next(csv.reader([line])) if '"' in line else line.split(",")


def require(table: Table, name: str, kind: str) -> int:
  """Returns the place of a column that has to be there."""
  for k, column in enumerate(table.columns):
    if (column.name, column.kind) == (name, kind):
      return k
  found = ", ".join(f"{column.name}:{column.kind}" for column in table.columns)
  raise UserError(f"{table.file}: line 1: found the columns {found}; {name}:{kind} must be one of them")


def checked_rows(table: Table) -> Iterator[tuple[int, list[str]]]:
  """Yields (line, fields); raises UserError for a line with another number of fields than there are columns."""
  for number, fields in table.rows:
    if len(fields) != len(table.columns):
      names = ", ".join(column.name for column in table.columns)
      raise UserError(
        f"{table.file}: line {number}: found {len(fields)} columns; there must be {len(table.columns)}: {names}"
      )
    yield number, fields


def refusal(table: Table, line: int, place: int, found: str, allowed: str) -> UserError:
  """Says of a field what was found where, and what is allowed."""
  return UserError(
    f"{table.file}: line {line}: column {place + 1} ({table.columns[place].name}): found {found!r}; {allowed}"
  )


# Fields ---------------------------------------------------------------------------------------------------------------

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_WHOLE = re.compile(r"[+-]?\d+(\.0*)?", re.ASCII)  # RecBole calls seconds a float
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class Field(NamedTuple):
  """How a column of events is read; `parse` raises ValueError for what is not `allowed`."""

  name: str
  parse: Callable[[str], float]
  allowed: str  # said of text that is refused


@functools.lru_cache(1 << 10)  # there are ten ratings, and millions of fields with one
def number(text: str) -> float:
  """A finite number of float32."""
  if not _NUMBER.fullmatch(text) or abs(value := float(text)) > _FLOAT32_MAX:
    raise ValueError
  return value


def whole_number(text: str) -> int:
  """A whole number of 64 bits."""
  if not _WHOLE.fullmatch(text) or not -(1 << 63) <= (value := int(text.partition(".")[0])) < 1 << 63:
    raise ValueError
  return value


class Ids(dict[str, int]):
  """Numbers names from 0, in the order in which they are first asked for."""

  def __missing__(self, name: str) -> int:
    self[name] = number = len(self)
    return number


class _Values:
  """A column as it is read: a number, or names and their ids, a line."""

  def __init__(self, column: Column):
    self.column = column
    self.is_numeric = column.kind in ("float", "count")
    self.numbers, self.ids, self.offsets = array.array("f"), array.array("i"), array.array("i", [0])
    self.vocabulary = Ids()

  def append(self, text: str) -> None:
    kind, unknown = self.column.kind, self.column.unknown
    if self.is_numeric:
      self.numbers.append(-1 if kind == "count" and text in unknown else number(text))
      return
    values = text.split(self.column.separator) if kind == "token_seq" else [text]
    self.ids.extend(self.vocabulary[value] for value in values if value not in unknown)
    self.offsets.append(len(self.ids))

  @property
  def numeric_R(self) -> np.ndarray:
    numbers_R = np.asarray(self.numbers)
    if self.column.kind == "float":
      return numbers_R
    is_known_R = numbers_R >= 0
    log_R = np.log1p(np.where(is_known_R, numbers_R, 0))
    return np.where(is_known_R, log_R, log_R[is_known_R].mean() if is_known_R.any() else 0)

  @property
  def categories(self) -> Categories:
    return Categories(np.asarray(self.ids), np.asarray(self.offsets), len(self.vocabulary))


# Users, items, events -------------------------------------------------------------------------------------------------


def read_entities(file: Path | None, open_table: Callable[[Path], Table], key: str, report: Report) -> Entities | None:
  """Users or items, in the order of their lines; None: nothing is known of them but their names in the events.

  Args:
    file: has a line for each; None, or a file that is not there: there is none.
    open_table: opens it.
    key: column of their names, such as user_id.
    report: is told of a file that is not there.
  """
  if file is None:
    return None
  if not file.exists():
    report(f"data: there is no {file}: the {key} is all that is known of a {key.removesuffix('_id')}")
    return None
  table = open_table(file)
  key_place = require(table, key, "token")
  line_of: dict[str, int] = {}
  features = {k: _Values(it) for k, it in enumerate(table.columns) if k != key_place and it.kind != "unread"}
  for line, fields in checked_rows(table):
    name = fields[key_place]
    if not name or name in line_of:
      allowed = f"it is that of line {line_of[name]} too" if name else "a name is required"
      raise refusal(table, line, key_place, name, allowed)
    line_of[name] = line
    for k, values in features.items():
      try:
        values.append(fields[k])
      except ValueError:
        raise refusal(table, line, k, fields[k], "it must be a finite number") from None
  return Entities(
    names=list(line_of),
    numeric={it.column.name: it.numeric_R for it in features.values() if it.is_numeric},
    categorical={it.column.name: it.categories for it in features.values() if not it.is_numeric},
  )


class Events(NamedTuple):
  """Columns of `Interactions`, with times as the files count them."""

  user_N: np.ndarray
  item_N: np.ndarray
  time_N: np.ndarray
  label_N: np.ndarray | None
  users: Entities
  items: Entities


def read_events(
  tables: Iterable[Table],
  users: Entities | None,
  items: Entities | None,
  *,
  user: str,
  item: str,
  time: Field,
  label: Field | None,
) -> Events:
  """Events of all tables, one after another, in the order of their lines.

  Args:
    tables: one or several, none without an event.
    users: None: they are numbered in the order in which they first appear.
    items: as `users`.
    user: column of users' names.
    item: column of items' names.
    time: column of whole numbers.
    label: column of numbers; None: there is none.
  """
  user_ids, item_ids = _numbering(users), _numbering(items)
  user_N, item_N, time_N, label_N = array.array("i"), array.array("i"), array.array("q"), array.array("f")
  for table in tables:
    place_of = {column.name: k for k, column in enumerate(table.columns)}
    names = [(place_of[user], user_ids, user_N), (place_of[item], item_ids, item_N)]
    numbers: list[tuple[int, Field, Any]] = [(place_of[time.name], time, time_N)]  # arrays of integers and of floats
    if label is not None:
      numbers.append((place_of[label.name], label, label_N))
    before = len(user_N)
    for line, fields in checked_rows(table):
      for k, ids, ids_N in names:
        try:
          ids_N.append(ids[fields[k]])
        except KeyError:
          known = f"it must be one of the {len(ids)} in the file of {table.columns[k].name.removesuffix('_id')}s"
          raise refusal(table, line, k, fields[k], known) from None
      for k, field, column_N in numbers:
        try:
          column_N.append(field.parse(fields[k]))
        except ValueError:
          raise refusal(table, line, k, fields[k], field.allowed) from None
    if len(user_N) == before:
      raise UserError(f"{table.file}: holds no interactions")
  return Events(
    user_N=np.asarray(user_N),
    item_N=np.asarray(item_N),
    time_N=np.asarray(time_N),
    label_N=np.asarray(label_N) if label is not None else None,
    users=Entities(list(user_ids)) if users is None else users,
    items=Entities(list(item_ids)) if items is None else items,
  )


def _numbering(entities: Entities | None) -> dict[str, int]:
  return Ids() if entities is None else {name: row for row, name in enumerate(entities.names)}
