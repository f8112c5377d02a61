"""Sweeps: what is refused before anything runs, what happens while they run, and the sweeps of the paper."""

import ast
import itertools
import json
import os
import pathlib
import random
import re
import shlex
import signal
import subprocess
import sys
import textwrap

import pytest
from absl import flags

from sparse_lm import config_io, sweeps
from sparse_lm.config import LmConfig
from sparse_lm.errors import UserError
from sparse_lm.flags import load_config, load_sweep, parse_config
from sparse_lm.recsys_config import MODEL_KINDS, InteractionsConfig, RecommenderConfig, RecsysConfig

ROOT = pathlib.Path(__file__).parent.parent
TINY = "configs/lm/tiny.py"
# What the paper's sweeps share, and sweeps that are not the paper's.
OTHERS = ("shrink", "twell_wide", "twell_small", "movielens_time", "movielens_users")
NAMES = sorted(path.stem for path in (ROOT / "configs" / "sweeps").glob("*.py") if path.stem not in OTHERS)
BIG = [name for name in NAMES if not name.endswith("_tiny")]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.syspath_prepend(ROOT)  # where `python -m experiments...` finds `configs`


# What is refused, and what an overlay becomes.


@pytest.mark.parametrize(
  ("sweep", "said"),
  [
    ({}, r"^the sweep has no runs; get_sweep\(\) must return overlays by name of the run$"),
    (
      {"a": {}, "b": {"model.num_layer": 2}},
      r"^run 'b': model\.num_layer is unknown; did you mean model\.num_layers\?",
    ),
    ({"a": {"model.num_layers": "2"}}, r"^run 'a': model\.num_layers='2' must be a whole number$"),
    ({"a": {"model.num_layers": 2.5}}, r"^run 'a': model\.num_layers=2\.5 must be a whole number$"),
    ({"a": {"training.steps": True}}, r"^run 'a': training\.steps=True must be a whole number$"),
    ({"a": {"data.source": None}}, r"^run 'a': data\.source=None must be text$"),
    (
      {"a": {}, "b": {"model.num_heads": 3}},
      r"^run 'b': model\.model_width=128 is not divisible by model\.num_heads=3",
    ),
    ({"a": {"training.steps": 20}}, r"^run 'a': training\.warmup_steps=30 must be less than training\.steps=20"),
    ({"a": {"seed": 1}}, r"^run 'a': the sweep sets seed=1; leave out --config\.seed$"),
    ({"a": 3}, r"^run 'a': 3 must be a dict of values by dotted name, such as 'model\.num_layers'$"),
    ({"a": ["seed"]}, r"^run 'a': \['seed'\] must be a dict"),
    ({"a": {1: 2}}, r"^run 'a': \{1: 2\} must be a dict"),
    (
      {1: {}},
      r"^run 1: its name becomes that of its folder; use letters, digits, '_', '-' and, not as the first, '\.'$",
    ),
    ({"": {}}, r"^run '': its name"),
    ({"a b": {}}, r"^run 'a b': its name"),
    ({"a/b": {}}, r"^run 'a/b': its name"),
    ({"a\n": {}}, r"^run 'a\\n': its name"),
    ({"..": {}}, r"^run '\.\.': its name"),
    ({".hidden": {}}, r"^run '\.hidden': its name"),
    ({"größe": {}}, r"^run 'größe': its name"),
    ({"Dense": {}, "dense": {}}, r"^run 'dense': another name differs in case alone"),
  ],
)
def test_a_wrong_sweep_is_refused_and_the_run_named(sweep, said):
  with pytest.raises(UserError, match=said) as caught:
    sweeps.configs(LmConfig(), sweep, given=["seed"])
  assert "\n" not in str(caught.value)


