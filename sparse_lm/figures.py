"""Plots of runs: a pure function of their folders. `comparison` are the demo's, `paper` the paper's figures.

Figures 6, 10 and 11 of the paper are one drawing (non-zeros by layer) of three runs, and here too: fig6_RUN.png.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_lm.errors import UserError
from sparse_lm.report import RunRecord

Runs = Mapping[str, RunRecord]  # by what the legend calls them
_NON_ZEROS = "non-zeros a token"
_PERCENT = 100.0


def comparison(runs: Runs, folder: Path) -> list[Path]:
  """Writes loss.png and, if a run has hidden units, l0.png and l0_per_layer.png.

  Raises:
    UserError: matplotlib is not installed.
  """
  paths = [_loss(folder / "loss.png", runs)]
  if neurons := {name: run for name, run in runs.items() if "l0" in run.last}:
    paths += [_l0(folder / "l0.png", neurons), _validation_l0_per_layer(folder / "l0_per_layer.png", neurons)]
  return paths


def paper(runs: Runs, folder: Path) -> tuple[list[Path], list[str]]:
  """Writes fig2.png, fig3.png, fig8.png, fig9.png, and fig6_RUN.png and fig7_RUN.png for runs with the evaluation.

  Returns:
    The files, and a line for each run that lacks a figure.

  Raises:
    UserError: matplotlib is not installed.
  """
  curves, legend = _by_coefficient(runs)
  paths, left_out = [_loss(folder / "fig2.png", curves, legend=legend, zoom=True)], []
  validated = {name: run for name, run in runs.items() if run.finished and "validation_loss" in run.last}
  if legend is None:
    left_out.append("fig3: the L1 coefficient does not tell the runs apart")
  elif validated:
    paths.append(_sweep(folder / "fig3.png", list(validated.values())))
  for name, run in runs.items():
    if name not in validated:
      left_out.append(f"fig3: run {name} has no validation at its end (step {run.last['step']} of {run.steps})")
  neurons = {name: run for name, run in curves.items() if "l0" in run.last}
  left_out += [
    f"fig8, fig9: run {name} has no neurons that can be zero" for name in runs if "l0" not in runs[name].last
  ]
  if neurons:
    paths.append(_l0(folder / "fig8.png", neurons, legend=legend))
    paths.append(_dead(folder / "fig9.png", neurons, legend=legend))
  for name, run in runs.items():
    if activity := run.evaluations.get("activity"):
      paths.append(_l0_per_layer(folder / f"fig6_{name}.png", name, activity))
      paths.append(_l0_by_token(folder / f"fig7_{name}.png", name, activity))
    else:
      left_out.append(f"fig6, fig7: run {name} has no evaluation/activity.json (experiments.eval_lm --activity)")
  return paths, left_out


def image_links(paths: list[Path]) -> str:
  """Returns Markdown that shows plots which lie beside it, a line each."""
  return "\n".join(f"![{path.stem}]({path.name})" for path in paths)


def recommenders(runs: Runs, folder: Path) -> list[Path]:
  """Writes learning.png and calibration.png of runs that are finished.

  Raises:
    UserError: matplotlib is missing.
  """
  return [_learning(folder / "learning.png", runs), _calibration(folder / "calibration.png", runs)]


def _learning(path: Path, runs: Runs) -> Path:
  with _canvas(path, panels=2) as panels:
    for axes, metric, title in zip(panels, ("validation_ne", "validation_auc"), ("NE", "AUC")):
      for name, run in runs.items():
        axes.plot(*_curve(run, metric, 0), "o-", label=name, markersize=3)
      axes.set(title=f"{title} of later events (validation)", xlabel="step", ylabel=title)
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
  return path


def _calibration(path: Path, runs: Runs) -> Path:
  with _canvas(path) as (axes,):
    axes.plot([0, 1], [0, 1], color="gray", linewidth=1)
    for name, run in runs.items():
      axes.plot(run.last["test_mean_predicted"], run.last["test_mean_observed"], "o-", label=name, markersize=4)
    axes.set(
      title="Test events in ten groups, by what was predicted",
      xlabel="mean predicted probability",
      ylabel="share of positives",
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
  return path


def _by_coefficient(runs: Runs) -> tuple[Runs, str | None]:
  """Runs in the order of their L1 coefficients and named by them, with a title of the legend; as they are if not."""
  coefficients = [run.config["sparsity"]["l1_coefficient"] for run in runs.values()]
  steered = any(run.config["sparsity"]["target_l0"] is not None for run in runs.values())
  if steered or len(set(coefficients)) < len(runs):  # the coefficient does not tell them apart
    return runs, None
  ordered = sorted(runs.values(), key=lambda run: run.config["sparsity"]["l1_coefficient"])
  return {_short(run.config["sparsity"]["l1_coefficient"]): run for run in ordered}, "L1 coefficient"


def _short(coefficient: float) -> str:
  """2e-5 rather than 2e-05, and 1e-4 rather than 0.0001."""
  if coefficient == 0 or coefficient >= 1e-3:
    return f"{coefficient:g}"
  mantissa, exponent = f"{coefficient:e}".split("e")
  return f"{float(mantissa):g}e{int(exponent)}"


def _loss(path: Path, runs: Runs, legend: str | None = None, *, zoom: bool = False) -> Path:
  title = "Cross-entropy: training (lines), validation (dots)"
  return _curves(
    path, runs, "cross_entropy", title=title, ylabel="nats a token", legend=legend, dots="validation_loss", zoom=zoom
  )


def _l0(path: Path, runs: Runs, legend: str | None = None) -> Path:
  title = "Neurons that fire, mean over layers"
  return _curves(path, runs, "l0", title=title, ylabel=_NON_ZEROS, legend=legend, log=True)


def _dead(path: Path, runs: Runs, legend: str | None = None) -> Path:
  title = "Neurons that no token of a step switches on"
  return _curves(path, runs, "dead", title=title, ylabel="dead neurons (%)", legend=legend, scale=_PERCENT)


def _curves(
  path: Path,
  runs: Runs,
  metric: str,
  *,
  title: str,
  ylabel: str,
  legend: str | None,
  dots: str | None = None,
  log: bool = False,
  scale: float = 1.0,
  zoom: bool = False,
) -> Path:
  """A metric over training, a line a run, and another one as dots; zoomed, a second panel has the second half alone."""
  middle = max(run.last["step"] for run in runs.values()) / 2
  with _canvas(path, panels=1 + zoom) as panels:
    for axes, start in zip(panels, (0.0, middle)):
      for color, (name, run) in zip(_colors(len(runs), ordered=legend is not None), runs.items()):
        steps, values = _curve(run, metric, start)
        axes.plot(steps, [scale * value for value in values], label=name, color=color, alpha=0.8)
        if dots is not None:
          axes.plot(*_curve(run, dots, start), "o", color=color, markersize=4)
      axes.set(title=title if start == 0 else "the second half", xlabel="step", ylabel=ylabel)
      if log:
        _log_if_possible(axes)
    panels[-1].legend(title=legend, loc="upper left", bbox_to_anchor=(1, 1))  # beside the curves, which may be many
  return path


def _validation_l0_per_layer(path: Path, runs: Runs) -> Path:
  with _canvas(path) as (axes,):
    for name, run in runs.items():
      _by_layer(axes, run.last["validation_l0_per_layer"], label=name)
    axes.set(title="Neurons that fire, by layer", xlabel="layer", ylabel=_NON_ZEROS)
    _log_if_possible(axes)
    axes.legend()
  return path


def _sweep(path: Path, runs: Sequence[RunRecord]) -> Path:
  """Figure 3: what the coefficient does to the loss and to the neurons."""
  runs = sorted(runs, key=lambda run: run.config["sparsity"]["l1_coefficient"])
  with _canvas(path, panels=2) as panels:
    for axes, metric, ylabel in zip(
      panels, ("validation_loss", "validation_l0"), ("validation CE (nats a token)", f"validation: {_NON_ZEROS}")
    ):
      points = [(r.config["sparsity"]["l1_coefficient"], r.last[metric]) for r in runs if metric in r.last]
      axes.plot([x for x, _ in points], [y for _, y in points], "o-")
      _coefficient_axis(axes, [x for x, _ in points])
      axes.set(xlabel="L1 coefficient", ylabel=ylabel)
    _log_if_possible(panels[1])
  return path


def _coefficient_axis(axes, coefficients: list[float]) -> None:
  """Log, with 0 a step to the left of the smallest coefficient above it."""
  positive = [x for x in coefficients if x > 0]
  if positive:
    axes.set_xscale("symlog", linthresh=min(positive), linscale=0.5)
    axes.set_xlim(-0.2 * min(positive) if 0 in coefficients else min(positive) / 1.3, 1.3 * max(positive))
  ticks = sorted(set(coefficients))
  axes.set_xticks(ticks, [_short(x) for x in ticks], rotation=45, ha="right")
  axes.set_xticks([], minor=True)


def _l0_per_layer(path: Path, name: str, activity: dict[str, Any]) -> Path:
  """Figure 6: mean and maximum over tokens."""
  with _canvas(path) as (axes,):
    _by_layer(axes, activity["l0_max_per_layer"], label="token with the most")
    _by_layer(axes, activity["l0_per_layer"], label="mean over tokens")
    axes.set(
      title=f"{name}: neurons that fire, by layer (of {activity['ffn_width']}; {activity['tokens']:,} tokens)",
      xlabel="layer",
      ylabel=_NON_ZEROS,
    )
    _log_if_possible(axes)
    axes.legend()
  return path


def _l0_by_token(path: Path, name: str, activity: dict[str, Any]) -> Path:
  """Figure 7: the tokens with the fewest and the most non-zeros, and their number by position in the sequence."""
  with _canvas(path, panels=3) as (fewest, most, position):
    for axes, entries, title in ((fewest, activity["fewest"], "fewest"), (most, activity["most"], "most")):
      bars = axes.barh(range(len(entries)), [entry["l0"] for entry in entries])
      axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
      names = [_visible(entry["token"]) for entry in entries]
      axes.set_yticks(range(len(entries)), names, parse_math=False)  # a token may hold two $
      axes.invert_yaxis()
      axes.margins(x=0.2)
      axes.set(title=f"{name}: tokens with the {title}", xlabel=_NON_ZEROS)
    values = activity["l0_by_position"]
    position.plot(range(1, len(values) + 1), values, ".-" if len(values) < 100 else "-")
    position.set_xscale("log")
    position.xaxis.set_major_formatter("{x:g}")
    _log_if_possible(position)
    position.set(title=f"{name}: by position", xlabel="position in the sequence, from 1", ylabel=_NON_ZEROS)
  return path


def _visible(token: str, longest: int = 16) -> str:
  """A token with its spaces and line ends, cut where it is too long for an axis."""
  text = repr(token)[1:-1].replace(" ", "\N{OPEN BOX}")
  return text if len(text) <= longest else text[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _by_layer(axes, values: list[float], label: str) -> None:
  from matplotlib.ticker import MaxNLocator

  axes.plot(range(1, len(values) + 1), values, "o-", label=label)
  axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _log_if_possible(axes) -> None:
  """A log scale, unless it would hide a zero or has nothing to show."""
  from matplotlib.ticker import LogFormatter

  values = [float(y) for line in axes.lines for y in line.get_ydata() if math.isfinite(y)]
  if values and min(values) > 0:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")  # 100, not 10^2
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))  # none where there are decades enough


def _curve(run: RunRecord, name: str, start: float) -> tuple[list[int], list[float]]:
  points = [(entry["step"], entry[name]) for entry in run.metrics if name in entry and entry["step"] >= start]
  return [step for step, _ in points], [value for _, value in points]


def _colors(count: int, *, ordered: bool) -> list[Any]:
  """Of one family from dark to light where the runs have an order."""
  from matplotlib import colormaps

  if ordered:
    return [colormaps["viridis"](0.9 * n / max(count - 1, 1)) for n in range(count)]
  return [f"C{n}" for n in range(count)]


@contextlib.contextmanager
def _canvas(path: Path, panels: int = 1) -> Iterator[Sequence[Any]]:
  """Yields axes side by side, and saves them as a file."""
  try:
    import matplotlib
  except ImportError:
    raise UserError("plots need the package matplotlib: pip install -e '.[plots]'") from None
  matplotlib.use("Agg")  # no display
  from matplotlib import pyplot

  width = {1: 8, 2: 11, 3: 14}[panels]
  figure, axes = pyplot.subplots(1, panels, figsize=(width, 4.2), layout="constrained", squeeze=False)
  for each in axes[0]:
    each.grid(alpha=0.3)
    each.set_axisbelow(True)
  yield axes[0]
  figure.savefig(path, dpi=120)
  pyplot.close(figure)
