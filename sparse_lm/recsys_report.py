"""Runs of recommenders side by side, several seeds a model: a table, and what it is compared with."""

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pallas_kernels import bench
from sparse_lm import config_io, report
from sparse_lm.data.recsys import Parts
from sparse_lm.errors import UserError
from sparse_lm.evaluation.biases import bias_logits
from sparse_lm.evaluation.prediction import PredictionSums, grouped_auc
from sparse_lm.recsys_config import MODEL_KINDS
from sparse_lm.report import RunRecord
from sparse_lm.training import recorder

Json = dict[str, Any]
_FLOORS = "floors.json"
# Two-sided 95 % of Student's t for the mean of n values, n = 2, 3, ...
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_METRICS = {"ne": "NE", "auc": "AUC", "gauc": "AUC within users", "calibration": "calibration"}
_RANKING = {"hr@10": "HR@10", "ndcg@10": "NDCG@10"}


def floors(parts: Parts) -> dict[str, Json]:
  """What sums of means get on the test part, by name of the floor: NE, AUC, gAUC and calibration."""
  test = parts.test
  events_N = test.events_N
  labels_N, user_N = test.labels[events_N], test.log.user_N[events_N]
  found = {}
  for name, running in (("user + item biases", False), ("running user mean + item bias", True)):
    logits_N = bias_logits(test.log, parts.train.events_N, running=running)[events_N]
    found[name] = scores(logits_N, labels_N, user_N)
  return found


def scores(logits_N: np.ndarray, labels_N: np.ndarray, user_N: np.ndarray) -> Json:
  """NE, AUC, gAUC and calibration of predictions."""
  sums = PredictionSums.of(logits_N, labels_N)
  within = grouped_auc(logits_N, labels_N, user_N)
  return {"ne": sums.ne, "auc": sums.auc, "gauc": within.value, "calibration": sums.calibration}


def write_floors(found: Mapping[str, Json], folder: Path) -> None:
  """Beside the runs, for `read_floors`."""
  recorder.write_json(folder / _FLOORS, recorder.finite_json(found))


def read_floors(folder: Path) -> dict[str, Json]:
  """Those that were written beside the runs."""
  return report.with_numbers(recorder.read_json(folder / _FLOORS))


def by_model(runs: Mapping[str, RunRecord]) -> dict[str, list[RunRecord]]:
  """Runs of one model, that is, those whose configs differ in the seed alone; kinds in the order of MODEL_KINDS.

  A model has the name of its kind; several of one kind say in which fields they differ.

  Raises:
    UserError: a run is unfinished, was not tested, or has lost what its test found.
  """
  groups: list[list[RunRecord]] = []
  for name, run in runs.items():
    if not run.finished or "test_ne" not in run.last:
      raise UserError(
        f"run {name!r} is at step {run.last['step']} of {run.steps} or has no test; finish it first, or restore its"
        " metrics.jsonl if that has lost its last line"
      )
    _require_scores(name, run.last)
    same = next((group for group in groups if _but_seed(group[0]) == _but_seed(run)), None)
    if same is None:
      groups.append([run])
    else:
      same.append(run)
  named: dict[str, list[RunRecord]] = {}
  for kind in MODEL_KINDS:
    of_kind = [group for group in groups if group[0].config["model"]["kind"] == kind]
    named |= dict(zip(_names(kind, [group[0] for group in of_kind]), of_kind))
  return named


def _require_scores(name: str, last: Json) -> None:
  """Raises UserError if a run's last step lacks what the table and the plots show."""
  for metric in (f"test_{metric}" for metric in _METRICS):
    value = last.get(metric)
    is_number = isinstance(value, int | float) and (math.isfinite(value) or metric == "test_gauc")  # NaN: of no user
    if not is_number:
      raise UserError(
        f"run {name!r}: {metric} of the last step in its metrics.jsonl is {value!r}, which is no number; restore the"
        " file if it is damaged, or run it again, judged by more events"
      )
  for metric in ("test_mean_predicted", "test_mean_observed"):
    if not isinstance(last.get(metric), list):
      raise UserError(
        f"run {name!r}: {metric} of the last step in its metrics.jsonl is {last.get(metric)!r}, which is no list;"
        " restore the file, or run it again"
      )


def _but_seed(run: RunRecord) -> Json:
  return run.config | {"seed": None}


def _names(kind: str, runs: Sequence[RunRecord]) -> list[str]:
  """The kind alone if there is one run of it at most, else with the fields in which they differ."""
  if len(runs) < 2:
    return [kind for _ in runs]
  first = _but_seed(runs[0])
  fields = sorted({name for run in runs for name, _, _ in config_io.differences(first, _but_seed(run))})
  inside = lambda section, name: section.get(name, config_io.ABSENT) if isinstance(section, dict) else section
  value = lambda run, field: functools.reduce(inside, field.split("."), run.config)
  return [f"{kind}, " + ", ".join(f"{field}={value(run, field)}" for field in fields) for run in runs]


def markdown_table(models: Mapping[str, Sequence[RunRecord]], floors: Mapping[str, Json]) -> str:
  """Test metrics, a row a floor and a row a model: mean and 95 % interval over its seeds."""
  header = ["model", "seeds", "steps", *_METRICS.values()]
  rows = [[name, "-", "-", *(interval([found[metric]]) for metric in _METRICS)] for name, found in floors.items()]
  for kind, runs in models.items():
    values = ([run.last[f"test_{metric}"] for run in runs] for metric in _METRICS)
    rows.append([kind, str(len(runs)), str(runs[0].steps), *map(interval, values)])
  return bench.markdown_table(header, rows)


def ranking_table(runs: Mapping[str, RunRecord]) -> str:
  """Hit rates and NDCG of the test items, a row a run, under the ranking by popularity."""
  header = ["model", "steps", *_RANKING.values()]
  last = next(iter(runs.values())).last
  rows = [["popularity", "-", *(f"{last[f'test_popularity_{metric}']:.4f}" for metric in _RANKING)]]
  for name, run in runs.items():
    rows.append([name, str(run.steps), *(f"{run.last[f'test_{metric}']:.4f}" for metric in _RANKING)])
  return bench.markdown_table(header, rows)


def interval(values: Sequence[float]) -> str:
  """`mean ± half the 95 % interval of the mean`, by Student's t; of one value, that; `-` where one is no number."""
  if not all(map(math.isfinite, values)):
    return "-"
  mean = f"{statistics.fmean(values):.4f}"
  if len(values) == 1:
    return mean
  if len(values) > len(_T_95) + 1:
    raise UserError(f"{len(values)} seeds are given; at most {len(_T_95) + 1} have an interval here")
  half = _T_95[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5
  return f"{mean} ± {half:.4f}"