def test_each_run_gets_its_overlay_on_the_base_and_nothing_of_another_run():
  base = LmConfig(seed=5)
  configs = sweeps.configs(base, {"a-1.5_B": {"model.num_layers": 2, "sparsity.l1_coefficient": 1}, "b": {}})
  assert list(configs) == ["a-1.5_B", "b"]
  different = config_io.differences(config_io.to_dict(base), config_io.to_dict(configs["a-1.5_B"]))
  assert different == [("model.num_layers", 4, 2), ("sparsity.l1_coefficient", 0.0, 1.0)]
  assert configs["b"] == base == LmConfig(seed=5)


# When a run counts as finished.


@pytest.fixture
def finished(tmp_path):
  """The folder of a run that was trained to its last step, and its config."""
  config = LmConfig()
  folder = tmp_path / "run"
  (folder / "checkpoints" / "300").mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(config_io.to_dict(config)))
  (folder / "metrics.jsonl").write_text('{"step": 290, "loss": 1.0}\n{"step": 300, "loss": 1.0}\n')
  return folder, config


def test_a_run_is_finished_with_its_config_its_last_metrics_and_its_last_checkpoint(finished):
  assert sweeps.is_finished(*finished)


@pytest.mark.parametrize(
  ("file", "text"),
  [
    ("metrics.jsonl", '{"step": 290, "loss": 1.0}\n'),
    ("metrics.jsonl", '{"step": 300, "loss": 1.0}\n{"step": 3'),
    ("metrics.jsonl", '{"step": 300}\n[300]\n'),
    ("metrics.jsonl", "300\n"),
    ("metrics.jsonl", '{"loss": 1.0}\n'),
    ("metrics.jsonl", ""),
    ("config.json", "{"),
    ("config.json", "{}"),
    ("config.json", json.dumps(config_io.to_dict(LmConfig(seed=1)))),
    ("metrics.jsonl", None),
    ("config.json", None),
    ("checkpoints/300", None),
  ],
)
def test_a_run_is_not_finished_where_a_piece_is_damaged_missing_or_of_another_run(file, text, finished):
  folder, config = finished
  if text is not None:
    (folder / file).write_text(text)
  elif (folder / file).is_dir():
    (folder / file).rename(folder / "checkpoints" / "300.orbax-checkpoint-tmp-1")
  else:
    (folder / file).unlink()
  assert not sweeps.is_finished(folder, config)


def test_a_folder_that_does_not_exist_holds_no_finished_run(tmp_path):
  assert not sweeps.is_finished(tmp_path / "missing", LmConfig())


# What happens while the runs run; small programs stand for training.


@pytest.fixture
def programs(tmp_path):
  """Returns a function that makes runs of programs, by name; each writes its folder into `started` first."""

  def make(**bodies):
    runs = []
    for n, (name, body) in enumerate(bodies.items(), start=1):
      start = f"import os, signal, sys, time; open({str(tmp_path / 'started')!r}, 'a').write('{name} ')\n"
      command = [sys.executable, "-c", start + textwrap.dedent(body)]
      runs.append(sweeps.Run(f"{n} of {len(bodies)}: {name}", LmConfig(), tmp_path / name, command))
    return runs

  return make


def code_and_error(runs):
  with pytest.raises(sweeps.SweepError) as caught:
    sweeps.run_in_turn(runs)
  return caught.value.exit_code, str(caught.value)


def started(tmp_path):
  return (tmp_path / "started").read_text().split()


def test_after_a_failing_run_the_others_run_and_the_end_names_it(programs, tmp_path, capfd):
  runs = programs(a="", b="sys.exit(3)", c="os.kill(os.getpid(), signal.SIGKILL)", d="print('hello')")
  assert code_and_error(runs) == (1, "2 of 4 runs failed: b, c; the same command tries them again")
  assert started(tmp_path) == ["a", "b", "c", "d"]
  assert capfd.readouterr().out.splitlines() == [
    *("== 1 of 4: a ==", "== 2 of 4: b ==", "== 3 of 4: c ==", "== 4 of 4: d ==", "hello"),
    f"done     {tmp_path}/a",
    f"failed (exit code 3) {tmp_path}/b",
    f"failed (ended by signal 9, Killed) {tmp_path}/c",
    f"done     {tmp_path}/d",
  ]


