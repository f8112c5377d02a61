"""The paper's tables: its numbers, ours from records and runs written by hand, and the documents that show them."""

import csv
import dataclasses
import io
import json
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from sparse_lm import config_io, tables
from sparse_lm.config import LmConfig
from sparse_lm.errors import UserError
from sparse_lm.flags import load_config, load_sweep
from sparse_lm.table_config import (
  BenchmarkCase,
  FixedSetting,
  NotBuilt,
  Number,
  PaperTable,
  Row,
  RunMetric,
  Setting,
  TaskScore,
  TrainedModel,
)

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = "configs/lm/paper_1_5b.py"
NAMES = [f"table{n}" for n in range(1, 7)]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.syspath_prepend(ROOT)  # where `python -m experiments...` finds `configs`


def paper_table(name):
  from experiments.tables import load_table

  return load_table(f"configs/tables/{name}.py")


# The numbers of the paper, typed again from its tables.

PAPER = {
  "table1": {
    "0.5B dense": "40.4 410 1.63 97.3 26.2",
    "0.5B sparse": "40.4 480 +17.0% 1.43 -11.8% 95.9 -1.5% 21.2 -19.2%",
    "1B sparse": "44.7 219 +18.1% 3.17 -14.6% 52.1 +7.1% 33.1 -25.5%",
    "1.5B dense": "46.4 119 5.73 31.8 62.8",
    "2B dense": "49.1 87.8 7.85 22.4 46.7",
    "2B sparse": "48.8 106 +20.5% 6.51 -17.0% 27.3 +21.9% 57.1 +22.3%",
  },
  "table3": {
    "ReLU dense": "46.4 2.255 911 117.1 5.77",
    "SiLU dense": "47.1 2.240 5632 116.5 -0.5% 5.82 +0.1%",
    "ReLU sparse, L1 2e-5": "46.2 2.297 29 138.0 +17.9% 5.07 -12.1%",
  },
  "table4": {
    "gated dense": "46.36 117.1 5.79",
    "gated, L1 3e-5": "44.83 147.0 +25.5% 4.75 -18.0%",
    "nongated dense": "46.57 125.8 5.52",
    "nongated, L1 2e-5": "46.46 139.9 +11.2% 5.03 -8.8%",
    "nongated, L1 3e-5": "44.71 142.3 +13.1% 4.86 -12.0%",
  },
  "table5": {
    "re-initialisation, L1 2e-5": "46.6 2.298 29 139.4 +19.1% 4.96 -14.0%",
    "L1 warm-up, L1 3e-4": "45.9 2.293 108 119.3 +1.9% 5.76 -0.1%",
  },
  "table6": {
    "0.5B sparse": "40.4 34.0 22.3 66.4 53.8 60.5 27.5 18.0",
    "1B dense": "44.6 39.2 20.0 68.7 54.4 72.6 34.0 23.6",
    "2B sparse": "48.8 45.0 21.3 70.9 57.5 75.6 42.2 28.8",
  },
}


@pytest.mark.parametrize(("table", "row"), [(table, row) for table, rows in PAPER.items() for row in rows])
def test_the_numbers_are_those_of_the_paper(table, row):
  (found,) = (r for r in paper_table(table).rows if r.name == row)
  printed = [text for number in found.numbers for text in (number.paper, number.change) if text is not None]
  assert " ".join(printed) == PAPER[table][row]


def test_hyper_parameters_are_those_of_the_paper_and_our_configs_agree_with_all_of_them():
  lines = {line.row: line for line in tables.fill(paper_table("table2"), ROOT)}
  expected = {"layers, 2B": "38", "steps, 0.5B": "10000", "FFN width, non-gated": "8192", "warm-up steps": "600"}
  expected |= {"rotary base": "10000", "AdamW beta 2": "0.95", "L1 coefficient": "2e-5", "key-value heads": "32"}
  assert {name: lines[name].paper for name in expected} == expected
  assert {line.status for line in lines.values()} == {"the same"}


@pytest.mark.parametrize(("name", "rows", "numbers"), list(zip(NAMES, [8, 35, 3, 6, 4, 8], [40, 35, 15, 18, 20, 64])))
def test_no_row_or_number_of_the_paper_is_missing(name, rows, numbers):
  table = paper_table(name)
  assert (len(table.rows), sum(len(row.numbers) for row in table.rows)) == (rows, numbers)
  names = [row.name for row in table.rows]
  assert len(set(names)) == rows
  assert all(row.baseline is None or row.baseline in names for row in table.rows)


