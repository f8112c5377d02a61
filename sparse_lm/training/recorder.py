"""A folder for each run: config.json, env.json, metrics.jsonl (an object a logged step), and a lock on it."""

import fcntl
import importlib.metadata
import importlib.util
import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import bench
from sparse_lm.errors import SaveError, UserError

Json = dict[str, Any]


def lock(workdir: Path):
  """Takes the folder for this process until it ends, however it ends. Keep the returned file open.

  Raises:
    UserError: another live run has it, or it cannot be made or written.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    file = open(workdir / ".lock", "a+")  # noqa: SIM115 - open for as long as the lock is held
    str(workdir).encode()  # Orbax takes no other names, and would say so when the first checkpoint is due
  except UnicodeEncodeError:
    raise UserError(f"work folder {workdir!r} has a name that is no UTF-8; give another --workdir") from None
  except OSError as error:
    raise UserError(
      f"work folder {workdir} cannot be used ({error.strerror}); give a --workdir that can be written"
    ) from None
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.seek(0)
    raise UserError(
      f"work folder {workdir} is in use by another live run ({file.read().strip() or 'unknown'});"
      " wait for it, stop it, or give another --workdir"
    ) from None
  file.truncate(0)
  file.write(f"process {os.getpid()} on {socket.gethostname()}")
  file.flush()
  return file


def environment() -> Json:
  """What a reader needs to repeat a run or to trust its numbers."""
  env = bench.environment()
  for name in ("jaxlib", "flax", "optax", "orbax-checkpoint"):
    env["versions"][name] = importlib.metadata.version(name)
  return env | {"host_cores": os.cpu_count(), "processes": jax.process_count()}


def write_json(path: Path, value: Any) -> None:
  """Replaces the file in one step, so that a reader never sees half of it.

  Raises:
    SaveError: it could not be written; the old one is intact.
  """
  write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
  """As `write_json`, of plain text."""
  temporary = path.with_name(f".{path.name}.tmp")
  try:
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
  except OSError as error:
    temporary.unlink(missing_ok=True)
    raise SaveError(f"{path} could not be written ({error.strerror}); make room, then run the same command") from None


def read_json(path: Path) -> Json:
  """The object in a JSON file.

  Raises:
    UserError: it cannot be read or is no JSON object.
  """
  try:
    value = json.loads(path.read_text())
    if not isinstance(value, dict):
      raise ValueError("it holds no JSON object")
  except (OSError, ValueError) as error:
    raise UserError(f"{path} cannot be read ({error}); restore it, or remove it") from None
  return value


def read_metrics(path: Path) -> list[Json]:
  """Objects of a metrics.jsonl, without lines that are damaged or that a kill cut short."""
  return [entry for entry in _parse(path) if isinstance(entry, dict)]


def _parse(path: Path) -> list[Json | str]:
  """Each line as its object, or as it stands where it is no line of metrics."""

  def parse(line):
    try:
      entry = json.loads(line)
    except json.JSONDecodeError:
      return line
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else line

  return [parse(line) for line in path.read_text(errors="replace").splitlines()] if path.exists() else []


def require_tensorboard() -> None:
  """Raises UserError if tensorboardX is not installed."""
  if importlib.util.find_spec("tensorboardX") is None:
    raise UserError("training.tensorboard=True needs the package tensorboardX: pip install tensorboardX")


class MetricsWriter:
  """Appends to metrics.jsonl and, on request, to TensorBoard."""

  def __init__(self, workdir: Path, *, first_step: int, tensorboard: bool, report: Callable[[str], None] = print):
    """Drops what an earlier run wrote after the checkpoint that this one starts from: those steps are done again.

    Args:
      workdir: holds metrics.jsonl; a damaged one is kept beside it as metrics.jsonl.damaged.
      first_step: step of the checkpoint.
      tensorboard: also write WORKDIR/tensorboard; needs tensorboardX.
      report: takes one line.
    """
    path = workdir / "metrics.jsonl"
    lines = _parse(path)
    if damaged := [n for n, line in enumerate(lines[:-1], start=1) if isinstance(line, str)]:  # a kill cuts the last
      copy = path.with_name("metrics.jsonl.damaged")
      copy.write_bytes(path.read_bytes())
      report(f"line {damaged[0]} of {path} is damaged; the other lines go on, and the file as it was is kept as {copy}")
    kept = [json.dumps(entry) for entry in lines if isinstance(entry, dict) and entry["step"] <= first_step]
    write_text(path, "".join(line + "\n" for line in kept))
    self._file = open(path, "a")  # noqa: SIM115 - closed by close()
    self._board = None
    if tensorboard:
      from tensorboardX import SummaryWriter

      self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=first_step + 1)

  def write(self, entry: Json) -> None:
    """Writes one object, as `finite_json`."""
    try:
      self._file.write(json.dumps(finite_json(entry), allow_nan=False) + "\n")
      self._file.flush()
    except OSError as error:
      raise SaveError(
        f"{self._file.name} could not be written ({error.strerror}); make room, then run the same command"
      ) from None
    if self._board is not None:
      for name, value in entry.items():
        if isinstance(value, int | float) and name != "step":
          self._board.add_scalar(name, value, entry["step"])

  def close(self) -> None:
    """Flushes and closes the files."""
    self._file.close()
    if self._board is not None:
      self._board.close()


def finite_json(value: Any) -> Any:
  """Turns NaN and infinities into text, for which JSON has no numbers; back: `report.with_numbers`."""
  if isinstance(value, dict):
    return {key: finite_json(v) for key, v in value.items()}
  if isinstance(value, list):
    return [finite_json(v) for v in value]
  return str(value) if isinstance(value, float) and not math.isfinite(value) else value