def test_a_finished_run_is_skipped_and_said(programs, finished, tmp_path, capfd):
  sweeps.run_in_turn(programs(run="sys.exit(3)", other=""))
  assert started(tmp_path) == ["other"]
  out, err = capfd.readouterr()
  assert "== 1 of 2: run == is finished, skipped\n== 2 of 2: other ==\n" in out
  assert f"skipped  {tmp_path}/run\ndone     {tmp_path}/other\n" in out
  assert err == ""


@pytest.mark.parametrize(
  ("end", "code"),
  [
    ("sys.exit(75)", 75),
    ("sys.exit(130)", 130),
    ("os.kill(os.getpid(), signal.SIGTERM)", 75),
    ("signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)", 130),
  ],
)
def test_a_run_that_was_stopped_stops_the_sweep(end, code, programs, tmp_path, capfd):
  said = "the sweep was stopped; 1 of 3 runs failed: a; the same command goes on"
  assert code_and_error(programs(a="sys.exit(3)", b=end, c="")) == (code, said)
  assert started(tmp_path) == ["a", "b"]
  out = capfd.readouterr().out
  assert out.endswith(f"failed (exit code 3) {tmp_path}/a\nstopped  {tmp_path}/b\nnot run  {tmp_path}/c\n")


# As training does: it saves when it is asked to stop, and ends at once if the same signal comes again.
SAVES = """
  asked = []
  def ask(number, frame):
    asked.append(number)
    signal.signal(number, signal.SIG_DFL)
  signal.signal(signal.SIGTERM, ask), signal.signal(signal.SIGINT, ask)
  {signals}
  while not asked: time.sleep(0.01)
  time.sleep(0.5)
  open({saved!r}, "w")
  sys.exit({code})
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
@pytest.mark.parametrize("everyone", [False, True], ids=["to_the_sweep", "to_the_run_as_well"])
def test_a_signal_stops_the_sweep_after_its_run_has_saved(name, code, everyone, programs, tmp_path):
  signals = f"os.kill(os.getppid(), signal.{name})" + f"; os.kill(os.getpid(), signal.{name})" * everyone
  body = SAVES.format(signals=signals, saved=str(tmp_path / "saved"), code=75)
  assert code_and_error(programs(a=body, b="")) == (code, "the sweep was stopped; the same command goes on")
  assert (tmp_path / "saved").exists()
  assert started(tmp_path) == ["a"]


def test_a_failure_to_save_is_not_hidden_by_the_signal_that_asked_for_it(programs, tmp_path, capfd):
  signals = "os.kill(os.getppid(), signal.SIGTERM)"
  body = SAVES.format(signals=signals, saved=str(tmp_path / "saved"), code=4)
  assert code_and_error(programs(a=body))[0] == 75
  assert f"failed (exit code 4) {tmp_path}/a\n" in capfd.readouterr().out


def test_handlers_of_signals_are_as_before(programs):
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  sweeps.run_in_turn(programs(a=""))
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# The program.


def sweep(*arguments, cwd=ROOT):
  command = [sys.executable, "-m", "experiments.sweep", *map(str, arguments)]
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)
  assert "Traceback" not in result.stderr
  return result


def sweep_file(tmp_path, value):
  path = tmp_path / "a sweep.py"
  path.write_text(f"def get_sweep():\n  return {value}\n")
  return f"--sweep={path}"


def config_of(command):
  """Returns the config that a printed command trains, and the other arguments."""
  python, *module = shlex.split(command)[:3]
  assert (python, module) == (sys.executable, ["-m", "experiments.train_lm"])
  values = flags.FlagValues()
  flags.DEFINE_string("workdir", None, "", values)
  return parse_config(shlex.split(command)[2:], LmConfig, None, values), values.workdir


def test_a_dry_run_prints_a_command_a_run_that_trains_the_base_the_command_line_and_the_overlay(tmp_path):
  text = (
    """{"a": {"model.num_kv_heads": None, "sparsity.l1_coefficient": 1}, "b": {"data.cache_dir": "it's & $HOME"}}"""
  )
  workdir = tmp_path / "runs of mine"
  common = (f"--config={TINY}", "--config.seed=7", "--noconfig.model.tie_embeddings", sweep_file(tmp_path, text))
  result = sweep(*common, f"--workdir={workdir}", "--dry_run")
  assert (result.returncode, result.stderr) == (0, "")
  base = config_io.overlay(load_config(TINY, LmConfig), {"seed": 7, "model.tie_embeddings": False})
  first, second = result.stdout.splitlines()
  assert config_of(first) == (config_io.overlay(base, {"sparsity.l1_coefficient": 1}), f"{workdir}/a")
  assert config_of(second) == (config_io.overlay(base, {"data.cache_dir": "it's & $HOME"}), f"{workdir}/b")
  assert "--config.model.num_kv_heads=None" in first
  assert not workdir.exists()
  only = sweep(*common, f"--workdir={workdir}", "--dry_run", "--index=1")
  assert (only.returncode, only.stdout.splitlines()) == (0, [second])


@pytest.mark.parametrize(
  ("text", "arguments", "said"),
  [
    ("{'a': {}, 'b': {}}", ["--index=2"], r"--index=2: .*sweep\.py has 2 runs; give 0 to 1"),
    ("{'a': {}, 'b': {}}", ["--index=-1"], r"--index=-1: .*sweep\.py has 2 runs; give 0 to 1"),
    (
      "{'a': {'seed': 1}}",
      ["--config.seed=0"],
      r"--sweep=.*: run 'a': the sweep sets seed=1; leave out --config\.seed",
    ),
    ("{'a': {'data.tokenizer': 'none'}}", [], r"data\.tokenizer='none' cannot be given on a command line; .*"),
  ],
)
def test_what_the_program_refuses_before_anything_runs(text, arguments, said, tmp_path):
  result = sweep(f"--config={TINY}", sweep_file(tmp_path, text), f"--workdir={tmp_path / 'runs'}", *arguments)
  assert (result.returncode, result.stdout) == (2, "")
  assert re.fullmatch(f"error: {said}\n", result.stderr)
  assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("missing", ["--sweep", "--workdir"])
def test_a_missing_flag_is_named(missing, tmp_path):
  given = {"--sweep": sweep_file(tmp_path, {"a": {}}), "--workdir": f"--workdir={tmp_path}"}
  del given[missing]
  result = sweep(f"--config={TINY}", *given.values())
  assert result.returncode == 2
  assert result.stderr.startswith(f"error: {missing} is missing; name a ")


def test_checking_a_sweep_does_not_load_jax():
  program = "import sys, experiments.sweep; print('jax' in sys.modules, 'flax' in sys.modules)"
  result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
  assert result.stdout == "False False\n"


@pytest.mark.parametrize(
  ("arguments", "trained", "code", "said"),
  [
    ([], "abcd", 1, "error: 1 of 4 runs failed: b; the same command tries them again\n"),
    (["--index=0"], "a", 0, ""),
    (["--index=1"], "b", 1, "error: 1 of 1 runs failed: b; the same command tries them again\n"),
    (["--config.training.steps=31"], "ab", 75, "error: the sweep was stopped; the same command goes on\n"),
  ],
)
def test_the_program_leaves_with_one_line_and_the_code_of_what_happened(arguments, trained, code, said, tmp_path):
  """In a folder where another program has the name of the training."""
  (tmp_path / "experiments").mkdir()
  (tmp_path / "experiments" / "__init__.py").touch()
  (tmp_path / "experiments" / "sweep.py").symlink_to(ROOT / "experiments" / "sweep.py")
  (tmp_path / "experiments" / "train_lm.py").write_text(
    "import sys\nprint('trained', sys.argv[-1][-1], flush=True)\n"
    "sys.exit(0 if sys.argv[-1][-1] != 'b' else 75 if '--config.training.steps=31' in sys.argv else 3)\n"
  )
  text = {name: {"seed": seed} for seed, name in enumerate("abcd")}
  config = f"--config={ROOT / TINY}"
  result = sweep(config, sweep_file(tmp_path, text), f"--workdir={tmp_path / 'runs'}", *arguments, cwd=tmp_path)
  assert (result.returncode, result.stderr) == (code, said)
  assert "".join(re.findall("^trained (.)$", result.stdout, re.MULTILINE)) == trained
  assert re.findall("^== (.*) ==$", result.stdout, re.MULTILINE) == [
    f"{'abcd'.index(x) + 1} of 4: {x}" for x in trained
  ]


SMALL_RUNS = """
  from sparse_lm.config import DataConfig, LmConfig, ModelConfig, PrecisionConfig, TrainingConfig

  def get_config():
    return LmConfig(
      model=ModelConfig(vocab_size=300, context_length=16, num_layers=1, model_width=32, ffn_width=64),
      precision=PrecisionConfig(recipe="fp32"),
      data=DataConfig(source="text", path={corpus!r}, cache_dir={cache!r}),
      training=TrainingConfig(steps=4, batch_size=4, warmup_steps=1, log_every=2, eval_batches=1),
    )