@pytest.mark.parametrize("name", ["table1", "table3", "table4", "table5", "table6"])
def test_every_row_names_a_run_of_its_sweep_at_the_size_of_its_config(name):
  for row in paper_table(name).rows:
    words = dict(word.split("=", 1) for word in row.model.command.split() if "=" in word)
    base = load_config(words["--config"], LmConfig)
    sweep = load_sweep(words["--sweep"])
    run, expected = config_io.overlay(base, sweep[row.model.name]), load_config(row.model.config, LmConfig)
    shape = lambda config: (config.model.num_layers, config.model.ffn_width, config.training.steps)
    assert shape(run) == shape(expected), row.name
    assert (run.sparsity.l1_coefficient == 0) == ("dense" in row.name)
    if "L1" in row.name:
      assert run.sparsity.l1_coefficient == float(row.name.split()[-1])


# What a number of ours is filled from.


def write_json(path, value):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(value))


def write_record(folder, cases, kind="NVIDIA H200", commit="0123456789abcdef"):
  env = {"device": {"kind": kind, "count": 2}, "git_commit": commit, "command": ["experiments/bench_lm.py", "--x=a b"]}
  write_json(folder / "env.json", env)
  (folder / "metrics.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))


def write_run(folder, *, last, changes=None, tasks=None, seed=42):
  """A run of the paper's size but for `changes`; `last` is the end of its metrics."""
  config = config_io.overlay(load_config(CONFIG, LmConfig), {"seed": seed} | (changes or {}))
  write_json(folder / "config.json", config_io.to_dict(config))
  write_record(folder, [{"step": 1, "loss": 9.0}, last], kind="cpu", commit=None)
  if tasks is not None:
    write_json(folder / "evaluation" / "tasks.json", tasks)


CASE = BenchmarkCase(
  record="record", case={"model": "m", "what": "forward"}, metric="speed", scale=10.0, command="bench it", needs="a GPU"
)
MODEL = TrainedModel(name="one", config=CONFIG, command="train it", needs="a cluster")


def line_of(source, tmp_path, *, paper="40.0", runs=None):
  """The one line of a table of one number."""
  (tmp_path / "configs").mkdir(exist_ok=True)
  if not (tmp_path / "configs" / "lm").exists():
    (tmp_path / "configs" / "lm").symlink_to(ROOT / "configs" / "lm")
  row = Row(name="row", model=MODEL, numbers=(Number("number", paper, source),))
  table = PaperTable(title="T", note="N", hardware="H100", runs="t", rows=(row,))
  (line,) = tables.fill(table, tmp_path, runs)
  return line


def test_a_measured_case_says_where_it_comes_from_and_on_which_other_hardware(tmp_path):
  write_record(tmp_path / "record", [{"model": "x", "what": "forward", "speed": 1}, CASE.case | {"speed": 5.004}])
  assert dataclasses.asdict(line_of(CASE, tmp_path)) == {
    "row": "row",
    "quantity": "number",
    "paper": "40.0",
    "paper_change": "-",
    "ours": "50.0",
    "our_change": "-",
    "gap": "+25.1%",
    "hardware": "2 x NVIDIA H200 (paper: H100)",
    "commit": "0123456789ab",
    "log": "record",
    "seeds": "-",
    "status": "measured",
    "command": "python -m experiments.bench_lm '--x=a b'",
  }


def test_the_papers_hardware_needs_no_remark_and_a_dirty_commit_does(tmp_path):
  write_record(tmp_path / "record", [CASE.case | {"speed": 4}], kind="NVIDIA H100 PCIe", commit="0123456789abcd-dirty")
  line = line_of(CASE, tmp_path)
  assert (line.hardware, line.commit, line.gap) == ("2 x NVIDIA H100 PCIe", "0123456789ab-dirty", "+0.0%")


@pytest.mark.parametrize(
  ("cases", "status"),
  [
    (None, "not run here: needs a GPU"),
    ([], "not run here: record has no case model=m, what=forward"),
    ([{"model": "m", "what": "step", "speed": 1}], "not run here: record has no case model=m, what=forward"),
    ([CASE.case | {"error": "out of memory"}], "failed: out of memory"),
    ([CASE.case | {"speed": None}], "not measured: the case has no speed"),
    ([CASE.case], "not measured: the case has no speed"),
  ],
)
def test_a_case_that_is_not_there_says_so_and_leaves_the_number_open(cases, status, tmp_path):
  if cases is not None:
    write_record(tmp_path / "record", cases)
  line = line_of(CASE, tmp_path)
  assert (line.ours, line.gap, line.status) == ("-", "-", status)
  if status.startswith("not run here"):
    assert line.command == "bench it"


def test_a_case_that_is_there_twice_is_refused(tmp_path):
  write_record(tmp_path / "record", [CASE.case | {"speed": 4}, CASE.case | {"speed": 5}])
  with pytest.raises(UserError, match="record has 2 cases model=m, what=forward"):
    line_of(CASE, tmp_path)


LOSS, SCORE = RunMetric(metric="validation_loss"), TaskScore(path="tasks.piqa.acc")
END = {"step": 30_000, "validation_loss": 2.2}
TASKS = {"step": 30_000, "tasks": {"piqa": {"acc": 0.60, "samples": 100}}, "mean_acc": 0.5}


def test_a_run_of_the_papers_size_has_a_gap_and_names_its_seed_and_folder(tmp_path):
  write_run(tmp_path / "runs" / "one", last=END, tasks=TASKS, seed=7)
  loss, score = (line_of(source, tmp_path, paper="2.000", runs=tmp_path / "runs") for source in (LOSS, SCORE))
  assert (loss.ours, loss.gap, loss.status, loss.seeds) == ("2.200", "+10.0%", "measured", "7")
  assert (loss.log, loss.hardware, loss.commit) == ("runs/one", "2 x cpu (paper: H100)", "-")
  assert score.ours == "60.000"  # percent


def test_runs_among_the_records_are_found_without_being_named(tmp_path):
  write_run(tmp_path / "experiments" / "records" / "t" / "one", last=END)
  assert line_of(LOSS, tmp_path).log == "experiments/records/t/one"


@pytest.mark.parametrize(
  "changes",
  [{"model.num_layers": 3}, {"training.steps": 90_000}, {"model.ffn_width": 8192}, {"training.batch_size": 8}],
)
def test_a_run_of_another_size_has_its_number_and_no_gap(changes, tmp_path):
  write_run(tmp_path / "one", last=END | {"step": changes.get("training.steps", 30_000)}, changes=changes)
  line = line_of(LOSS, tmp_path, runs=tmp_path)
  assert (line.ours, line.gap, line.status) == ("2.2", "-", "measured, not at the paper's size")


def test_a_run_on_another_machine_or_mesh_is_still_of_the_papers_size(tmp_path):
  changes = {"model.remat": "none", "parallel.fsdp": 4, "sparsity.l1_coefficient": 0.0, "data.document_mask": True}
  write_run(tmp_path / "one", last=END, changes=changes)
  assert line_of(LOSS, tmp_path, runs=tmp_path).gap == "-94.5%"


@pytest.mark.parametrize(
  ("last", "tasks", "source", "ours", "status"),
  [
    (None, None, LOSS, "-", "not run here: needs a cluster"),
    ({"step": 700, "validation_loss": 3.0}, None, LOSS, "-", "unfinished: step 700 of 30000"),
    ({"step": 700, "loss": "nan"}, None, LOSS, "-", "unfinished: step 700 of 30000"),
    ({"step": 30_000, "validation_loss": "NaN"}, None, LOSS, "nan", "measured, but not finite"),
    ({"step": 30_000}, None, LOSS, "-", "not measured: the run has no validation_loss"),
    (END, None, SCORE, "-", "not evaluated: no tasks.piqa.acc in evaluation/tasks.json"),
    (END, TASKS | {"tasks": {}}, SCORE, "-", "not evaluated: no tasks.piqa.acc in evaluation/tasks.json"),
    (END, TASKS | {"step": 500}, SCORE, "-", "not evaluated: tasks.json is of step 500 of 30000"),
    (END, TASKS | {"tasks": {"piqa": {"acc": 0.0}}}, SCORE, "0.0", "measured"),
  ],
)
def test_a_run_that_cannot_give_the_number_says_why(last, tasks, source, ours, status, tmp_path):
  if last is not None:
    write_run(tmp_path / "one", last=last, tasks=tasks)
  line = line_of(source, tmp_path, runs=tmp_path)
  assert (line.ours, line.status) == (ours, status)
  if ours == "-":
    assert line.gap == "-"


def test_a_mean_is_the_papers_only_over_its_seven_tasks(tmp_path):
  seven = ("hellaswag", "commonsense_qa_cloze", "piqa", "winogrande", "arc_easy", "arc_challenge", "openbookqa")
  for name, tasks in {"all": seven, "fewer": seven[1:], "more": (*seven, "toy"), "other": ("toy",)}.items():
    scores = {"step": 30_000, "tasks": {task: {"acc": 0.5} for task in tasks}, "mean_acc": 0.5}
    write_run(tmp_path / name / "one", last=END, tasks=scores)
  of = lambda name: line_of(TaskScore(path="mean_acc"), tmp_path, runs=tmp_path / name)
  assert (of("all").ours, of("all").status) == ("50.0", "measured")
  for name, why in (
    ("fewer", "missing: hellaswag; others: none"),
    ("more", "missing: none; others: toy"),
    ("other", ""),
  ):
    assert (of(name).ours, of(name).gap) == ("-", "-")
    assert of(name).status.startswith("not evaluated: the mean is not that of the 7 tasks (")
    assert why in of(name).status


def test_a_folder_that_only_looks_like_a_run_is_refused_by_name(tmp_path):
  (tmp_path / "one").mkdir()
  with pytest.raises(UserError, match="one holds no run"):
    line_of(LOSS, tmp_path, runs=tmp_path)


def test_what_nothing_can_measure_yet_says_what_is_missing(tmp_path):
  line = line_of(NotBuilt(missing="a kernel"), tmp_path)
  assert (line.ours, line.status, line.command) == ("-", "not measured: needs a kernel, not built yet", "-")


def test_settings_are_compared_as_numbers_and_as_words(tmp_path):
  of = lambda field, paper: line_of(Setting(files=(CONFIG,), field=field), tmp_path, paper=paper)
  assert (of("training.learning_rate", "1e-3").status, of("training.learning_rate", "2e-3").status) == (
    "the same",
    "another value",
  )
  assert (of("model.tie_embeddings", "yes").ours, of("model.head_width", "64").status) == ("yes", "the same")
  assert line_of(FixedSetting(value="AdamW", file="f.py"), tmp_path, paper="SGD").status == "another value"


def test_configs_that_disagree_are_shown_with_all_their_values(tmp_path):
  line = line_of(Setting(files=(CONFIG, "configs/lm/paper_2b.py"), field="model.num_layers"), tmp_path, paper="28")
  assert (line.ours, line.status) == ("28 or 38", "our configs differ in model.num_layers")


def test_a_change_is_ours_against_our_baseline_and_open_where_one_of_them_is():
  def change(dense, sparse):
    numbers = lambda value, text: (Number("n", "100", FixedSetting(value=value, file="f"), text),)
    rows = (Row(name="d", numbers=numbers(dense, None)), Row(name="s", baseline="d", numbers=numbers(sparse, "+5.0%")))
    return tables.fill(PaperTable(title="T", note="", hardware="", runs="t", rows=rows), ROOT)[1].our_change

  assert change(200.0, 230.0) == "+15.0%"
  assert change(None, 230.0) == "-"
  assert change(200.0, None) == "-"
  assert change(0.0, 230.0) == "-"
  assert change(200.0, float("nan")) == "-"


def test_csv_and_markdown_hold_the_same_lines(tmp_path):
  source = FixedSetting(value='a|"b", c', file="f.py")
  table = PaperTable(
    title="T", note="N", hardware="", runs="t", rows=(Row(name="r", numbers=(Number("n", "1", source),)),)
  )
  lines = tables.fill(table, tmp_path)
  (row,) = csv.DictReader(io.StringIO(tables.to_csv(lines)))
  assert row == dataclasses.asdict(lines[0])
  header, _, body = tables.to_markdown(table, lines).splitlines()[4:]
  assert body.replace(r"\|", "").count("|") == header.count("|")
  assert r'a\|"b", c' in body


# Documents.


def test_marked_tables_are_rewritten_and_all_other_text_is_kept():
  text = "a\n<!-- table: x -->\nold\n<!-- /table -->\nb\n<!-- table: y -->\n| y |\n<!-- /table -->\n"
  new, changed = tables.regenerate(text, {"x": lambda: "| x |\n", "y": lambda: "| y |\n"}, "README.md")
  assert new == text.replace("old", "| x |")
  assert changed == ["x"]
  assert tables.regenerate(new, {"x": lambda: "| x |\n", "y": lambda: "| y |\n"}, "README.md") == (new, [])


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("<!-- table: z -->\n<!-- /table -->\n", "README.md: table 'z' is unknown; allowed: x"),
    ("<!-- table: x -->\n", "README.md: every '<!-- table: NAME -->' needs its '<!-- /table -->'"),
    ("<!-- /table -->\n", "README.md: every '<!-- table: NAME -->' needs its '<!-- /table -->'"),
    ("<!-- table: x -->\n<!-- table: x -->\n<!-- /table -->\n", "README.md: every"),
    ("<!-- table: x --> | a |\n<!-- /table -->\n", "README.md: every"),
  ],
)
def test_wrong_marks_are_refused(text, said):
  with pytest.raises(UserError) as caught:
    tables.regenerate(text, {"x": lambda: ""}, "README.md")
  assert str(caught.value).startswith(said)


