"""What the folders of runs say, and a comparison of finished runs as Markdown. Plots: `sparse_lm/figures.py`."""

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pallas_kernels import bench
from sparse_lm.errors import UserError
from sparse_lm.training import recorder

Json = dict[str, Any]
_EVALUATIONS = ("tasks", "activity")  # files that experiments/eval_lm.py writes


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """What a run's folder says, finished or not."""

  config: Json
  env: Json
  metrics: list[Json]  # one a logged step, oldest first, at least one
  evaluations: dict[str, Json]  # "tasks" and "activity", where they were made

  @property
  def last(self) -> Json:
    """Metrics of the last logged step, validation included if the run is finished."""
    return self.metrics[-1]

  @property
  def steps(self) -> int:
    """Steps of the whole run."""
    return self.config["training"]["steps"]

  @property
  def finished(self) -> bool:
    """Whether it has got to its end; a run that stopped on NaN, or was stopped, has not."""
    return self.last["step"] == self.steps


def read_run(folder: Path) -> RunRecord:
  """Reads a run's folder.

  Raises:
    UserError: it is not the folder of a run that has logged a step.
  """
  metrics = recorder.read_metrics(folder / "metrics.jsonl")
  if not metrics:
    raise UserError(f"{folder} holds no run (no line in metrics.jsonl); give the folder that a run had as --workdir")
  files = {name: folder / "evaluation" / f"{name}.json" for name in _EVALUATIONS}
  return RunRecord(
    config=recorder.read_json(folder / "config.json"),
    env=recorder.read_json(folder / "env.json"),
    metrics=[with_numbers(entry) for entry in metrics],
    evaluations={name: with_numbers(recorder.read_json(path)) for name, path in files.items() if path.exists()},
  )


def read_runs(folder: Path) -> dict[str, RunRecord]:
  """Reads every run inside a folder, by name.

  Raises:
    UserError: there is none.
  """
  runs = {path.parent.name: read_run(path.parent) for path in sorted(folder.glob("*/metrics.jsonl"))}
  if not runs:
    raise UserError(f"{folder} holds no runs (no NAME/metrics.jsonl); give a folder whose folders are runs")
  return runs


def markdown_table(runs: Mapping[str, RunRecord], baseline: str, *, with_speed: bool = True) -> str:
  """One row a run. Losses are compared with the run named `baseline`.

  Raises:
    UserError: a run is unfinished or was not validated.
  """
  for name, run in runs.items():
    if not run.finished or "validation_loss" not in run.last:
      raise UserError(
        f"run {name!r} is at step {run.last['step']} of {run.steps} or has no validation; finish it first"
      )
  header = ["model", "L1 coefficient", "validation CE (nats a token)", f"against {baseline}"]
  header += ["non-zeros a token (L0)", "zero activations", "dead neurons"] + (
    ["tokens/s", "peak memory"] if with_speed else []
  )
  rows = []
  reference = runs[baseline].last["validation_loss"]
  for name, run in runs.items():
    last = run.last
    row = [name, f"{last['l1_coefficient']:.3g}", f"{last['validation_loss']:.4f}"]
    row.append(f"{last['validation_loss'] / reference - 1:+.1%}")
    if "validation_l0" in last:
      width = run.config["model"]["ffn_width"]
      row += [f"{last['validation_l0']:.1f} of {width}", f"{last['validation_zeros']:.1%}", f"{last['dead']:.1%}"]
    else:
      row += ["-", "-", "-"]  # no hidden units
    if with_speed:
      row.append(f"{statistics.median(entry['tokens_per_second'] for entry in run.metrics):,.0f}")
      row.append(f"{last['peak_device_bytes'] / 2**30:.1f} GiB" if "peak_device_bytes" in last else "-")
    rows.append(row)
  return bench.markdown_table(header, rows)


def with_numbers(value: Any) -> Any:
  """Turns back into numbers what JSON has none for and the recorder writes as text."""
  if isinstance(value, dict):
    return {key: with_numbers(v) for key, v in value.items()}
  if isinstance(value, list):
    return [with_numbers(v) for v in value]
  return float(value) if isinstance(value, str) and value.lower() in ("nan", "inf", "-inf") else value
