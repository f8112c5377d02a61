"""A folder for each run: config.json, env.json, metrics.jsonl (an object a logged step), and a lock on it."""

import fcntl
import importlib.metadata
import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import bench
from sparse_lm.errors import UserError

Json = dict[str, Any]


def lock(workdir: Path):
  """Takes the folder for this process until it ends, however it ends. Keep the returned file open.

  Raises:
    UserError: another live run has it, or it cannot be made or written.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    file = open(workdir / ".lock", "a+")  # noqa: SIM115 - open for as long as the lock is held
  except OSError as error:
    raise UserError(
      f"work folder {workdir} cannot be used ({error.strerror}); give a --workdir that can be written"
    ) from None
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
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
  """Replaces the file in one step, so that a reader never sees half of it."""
  temporary = path.with_name(f".{path.name}.tmp")
  temporary.write_text(json.dumps(value, indent=2) + "\n")
  temporary.replace(path)


def read_json(path: Path) -> Any:
  """The value of a JSON file.

  Raises:
    UserError: it cannot be read or is no JSON.
  """
  try:
    return json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise UserError(f"{path} cannot be read ({error}); restore it, or remove it") from None


def read_metrics(path: Path) -> list[Json]:
  """Objects of a metrics.jsonl; a last line that a kill cut short is left out."""
  if not path.exists():
    return []
  objects = []
  for line in path.read_text().splitlines():
    try:
      objects.append(json.loads(line))
    except json.JSONDecodeError:
      break
  return objects


class MetricsWriter:
  """Appends to metrics.jsonl and, on request, to TensorBoard."""

  def __init__(self, workdir: Path, *, first_step: int, tensorboard: bool):
    """Drops what an earlier run wrote after the checkpoint that this one starts from: those steps are done again."""
    path = workdir / "metrics.jsonl"
    kept = [json.dumps(entry) for entry in read_metrics(path) if entry["step"] <= first_step]
    temporary = path.with_name(".metrics.jsonl.tmp")
    temporary.write_text("".join(line + "\n" for line in kept))
    temporary.replace(path)
    self._file = open(path, "a")  # noqa: SIM115 - closed by close()
    self._board = None
    if tensorboard:
      try:
        from tensorboardX import SummaryWriter
      except ImportError:
        raise UserError("training.tensorboard=True needs the package tensorboardX: pip install tensorboardX") from None
      self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=first_step + 1)

  def write(self, entry: Json) -> None:
    """Writes one object; NaN and infinities become strings, since JSON has no numbers for them."""
    self._file.write(json.dumps(_finite_json(entry), allow_nan=False) + "\n")
    self._file.flush()
    if self._board is not None:
      for name, value in entry.items():
        if isinstance(value, int | float) and name != "step":
          self._board.add_scalar(name, value, entry["step"])

  def close(self) -> None:
    """Flushes and closes the files."""
    self._file.close()
    if self._board is not None:
      self._board.close()


def _finite_json(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _finite_json(v) for key, v in value.items()}
  if isinstance(value, list):
    return [_finite_json(v) for v in value]
  return str(value) if isinstance(value, float) and not math.isfinite(value) else value