def test_the_speed_table_takes_training_at_the_largest_batch():
  case = {"model": "paper_0_5b", "tokens_per_ms": 1.0, "mfu": 0.1, "peak_bytes": 2**30}
  cases = [case | {"what": "forward", "sequences": 64, "tokens_per_ms": 628.04}]
  for sequences, speed in ((16, 20.0), (8, 10.0)):  # not in the order of size
    cases += [case | {"what": what, "sequences": sequences, "tokens_per_ms": speed, "peak_bytes": sequences * 2**30}
              for what in ("forward + backward", "AdamW step")]  # fmt: skip
  row = "| 0.5B | 628.0 tokens/ms | 20.0 tokens/ms | 20.0 tokens/ms | 10.0% | 16.0 GiB |"
  assert tables.speed_table(cases).splitlines()[2:] == [row]


def test_the_sparse_table_compares_each_case_with_dense_blocks_at_the_same_number_of_non_zeros():
  speed = {"seconds": 0.2, "seconds_min": 0.1, "seconds_max": 0.3, "millijoules_per_token": 2.0, "peak_bytes": 2**30}
  case = {"model": "paper_0_5b", "what": "forward", "sequences": 64, "ffn": "dense", "non_zeros": 29.0, "l0": 29.04}
  case |= {"relative_error": None} | speed
  other = {"ffn": "twell", "relative_error": 0.0021, "millijoules_per_token": 1.5}
  cases = [case | {"tokens_per_ms": 100.0}, case | other | {"tokens_per_ms": 120.0}]
  cases += [case | {"non_zeros": 108.0, "tokens_per_ms": 50.0}]
  cases += [{"model": "paper_0_5b", "sequences": 64, "ffn": "twell", "non_zeros": 108.0, "error": "out of memory"}]
  rows = [line.strip("| ").split(" | ") for line in tables.sparse_table(cases).splitlines()[2:]]
  assert rows[0][1:6] == ["64", "dense", "29.0", "100.0 tokens/ms", "2.00 mJ/token"]
  assert rows[1][4:8] == ["120.0 tokens/ms (+20.0%)", "1.50 mJ/token (-25.0%)", "1.0 GiB (+0.0%)", "2.1e-03"]
  assert rows[2][4] == "50.0 tokens/ms"
  assert rows[3][:5] == ["0.5B", "64", "twell", "108.0", "out of memory"]
  assert {len(row) for row in rows} == {9}


