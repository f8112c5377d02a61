"""Stopping a run, and reading what it left behind."""

import json
import os
import re
import signal
from pathlib import Path

from sparse_lm.training.progress import Progress


class StopAt(Progress):
  """Asks the run to stop when it shows a step; the one after it is under way then and becomes the last."""

  def __init__(self, step):
    super().__init__(step)
    self._stop_at = step

  def step(self, done, text):
    super().step(done, text)
    if done == self._stop_at:
      os.kill(os.getpid(), signal.SIGTERM)


def finish(process) -> tuple[int, str, str]:
  """Exit code, standard output, standard error."""
  out, err = process.communicate(timeout=300)
  return process.returncode, out, err


def losses(workdir: Path) -> dict[int, dict]:
  """What training computed at each step, without what the machine's speed decides."""
  entries = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  machine = re.compile("second|mfu|bytes|joules")
  return {e["step"]: {name: value for name, value in e.items() if not machine.search(name)} for e in entries}
