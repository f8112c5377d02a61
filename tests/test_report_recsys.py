"""Recommenders side by side: seeds of one model, intervals, floors, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
from program import answers

from configs.recsys.next_item import beside
from sparse_lm import config_io, recsys_report, report
from sparse_lm.errors import UserError
from sparse_lm.flags import load_config
from sparse_lm.recsys_config import InteractionsConfig, RecsysConfig
from sparse_lm.report import RunRecord
from sparse_lm.training.recommender import train

METRICS = {
  "test_ne": 0.9,
  "test_auc": 0.7,
  "test_gauc": 0.6,
  "test_calibration": 1.0,
  "test_mean_predicted": [0.4, 0.6],
  "test_mean_observed": [0.3, 0.7],
}


def run_of(kind, seed=0, step=10, **last):
  config = config_io.overlay(RecsysConfig(), {"model.kind": kind, "seed": seed, "training.steps": 10})
  entry = {"step": step, "validation_loss": 0.5} | METRICS | last
  return RunRecord(config=config_io.to_dict(config), env={}, metrics=[entry], evaluations={})


def test_an_interval_is_that_of_student_s_t():
  """Of 1, 2, 3: mean 2, standard deviation 1, t(2) = 4.303."""
  assert recsys_report.interval([1.0, 2.0, 3.0]) == f"2.0000 ± {4.303 / 3**0.5:.4f}"
  assert recsys_report.interval([0.25]) == "0.2500"
  assert recsys_report.interval([0.25, 0.25]) == "0.2500 ± 0.0000"
  with pytest.raises(UserError, match="11 seeds are given; at most 10"):
    recsys_report.interval([1.0] * 11)


def test_runs_that_differ_in_the_seed_alone_are_one_model_and_models_have_an_order():
  runs = {"a": run_of("gem", 0), "b": run_of("dlrm"), "c": run_of("gem", 1, test_auc=0.8)}
  groups = recsys_report.by_model(runs)
  assert list(groups) == ["dlrm", "gem"]
  floors = {"floor": {"ne": 0.95, "auc": 0.65, "gauc": 0.5, "calibration": 1.1}}
  lines = recsys_report.markdown_table(groups, floors).splitlines()
  assert lines[2] == "| floor | - | - | 0.9500 | 0.6500 | 0.5000 | 1.1000 |"
  assert lines[3] == "| dlrm | 1 | 10 | 0.9000 | 0.7000 | 0.6000 | 1.0000 |"
  assert lines[4].startswith("| gem | 2 | 10 | 0.9000 ± 0.0000 | 0.7500 ± 0.6353 |")


@pytest.mark.parametrize(
  "other", [run_of("gem", 1, step=5), dataclasses.replace(run_of("gem", 1), metrics=[{"step": 10}])]
)
def test_unfinished_runs_and_runs_without_a_test_are_refused(other):
  said = r"run 'b' is at step \d+ of 10 or has no test; finish it first, or restore its metrics.jsonl if that has lost"
  with pytest.raises(UserError, match=said):
    recsys_report.by_model({"a": run_of("gem"), "b": other})


def test_models_of_a_kind_are_named_by_the_fields_in_which_they_differ():
  other, third = run_of("gem", 1), run_of("gem", 2)
  other.config["tables"]["learning_rate"] = 0.5
  third.config["tables"]["learning_rate"] = 0.5
  groups = recsys_report.by_model({"a": run_of("gem"), "b": other, "c": third, "d": run_of("dlrm")})
  assert list(groups) == ["dlrm", "gem, tables.learning_rate=0.05", "gem, tables.learning_rate=0.5"]
  assert [len(group) for group in groups.values()] == [1, 1, 2]


@pytest.mark.parametrize(
  ("metric", "lost"),
  [
    ("test_ne", float("nan")),
    ("test_ne", None),
    ("test_calibration", float("inf")),
    ("test_auc", "0.9"),
    ("test_gauc", None),
    ("test_mean_predicted", None),
    ("test_mean_observed", 0.5),
  ],
)
def test_a_run_that_has_lost_a_metric_is_named(metric, lost):
  said = rf"^run 'a': {metric} of the last step in its metrics.jsonl is {lost!r}, which is no .*, or run it again"
  with pytest.raises(UserError, match=said):
    recsys_report.by_model({"a": run_of("gem", **{metric: lost})})


def test_students_of_one_config_file_are_named_by_their_distillation():
  students = {role: load_config(f"configs/recsys/distill.py:{role}", RecsysConfig) for role in ("alone", "adapter")}
  runs = {
    role: dataclasses.replace(run_of("dlrm", step=config.training.steps), config=config_io.to_dict(config))
    for role, config in students.items()
  }
  assert list(recsys_report.by_model(runs)) == [
    "dlrm, distillation.adapter=False, distillation.teacher=None",
    "dlrm, distillation.adapter=True, distillation.teacher=runs/distill/teacher",
  ]


def test_a_field_that_older_runs_did_not_have_is_absent_in_their_name():
  older = run_of("gem")
  del older.config["model"]["comp_skip"]
  names = list(recsys_report.by_model({"older": older, "newer": run_of("gem")}))
  assert names == ["gem, model.comp_skip=(absent)", "gem, model.comp_skip=False"]


def test_a_floor_may_have_no_auc_within_users(tmp_path):
  found = {"floor": {"ne": 0.95, "auc": 0.65, "gauc": float("nan"), "calibration": 1.1}}
  recsys_report.write_floors(found, tmp_path)
  text = (tmp_path / "floors.json").read_text()
  json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
  table = recsys_report.markdown_table({}, recsys_report.read_floors(tmp_path))
  assert table.splitlines()[-1] == "| floor | - | - | 0.9500 | 0.6500 | - | 1.1000 |"


def test_auc_within_users_may_be_of_no_user():
  groups = recsys_report.by_model({"a": run_of("gem", test_gauc=float("nan"))})
  assert recsys_report.markdown_table(groups, {}).splitlines()[-1] == "| gem | 1 | 10 | 0.9000 | 0.7000 | - | 1.0000 |"


def test_rankings_stand_under_that_by_popularity():
  last = {"test_popularity_hr@10": 0.1, "test_popularity_ndcg@10": 0.05, "test_hr@10": 0.2, "test_ndcg@10": 0.125}
  lines = recsys_report.ranking_table({"hstu": run_of("gem", **last)}).splitlines()
  assert lines[2:] == ["| popularity | - | 0.1000 | 0.0500 |", "| hstu | 10 | 0.2000 | 0.1250 |"]


def test_the_demo_ranks_items_of_a_log_that_has_an_order():
  found = beside(config_io.overlay(RecsysConfig(), {"data.cache_dir": "somewhere", "seed": 3}), 300)
  for kind in ("sasrec", "hstu"):
    config = found.pop(kind)
    config.validate()
    assert (config.model.kind, config.data.cache_dir, config.training.steps, config.seed) == (kind, "somewhere", 300, 3)
  assert found == {}
  assert beside(RecsysConfig(data=InteractionsConfig(source="synthetic")), 300) == {}


@pytest.mark.slow
def test_a_folder_of_runs_becomes_a_table_with_floors_and_plots(tmp_path):
  changes = {
    "model.kind": "dlrm",
    "data.synthetic_users": 40,
    "data.synthetic_items": 30,
    "training.steps": 4,
    "training.warmup_steps": 1,
  }
  config = config_io.overlay(RecsysConfig(data=InteractionsConfig(source="synthetic")), changes)
  for seed in range(2):
    train(config_io.overlay(config, {"seed": seed, "training.eval_every": 2}), tmp_path / f"dlrm_{seed}")
  ((code, out, err),) = answers("experiments.report_recsys", [f"--workdir={tmp_path}"])
  assert (code, err) == (0, "")
  text = (tmp_path / "report.md").read_text()
  assert text.splitlines()[4] in out
  assert [line.split(" | ")[0] for line in text.splitlines()[2:5]] == [
    "| user + item biases",
    "| running user mean + item bias",
    "| dlrm",
  ]
  assert (tmp_path / "learning.png").exists()
  floors = recsys_report.read_floors(tmp_path)
  assert all(np.isfinite(list(found.values())).all() for found in floors.values())
  assert len(report.read_runs(tmp_path)) == 2