def test_the_sparse_table_compares_training_steps_of_the_same_batch_and_policy():
  speed = {"seconds": 0.2, "seconds_min": 0.1, "seconds_max": 0.3, "millijoules_per_token": None, "peak_bytes": 2**30}
  case = {"model": "paper_1b", "what": "AdamW step", "non_zeros": 29.0, "l0": 29.0, "relative_error": None} | speed
  cases = []
  for remat, sequences, dense, twell in (("dots", 8, 50.0, 60.0), ("dots", 16, 40.0, 60.0), ("full", 8, 30.0, 60.0)):
    same = case | {"remat": remat, "sequences": sequences}
    cases.append(same | {"ffn": "dense", "tokens_per_ms": dense, "temporary_bytes": 2**31})
    cases.append(same | {"ffn": "twell", "tokens_per_ms": twell, "temporary_bytes": 2**30})
  rows = [line.strip("| ").split(" | ") for line in tables.sparse_table(cases).splitlines()]
  assert (rows[0][2], rows[0][5]) == ("remat", "AdamW step")
  gains = [(row[2], row[5]) for row in rows[2:] if row[3] == "twell"]
  assert gains == [
    ("dots", "60.0 tokens/ms (+20.0%)"),
    ("dots", "60.0 tokens/ms (+50.0%)"),
    ("full", "60.0 tokens/ms (+100.0%)"),
  ]
  assert rows[3][7] == "1.0 GiB (-50.0%)"


