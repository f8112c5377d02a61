"""A comparison of finished runs, as Markdown and plots: a pure function of their folders."""

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pallas_kernels import bench
from sparse_lm.errors import UserError
from sparse_lm.training import recorder


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """What a run's folder says."""

  config: dict[str, Any]
  env: dict[str, Any]
  metrics: list[dict[str, Any]]  # one a logged step, oldest first

  @property
  def last(self) -> dict[str, Any]:
    """Metrics of the last step, validation included."""
    return self.metrics[-1]


def read_run(folder: Path) -> RunRecord:
  """Reads a run's folder.

  Raises:
    UserError: it is not the folder of a run that has logged its validation.
  """
  metrics = recorder.read_metrics(folder / "metrics.jsonl")
  if not metrics or "validation_loss" not in metrics[-1]:
    raise UserError(f"{folder} holds no finished run (no validation_loss in the last line of metrics.jsonl)")
  return RunRecord(recorder.read_json(folder / "config.json"), recorder.read_json(folder / "env.json"), metrics)


def markdown_table(runs: Mapping[str, RunRecord], baseline: str) -> str:
  """One row a run. Losses are compared with the run named `baseline`."""
  header = ["model", "L1 coefficient", "validation CE (nats a token)", f"against {baseline}"]
  header += ["non-zeros a token (L0)", "zero activations", "dead neurons", "tokens/s"]
  rows = []
  reference = runs[baseline].last["validation_loss"]
  for name, run in runs.items():
    last = run.last
    speed = statistics.median(entry["tokens_per_second"] for entry in run.metrics)
    row = [name, f"{last['l1_coefficient']:.3g}", f"{last['validation_loss']:.4f}"]
    row.append(f"{last['validation_loss'] / reference - 1:+.1%}")
    if "validation_l0" in last:
      width = run.config["model"]["ffn_width"]
      row += [f"{last['validation_l0']:.1f} of {width}", f"{last['validation_zeros']:.1%}", f"{last['dead']:.1%}"]
    else:
      row += ["-", "-", "-"]  # no hidden units
    rows.append([*row, f"{speed:,.0f}"])
  return bench.markdown_table(header, rows)


def plot(runs: Mapping[str, RunRecord], folder: Path) -> list[Path]:
  """Writes loss.png and, if a run has hidden units, l0.png and l0_per_layer.png.

  Raises:
    UserError: matplotlib is not installed.
  """
  try:
    import matplotlib
  except ImportError:
    raise UserError("plots need the package matplotlib: pip install -e '.[plots]'") from None
  matplotlib.use("Agg")  # no display
  from matplotlib import pyplot

  with_neurons = {name: run for name, run in runs.items() if "l0" in run.last}
  paths = []

  def draw(filename, title, xlabel, ylabel, chosen, curve, *, log=False):
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, run in chosen.items():
      curve(axes, name, run)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if log:
      axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / filename, dpi=120)
    pyplot.close(figure)
    paths.append(folder / filename)

  def loss(axes, name, run):
    (line,) = axes.plot(*_curve(run, "cross_entropy"), label=name, alpha=0.8)
    axes.plot(*_curve(run, "validation_loss"), "o", color=line.get_color(), markersize=4)

  def l0(axes, name, run):
    axes.plot(*_curve(run, "l0"), label=name)

  def per_layer(axes, name, run):
    values = run.last["validation_l0_per_layer"]
    axes.plot(range(1, len(values) + 1), values, "o-", label=name)
    axes.set_xticks(range(1, len(values) + 1))

  draw("loss.png", "Cross-entropy: training (lines), validation (dots)", "step", "nats a token", runs, loss)
  if with_neurons:
    count = "non-zeros a token"
    draw("l0.png", "Neurons that fire, mean over layers", "step", count, with_neurons, l0, log=True)
    draw("l0_per_layer.png", "Neurons that fire, by layer", "layer", count, with_neurons, per_layer, log=True)
  return paths


def _curve(run: RunRecord, name: str) -> tuple[list[int], list[float]]:
  points = [(entry["step"], float(entry[name])) for entry in run.metrics if name in entry]
  return [step for step, _ in points], [value for _, value in points]
