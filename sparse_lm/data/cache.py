"""Folders that are computed once, checked whenever they are used, and computed again when they are damaged.

A folder is built beside its final name and renamed into place, so that a kill in the middle leaves nothing that looks
whole. A lock lets one process build while others wait; reading a good folder takes no lock.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from sparse_lm.config import DataConfig
from sparse_lm.data.progress import Report
from sparse_lm.errors import UserError
from sparse_lm.recsys_config import InteractionsConfig


class DamagedError(Exception):
  """A cached folder is not what was written; the message says which file, and how it differs."""


def cache_root(config: DataConfig | InteractionsConfig) -> Path:
  """Folder of all caches: data.cache_dir, else sparse-lm in the user's cache folder."""
  if config.cache_dir:
    return Path(os.path.expanduser(config.cache_dir))
  base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  if base.startswith("~"):
    raise UserError("there is no home folder for the caches of data; give data.cache_dir")
  return Path(base) / "sparse-lm"


def load_or_build[T](
  folder: Path, *, load: Callable[[Path], T], build: Callable[[Path], None], report: Report, what: str
) -> T:
  """Returns load(folder), after building it where it is absent or damaged.

  Args:
    folder: final place; its name is a hash of everything that decides its content.
    load: reads and checks the folder; raises DamagedError.
    build: writes all files into the empty folder it is given.
    report: receives a line when the folder is damaged, and when another process is building it.
    what: the content in a word or two, for these lines.
  """
  with contextlib.suppress(DamagedError):
    if os.path.exists(folder):  # False, not an error, where one may not even look
      return load(folder)
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(folder.with_name(folder.name + ".lock"), report, what):
      if folder.exists():
        try:
          return load(folder)  # another process built it while this one waited
        except DamagedError as damage:
          report(f"data: cached {what} damaged: {damage}; building anew from the source")
          shutil.rmtree(folder)
      # The lock is ours, so whatever lies at this name was left by a build that was killed.
      partial = folder.with_name(folder.name + ".partial")
      shutil.rmtree(partial, ignore_errors=True)
      partial.mkdir()
      build(partial)
      partial.rename(folder)
  except OSError as error:
    raise UserError(
      f"data.cache_dir: cannot write {error.filename or folder} ({error.strerror}); free some space there, or set"
      " data.cache_dir to a folder that can be written"
    ) from error
  try:
    return load(folder)
  except DamagedError as damage:
    raise UserError(f"{damage}, right after it was written; set data.cache_dir to another disk") from damage


@contextlib.contextmanager
def _only_builder(lock: Path, report: Report, what: str) -> Iterator[None]:
  """Holds the lock file; the system lets go of it when a process dies, however it dies."""
  with lock.open("w") as handle:
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      report(f"data: another process is building {what}; waiting for it")
      fcntl.flock(handle, fcntl.LOCK_EX)
    yield
