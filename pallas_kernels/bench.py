"""Timing on the device, ceilings of the device, and the record of a benchmark run.

A record is a folder: `config.json` (what was asked), `env.json` (where it ran), `metrics.jsonl` (one object a case).
Tables are pure functions of such folders.
"""

import collections
import collections.abc
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

Timing = dict[str, float]
RECORD_FILES = ("config.json", "env.json", "metrics.jsonl", "table.md")
_SECONDS, _CALLS = 0.05, 4  # of a queue, at least


def device_time(function: collections.abc.Callable, *args, samples: int = 15, seconds: float = _SECONDS) -> Timing:
  """Returns median, p10 and p90 of the milliseconds of one call, timed as `device_times` does."""
  return device_times({"it": function}, *args, samples=samples, seconds=seconds)["it"]


def device_times(
  functions: dict[str, collections.abc.Callable], *args, samples: int = 15, seconds: float = _SECONDS
) -> dict[str, Timing]:
  """Returns median, p10 and p90 of the milliseconds of one call of each function, all with the same arguments.

  Calls are queued, as many as fill `seconds` but no less than four, and waited for once: the host stays ahead of the
  device, so what is timed is the device, as long as a call lasts longer than its dispatch (some 20 us). XLA records a
  CUDA graph anew when buffers move, so a function of many small kernels should return one array rather than many.

  The functions take turns, a queue each: a device that slows down as it warms slows them all. Before each queue there
  is a rest as long as a queue: a board at its power limit lowers its clocks, and would do so for whoever comes next.
  """
  calls = {name: jax.jit(function) for name, function in functions.items()}

  def queue(name: str, number: int) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    for _ in range(number):
      result = calls[name](*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / number

  numbers, times = {}, collections.defaultdict(list)
  for name in functions:
    queue(name, 3)  # compiles, loads the module, fills the allocator
    numbers[name] = max(_CALLS, int(seconds / queue(name, 5)))
  for _ in range(samples):
    for name, number in numbers.items():
      time.sleep(seconds)
      times[name].append(queue(name, number))
  return {name: _quantiles(of_function) for name, of_function in times.items()}


def _quantiles(times: list[float]) -> Timing:
  """Of seconds."""
  p10, median, p90 = 1e3 * np.percentile(times, [10, 50, 90])
  return {"ms": float(median), "ms_p10": float(p10), "ms_p90": float(p90)}


def ceilings(copy_bytes: int = 1 << 30, matmul_size: int = 8192) -> dict[str, float]:
  """Returns what this device gives today, on random data: bytes/s of a copy (read + write), flop/s of bf16 matmul."""
  key = jax.random.key(0)
  x_L = jax.random.normal(key, (copy_bytes // 4,), jnp.float32)
  a_MK = jax.random.normal(key, (matmul_size, matmul_size), jnp.bfloat16)
  # A bare copy could be elided; a multiplication costs nothing beside the traffic.
  copy = device_time(lambda x: x * 1.5, x_L)
  matmul = device_time(lambda a: a @ a.T, a_MK)
  return {
    "copy_bytes_per_s": 2 * x_L.nbytes / (1e-3 * copy["ms"]),
    "matmul_flop_per_s": 2 * matmul_size**3 / (1e-3 * matmul["ms"]),
  }


def environment() -> dict:
  """Returns versions, device, commit and command."""
  device = jax.devices()[0]
  return {
    "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
    "device": {"kind": device.device_kind, "platform": device.platform, "count": jax.device_count()},
    "git_commit": _git_commit(),
    "command": [os.path.relpath(sys.argv[0]), *sys.argv[1:]],
    "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
  }


def _git_commit() -> str | None:
  """The commit of this source, wherever it is run from; None outside a repository or without git."""
  command = ["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty", "--abbrev=40"]
  try:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
  except OSError:
    return None


class Record:
  """Writes the folder of one run, a case at a time, so that a run that dies leaves what it had."""

  def __init__(self, folder: str | pathlib.Path, config: dict):
    self.folder = pathlib.Path(folder)
    held = [name for name in RECORD_FILES if (self.folder / name).exists()]
    if held not in ([], ["config.json", "env.json"]):  # these two are of a run that died before its first case
      raise FileExistsError(f"{self.folder} already holds {held[0]}; name another folder, records are not overwritten")
    self.folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("config.json", config), ("env.json", environment())):
      (self.folder / name).write_text(json.dumps(content, indent=2) + "\n")

  def add(self, case: dict) -> None:
    """Appends one case."""
    with (self.folder / "metrics.jsonl").open("a") as file:
      file.write(json.dumps(case) + "\n")


def load_cases(folder: str | pathlib.Path) -> list[dict]:
  """Returns the cases of a record."""
  return [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
  """Returns a table with its first column to the left and all others to the right."""
  lines = [header, ["---"] + ["--:"] * (len(header) - 1), *rows]
  return "".join(f"| {' | '.join(line)} |\n" for line in lines)
