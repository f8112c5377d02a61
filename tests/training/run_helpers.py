"""Reading what a run left behind."""

import json
import re
from pathlib import Path


def finish(process) -> tuple[int, str, str]:
  """Exit code, standard output, standard error."""
  out, err = process.communicate(timeout=300)
  return process.returncode, out, err


def losses(workdir: Path) -> dict[int, dict]:
  """What training computed at each step, without what the machine's speed decides."""
  entries = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  machine = re.compile("second|mfu|bytes|joules")
  return {e["step"]: {name: value for name, value in e.items() if not machine.search(name)} for e in entries}