def test_tables_of_the_documents_are_what_the_records_say():
  from experiments.tables import write_documents

  write_documents(check=True)


def test_a_document_that_is_not_up_to_date_fails_by_the_name_of_its_table(tmp_path, monkeypatch):
  from experiments import tables as program

  readme = tmp_path / "README.md"
  readme.write_text((ROOT / "README.md").read_text().replace("| no FFN | 0 |", "| no FFN | 1 |"))
  monkeypatch.setattr(program, "DOCUMENTS", (str(readme),))  # absolute, so the root is not put before it
  before = readme.read_text()
  with pytest.raises(UserError, match=r"README.md: table demo is not what experiments/records say; run python -m"):
    program.write_documents(check=True)
  assert readme.read_text() == before
  program.write_documents(check=False)
  assert readme.read_text() == (ROOT / "README.md").read_text()


# The command line.


def call(*arguments):
  from experiments import tables as program

  with flagsaver.flagsaver():
    program.main(flags.FLAGS(["tables", *arguments]))


def test_a_table_is_filled_from_a_folder_of_tiny_runs(tmp_path, capsys):
  tiny = {"model.num_layers": 3, "training.steps": 90, "training.warmup_steps": 20}
  last = {"step": 90, "validation_loss": 4.9, "validation_l0": 80.4}
  write_run(tmp_path / "runs" / "relu_dense", last=last, changes=tiny)
  call("--table=configs/tables/table3.py", f"--runs={tmp_path / 'runs'}", f"--out={tmp_path / 'out'}")
  assert (tmp_path / "out" / "table3.md").read_text() in capsys.readouterr().out
  rows = list(csv.DictReader((tmp_path / "out" / "table3.csv").open()))
  ours = {(row["row"], row["quantity"]): (row["ours"], row["gap"], row["status"]) for row in rows}
  tiny_status = "measured, not at the paper's size"
  assert ours["ReLU dense", "validation CE (nats a token)"] == ("4.900", "-", tiny_status)
  assert ours["ReLU dense", "non-zeros a token (L0)"] == ("80", "-", tiny_status)
  assert ours["SiLU dense", "validation CE (nats a token)"][2].startswith("not run here: needs eight GPUs")


