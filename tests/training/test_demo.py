"""`python -m experiments.demo`, small: its table, its plots, and that a second call goes on."""

import json
import subprocess
import sys
from pathlib import Path

import program
import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def demo(tmp_path, corpus):
  """Runs the demo on a model that trains in a second."""

  def run(*flags):
    small = {"vocab_size": 300, "context_length": 16, "num_layers": 2, "model_width": 32, "ffn_width": 64}
    command = [sys.executable, "-m", "experiments.demo", f"--workdir={tmp_path / 'demo'}"]
    command += [f"--config.model.{name}={size}" for name, size in small.items()]
    command += ["--config.data.source=text", f"--config.data.path={corpus}/*.txt"]
    command += [f"--config.data.cache_dir={corpus / 'cache'}", "--config.training.steps=30", *flags]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

  return run


@pytest.mark.slow
def test_the_demo_reports_four_models_with_plots_and_does_not_train_twice(demo, tmp_path):
  first = demo()
  assert first.returncode == 0, first.stderr
  report = (tmp_path / "demo" / "report.md").read_text()
  assert report in first.stdout
  rows = [line for line in report.splitlines() if line.startswith("| ")]
  assert [row.split(" | ")[0] for row in rows[2:]] == ["| dense", "| sparse", "| sparser", "| no FFN"]
  coefficients = [json.loads(path.read_text())["sparsity"]["l1_coefficient"] for path in configs(tmp_path)]
  assert coefficients == [0.0, 0.0, 1e-3, 1e-3]
  plots = sorted(path.name for path in (tmp_path / "demo").glob("*.png"))
  assert plots == ["l0.png", "l0_per_layer.png", "loss.png"]
  assert all(f"]({name})" in report for name in plots)

  second = demo()
  assert second.stdout.count("is finished: 30 of 30 steps are done") == 4
  assert (tmp_path / "demo" / "report.md").read_text() == report


def configs(folder):
  return [folder / "demo" / name / "config.json" for name in ("dense", "no_FFN", "sparse", "sparser")]


@pytest.mark.parametrize(
  ("flag", "said"),
  [
    ("--config.data.validation_fraction=0", "data.validation_fraction=0 leaves nothing to compare the models on"),
    ("--config.model.ffn_kind=gated_silu", "model.ffn_kind='gated_silu' has no neurons that ReLU can switch off"),
  ],
)
def test_what_would_end_the_demo_after_minutes_is_refused_at_its_start(flag, said, demo, tmp_path):
  result = demo(flag)
  assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
  assert said in result.stderr
  assert not (tmp_path / "demo").exists()


@pytest.mark.slow
def test_the_loop_benchmark_writes_a_record_and_its_table(tmp_path):
  command = [sys.executable, "-m", "experiments.bench_lm", "--what=loop", "--steps=40", "--repeats=1"]
  result = subprocess.run(
    [*command, f"--record={tmp_path / 'record'}"], cwd=REPOSITORY, capture_output=True, text=True, check=False
  )
  assert result.returncode == 0, result.stderr
  assert (tmp_path / "record" / "table.md").read_text() in result.stdout
  cases = [json.loads(line) for line in (tmp_path / "record" / "metrics.jsonl").read_text().splitlines()]
  assert [case["what"] for case in cases] == ["step", "first step", "first step"]


def benchmark_of_kernels(*arguments):
  """bench_lm as on a GPU, in a process of its own; the kernels' places are taken by plain jnp."""
  program = "import types; from experiments import bench_lm; from sparse_lm import flags;"
  program += "bench_lm.device = types.SimpleNamespace(missing_hopper=lambda: None); flags.run(bench_lm.main)"
  result = subprocess.run(
    [sys.executable, "-c", program, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
  )
  assert result.returncode == 0, result.stderr
  return result.stdout


@pytest.mark.slow
def test_the_sparse_benchmark_compares_both_blocks_on_the_same_weights(tmp_path):
  record = tmp_path / "record"
  small = ["--models=tiny", "--non_zeros=5,40.5", "--forward_batch=4", "--calls=1", "--repeats=1"]
  out = benchmark_of_kernels("--what=sparse", *small, f"--record={record}")
  assert (record / "table.md").read_text() in out
  cases = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
  asked = [(case["ffn"], case["non_zeros"]) for case in cases]
  assert asked == [("dense", 5), ("twell", 5), ("dense", 40.5), ("twell", 40.5)]
  for case in cases:
    assert case["l0"] == pytest.approx(case["non_zeros"], rel=0.05)
    assert case["relative_error"] is None if case["ffn"] == "dense" else case["relative_error"] < 1e-5


@pytest.mark.slow
def test_the_training_benchmark_compares_both_steps_from_the_same_weights(tmp_path):
  record = tmp_path / "record"
  small = ["--models=tiny", "--non_zeros=5", "--train_batch=2,4", "--calls=1", "--repeats=1", "--remat=dots,full"]
  out = benchmark_of_kernels("--what=training", *small, f"--record={record}")
  assert (record / "table.md").read_text() in out
  cases = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
  assert [(case["remat"], case["sequences"], case["ffn"]) for case in cases] == [
    (remat, size, ffn) for remat in ("dots", "full") for size in (2, 4) for ffn in ("dense", "twell")
  ]
  for case in cases:
    assert case["l0"] == pytest.approx(5, rel=0.2)
    assert case["temporary_bytes"] > 0
    assert case["relative_error"] is None if case["ffn"] == "dense" else case["relative_error"] < 1e-2


def test_the_benchmark_refuses_wrong_flags_in_one_line(tmp_path):
  record = f"--record={tmp_path / 'record'}"
  nothing, steps, batch, zeros, word = program.refusals(
    "experiments.bench_lm",
    [],
    ["--what=loop", "--steps=0", record],
    ["--what=dense", "--train_batch=8,x", record],
    ["--what=sparse", "--non_zeros=29,0", record],
    ["loop", record],
  )
  assert "--what=dense|sparse|training|loop and --record=FOLDER are needed" in nothing
  assert "steps" in steps
  assert "--train_batch='x' must be positive integers" in batch
  assert "--non_zeros='0' must be positive numbers" in zeros
  assert "'loop' is not a flag" in word
  assert not (tmp_path / "record").exists()