"""


@pytest.mark.slow
def test_real_training_goes_on_after_a_failure_and_is_not_repeated(tmp_path):
  corpus, workdir = tmp_path / "corpus", tmp_path / "runs"
  corpus.mkdir()
  rng = random.Random(0)
  for n in range(30):
    (corpus / f"{n}.txt").write_text(" ".join("".join(rng.choices("abcdef", k=3)) for _ in range(80)))
  config = tmp_path / "config.py"
  config.write_text(textwrap.dedent(SMALL_RUNS.format(corpus=str(corpus), cache=str(tmp_path / "cache"))))
  text = {"blocked": {"sparsity.l1_coefficient": 1e-3}, "dense": {"sparsity.l1_coefficient": 0.0}}
  arguments = (f"--config={config}", sweep_file(tmp_path, text), f"--workdir={workdir}", "--config.seed=3")
  workdir.mkdir()
  (workdir / "blocked").touch()  # a file where the run wants its folder

  result = sweep(*arguments)
  assert result.returncode == 1
  assert "== 1 of 2: blocked ==\n== 2 of 2: dense ==\n" in result.stdout
  assert "step 4/4" in result.stdout
  assert result.stdout.endswith(f"failed (exit code 2) {workdir}/blocked\ndone     {workdir}/dense\n")
  assert result.stderr.endswith("error: 1 of 2 runs failed: blocked; the same command tries them again\n")
  assert result.stderr.startswith(f"error: work folder {workdir}/blocked cannot be used")

  trained = json.loads((workdir / "dense" / "config.json").read_text())
  assert (trained["seed"], trained["sparsity"]["l1_coefficient"]) == (3, 0.0)

  metrics = (workdir / "dense" / "metrics.jsonl").read_bytes()
  result = sweep(*arguments, "--index=1")
  assert (result.returncode, result.stderr) == (0, "")
  assert result.stdout == f"== 2 of 2: dense == is finished, skipped\nskipped  {workdir}/dense\n"
  assert (workdir / "dense" / "metrics.jsonl").read_bytes() == metrics


# The sweeps of the paper.


def docstring(name):
  return ast.get_docstring(ast.parse((ROOT / "configs" / "sweeps" / f"{name}.py").read_text()))


def resolved(name):
  """Returns the configs of a sweep on the base that its docstring names."""
  base = re.search(r"--config=(\S+)", docstring(name))[1]
  return sweeps.configs(load_config(base, LmConfig), load_sweep(f"configs/sweeps/{name}.py"))


def values(name, *names):
  """Returns chosen fields of every run of a sweep."""
  fields = {run: {f.name: f.value for f in config_io.fields(config)} for run, config in resolved(name).items()}
  return {run: tuple(of_run[n] for n in names) for run, of_run in fields.items()}


def changed(name):
  """Returns the fields in which runs of a sweep differ from one another."""
  first, *others = map(config_io.to_dict, resolved(name).values())
  return {field for other in others for field, _, _ in config_io.differences(first, other)}


def test_every_sweep_of_the_paper_has_a_twin():
  assert {*BIG, *(f"{name}_tiny" for name in BIG)} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_of_a_sweep_shows_its_command_and_its_runs_fit_together(name):
  base = TINY if name.endswith("_tiny") else "configs/lm/paper_1_5b.py"
  command = f"python -m experiments.sweep --config={base} --sweep=configs/sweeps/{name}.py --workdir=runs/{name}"
  assert command in docstring(name).splitlines()
  assert ("Not run here: needs" in docstring(name)) == (name in BIG)
  assert len(resolved(name)) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_no_two_runs_of_a_sweep_are_the_same(name):
  texts = [json.dumps(config_io.to_dict(config)) for config in resolved(name).values()]
  assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name", BIG)
def test_a_twin_has_the_runs_of_its_sweep_and_the_same_l1_weights(name):
  weights = ("sparsity.l1_coefficient", "sparsity.l1_multiplier", "sparsity.l1_reduction", "sparsity.reinit_rate")
  assert values(f"{name}_tiny", *weights) == values(name, *weights)
  assert list(resolved(f"{name}_tiny")) == list(resolved(name))
  assert changed(f"{name}_tiny") == changed(name)


@pytest.mark.parametrize("name", BIG)
def test_a_twin_is_short_and_within_reach_of_two_cores(name):
  for config in resolved(f"{name}_tiny").values():
    assert config.training.steps <= 120
    assert (config.model.model_width, config.training.batch_size) == (128, 16)


def test_table1_has_the_depths_steps_and_coefficients_of_the_paper():
  fields = ("model.num_layers", "training.steps", "sparsity.l1_coefficient")
  assert changed("table1") == set(fields)
  assert values("table1", *fields) == {
    "0_5b_dense": (8, 10_000, 0.0),
    "0_5b_sparse": (8, 10_000, 2e-5),
    "1b_dense": (18, 20_000, 0.0),
    "1b_sparse": (18, 20_000, 2e-5),
    "1_5b_dense": (28, 30_000, 0.0),
    "1_5b_sparse": (28, 30_000, 2e-5),
    "2b_dense": (38, 40_000, 0.0),
    "2b_sparse": (38, 40_000, 2e-5),
  }


def test_a_size_of_table1_is_the_config_of_that_size():
  runs = resolved("table1")
  for size in ("0_5b", "1b", "1_5b", "2b"):
    assert runs[f"{size}_sparse"] == load_config(f"configs/lm/paper_{size}.py", LmConfig)


def test_table3_has_the_activations_of_the_paper():
  fields = ("model.ffn_kind", "sparsity.l1_coefficient")
  assert changed("table3") == set(fields)
  assert values("table3", *fields, "model.ffn_width", "model.num_layers") == {
    "relu_dense": ("gated_relu", 0.0, 5632, 28),
    "silu_dense": ("gated_silu", 0.0, 5632, 28),
    "relu_sparse": ("gated_relu", 2e-5, 5632, 28),
  }


def test_table4_has_the_widths_and_coefficients_of_the_paper():
  fields = ("model.ffn_kind", "model.ffn_width", "sparsity.l1_coefficient")
  assert changed("table4") == set(fields)
  assert values("table4", *fields) == {
    "gated_dense": ("gated_relu", 5632, 0.0),
    "gated_2e-5": ("gated_relu", 5632, 2e-5),
    "gated_3e-5": ("gated_relu", 5632, 3e-5),
    "nongated_dense": ("relu", 8192, 0.0),
    "nongated_2e-5": ("relu", 8192, 2e-5),
    "nongated_3e-5": ("relu", 8192, 3e-5),
  }
  assert resolved("table4")["nongated_2e-5"] == load_config("configs/lm/paper_1_5b_nongated.py", LmConfig)


def test_table5_has_the_remedies_of_the_paper():
  warmup = ("sparsity.l1_warmup_start", "sparsity.l1_warmup_end")
  fields = ("sparsity.l1_coefficient", "sparsity.reinit_rate", *warmup)
  assert changed("table5") == set(fields)
  assert values("table5", *fields) == {
    "dense": (0.0, 0.0, 0, 0),
    "standard": (2e-5, 0.0, 0, 0),
    "reinit": (2e-5, 0.1, 0, 0),
    "l1_warmup": (3e-4, 0.0, 5000, 10_000),
  }
  shares = [
    (config.sparsity.l1_warmup_start / config.training.steps, config.sparsity.l1_warmup_end / config.training.steps)
    for config in (resolved("table5")["l1_warmup"], resolved("table5_tiny")["l1_warmup"])
  ]
  assert shares[0] == shares[1]


def test_l1_has_eight_coefficients_with_those_that_the_paper_names():
  assert changed("l1") == {"sparsity.l1_coefficient"}
  coefficients = [value for (value,) in values("l1", "sparsity.l1_coefficient").values()]
  assert len(coefficients) == 8
  assert coefficients == sorted(coefficients)
  assert {0.0, 1.5e-5, 2e-5, 3e-5, 1e-4} <= set(coefficients)
  assert (coefficients[0], coefficients[-1]) == (0.0, 1e-4)


@pytest.mark.parametrize("name", ["table4", "l1"])
def test_a_coefficient_in_the_name_of_a_run_is_its_coefficient(name):
  for run, (value,) in values(name, "sparsity.l1_coefficient").items():
    named = run.partition("_")[2]
    assert value == (0.0 if named == "dense" else float(named))


@pytest.mark.parametrize(("name", "split"), [("movielens_time", "time"), ("movielens_users", "user_time")])
def test_the_sweeps_of_movielens_train_every_kind_three_times_on_the_same_data(name, split):
  path, base = f"configs/sweeps/{name}.py", "configs/recsys/movielens.py"
  command = f"python -m experiments.sweep --config={base} --sweep={path} --workdir=runs/{name}"
  assert command in " ".join(docstring(name).replace("\\", "").split())
  found = sweeps.configs(load_config(base, RecsysConfig), load_sweep(path))
  assert {(config.model.kind, config.seed) for config in found.values()} == set(
    itertools.product(MODEL_KINDS, range(3))
  )
  assert {json.dumps(config_io.to_dict(config.data)) for config in found.values()} == {
    json.dumps(config_io.to_dict(InteractionsConfig(split=split)))
  }
  wukong = config_io.to_dict(found["wukong_0"].model)
  assert wukong == config_io.to_dict(RecommenderConfig(kind="wukong"))  # the base's own tuning is undone


@pytest.mark.parametrize("size", ["wide", "small"])
def test_the_sweeps_of_twell_compare_one_model_with_and_without_its_kernels(size):
  path, base = f"configs/sweeps/twell_{size}.py", f"configs/lm/{size}.py"
  assert f"python -m experiments.sweep --config={base} --sweep={path}" in pathlib.Path(path).read_text()
  found = sweeps.configs(load_config(base, LmConfig), load_sweep(path), given=[])
  assert {name: config.model.ffn_implementation for name, config in found.items()} == {
    "dense": "dense",
    "twell": "twell",
  }
  assert found["dense"].sparsity.l1_coefficient == 0
  assert 0 < found["twell"].sparsity.target_l0 <= found["twell"].sparsity.sparse_below * found["twell"].model.ffn_width
  same = lambda config: config_io.overlay(config, {"model.ffn_implementation": "dense"}).model
  assert same(found["dense"]) == same(found["twell"])