def test_all_tables_are_written_if_none_is_named(tmp_path):
  call(f"--out={tmp_path / 'out'}")
  written = sorted(path.name for path in (tmp_path / "out").iterdir())
  assert written == sorted(f"{name}.{kind}" for name in NAMES for kind in ("csv", "md"))


def test_the_program_starts_and_answers_a_wrong_call_in_one_line():
  command = [sys.executable, "-m", "experiments.tables"]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert (result.returncode, result.stderr) == (
    2,
    "error: --out is missing; name a folder, such as --out=runs/tables\n",
  )


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ([], "--out is missing"),
    (
      ["--out=x", "--table=configs/tables/table7.py"],
      "--table=configs/tables/table7.py is no table; configs/tables has",
    ),
    (["--out=x", "--runs=y"], "--runs are those of one table"),
    (["--out=x", "--runs=nowhere", f"--table={ROOT}/configs/tables/table3.py"], "--runs=nowhere is no folder"),
    (["--out=x", "--figures=nowhere"], "nowhere holds no runs"),
    (["--out=x", "--figures=y", "--table=z"], "--table and --figures exclude each other"),
    (["--check"], "--check compares the tables of the documents; give it with --readme"),
    (["--readme", "--out=x"], "--readme writes the documents"),
    (["--out=x", "table3"], "'table3' is not a flag"),
  ],
  ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags_are_refused_before_anything_is_written(arguments, said, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError) as caught:
    call(*arguments)
  assert str(caught.value).startswith(said)
  assert list(tmp_path.iterdir()) == []
