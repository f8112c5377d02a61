"""Sweeps: variants of one config, trained one after the other, each as a process of its own with a folder of its own.

Nothing here imports jax, which takes seconds: a sweep is checked, and its finished runs are passed over, at once.
"""

import contextlib
import dataclasses
import json
import re
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sparse_lm import config_io
from sparse_lm.config import TrainingConfig
from sparse_lm.errors import EXIT_PREEMPTED, UserError
from sparse_lm.flags import EXIT_INTERRUPTED
from sparse_lm.training.stop import StopSignal

# Ctrl-C reaches every process of a terminal, and some schedulers signal every process of a job. A second signal of the
# same kind ends a run without saving, so a sweep passes on the other one: to a run both mean the same.
_PASSED_ON_AS = {"SIGTERM": signal.SIGINT, "SIGINT": signal.SIGTERM}
# What a run leaves with that was asked to stop, negative before it listens, and what the sweep leaves with then.
_STOPPED = {
  EXIT_PREEMPTED: EXIT_PREEMPTED,
  -signal.SIGTERM: EXIT_PREEMPTED,
  EXIT_INTERRUPTED: EXIT_INTERRUPTED,
  -signal.SIGINT: EXIT_INTERRUPTED,
}


class RunConfig(Protocol):
  """What a sweep asks of a config."""

  training: TrainingConfig

  def validate(self) -> None:
    """Raises UserError at the first thing that cannot work."""


class SweepError(UserError):
  """Not every run is done: 1 where runs failed, 75 after SIGTERM, 130 after Ctrl-C."""

  def __init__(self, message: str, exit_code: int):
    super().__init__(message)
    self.exit_code = exit_code


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of a sweep."""

  title: str  # what is said when it starts
  config: RunConfig
  folder: Path
  command: list[str]


def configs[ConfigT: RunConfig](
  config: ConfigT, sweep: Mapping[str, Mapping[str, Any]], given: Collection[str] = ()
) -> dict[str, ConfigT]:
  """Returns the validated config of each run.

  Args:
    config: what the overlays change.
    sweep: overlays, that is, values by dotted name of the field, by name of the run.
    given: names of fields that the overlays may not touch, for the command line sets them.

  Raises:
    UserError: naming the run, for what is no sweep or gives a config that does not fit together.
  """
  if not sweep:
    raise UserError("the sweep has no runs; get_sweep() must return overlays by name of the run")
  resolved: dict[str, ConfigT] = {}
  for name, overlay in sweep.items():
    _check_name(name, list(resolved))
    if not isinstance(overlay, Mapping) or not all(isinstance(field, str) for field in overlay):
      raise UserError(f"run {name!r}: {overlay!r} must be a dict of values by dotted name, such as 'model.num_layers'")
    for field in overlay:
      if field in given:
        raise UserError(f"run {name!r}: the sweep sets {field}={overlay[field]!r}; leave out --config.{field}")
    try:
      resolved[name] = config_io.overlay(config, overlay)
      resolved[name].validate()
    except UserError as error:
      raise UserError(f"run {name!r}: {error}") from None
  return resolved


def is_finished(folder: Path, config: RunConfig) -> bool:
  """Whether a folder holds exactly this run, trained to its last step; where in doubt, the run itself finds out."""
  try:
    saved = json.loads((folder / "config.json").read_text())
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    done = last["step"]
  except (OSError, ValueError, IndexError, KeyError, TypeError):
    return False
  steps = config.training.steps
  return saved == config_io.to_dict(config) and done == steps and (folder / "checkpoints" / str(steps)).is_dir()


def run_in_turn(runs: Sequence[Run]) -> None:
  """Runs what is not finished, goes on after a failure, and prints what became of each.

  Raises:
    SweepError: a run failed, or the sweep was stopped; then its run has saved.
  """
  outcomes, stopped = {run.folder: "not run" for run in runs}, None
  with StopSignal() as stop:
    for run in runs:
      if is_finished(run.folder, run.config):
        print(f"== {run.title} == is finished, skipped", flush=True)
        outcomes[run.folder] = "skipped"
        continue
      print(f"== {run.title} ==", flush=True)
      code = _exit_code(run.command, stop)
      outcomes[run.folder] = _outcome(code)
      stopped = _STOPPED.get(-signal.Signals[stop.requested] if stop.requested else code)
      if stopped is not None:
        break
  for folder, outcome in outcomes.items():
    print(f"{outcome:8} {folder}", flush=True)
  failed = [folder.name for folder, outcome in outcomes.items() if outcome.startswith("failed")]
  count = f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}"
  if stopped is not None:
    raise SweepError(f"the sweep was stopped; {count + '; ' if failed else ''}the same command goes on", stopped)
  if failed:
    raise SweepError(f"{count}; the same command tries them again", 1)


def _exit_code(command: list[str], stop: StopSignal) -> int:
  process, passed_on = subprocess.Popen(command), False
  while process.poll() is None:
    if stop.requested and not passed_on:
      process.send_signal(_PASSED_ON_AS[stop.requested])
      passed_on = True
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(timeout=0.2)
  return process.returncode


def _outcome(code: int) -> str:
  if code in _STOPPED:
    return "stopped"
  if code < 0:
    return f"failed (ended by signal {-code}, {signal.strsignal(-code)})"
  return f"failed (exit code {code})" if code else "done"


def _check_name(name: Any, others: Sequence[str]) -> None:
  if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*", name, re.ASCII):
    raise UserError(
      f"run {name!r}: its name becomes that of its folder; use letters, digits, '_', '-' and, not as the first, '.'"
    )
  if name.lower() in [other.lower() for other in others]:
    raise UserError(f"run {name!r}: another name differs in case alone, and some disks take both for one folder")
