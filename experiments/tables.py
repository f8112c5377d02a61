"""Tables and figures of the paper, and the tables of README.md, from records: nothing in them is typed by hand.

python -m experiments.tables --out=runs/tables                         tables 1 to 6 from experiments/records
python -m experiments.tables --table=configs/tables/table3.py --runs=runs/table3 --out=runs/tables
python -m experiments.tables --figures=runs/l1 --out=runs/figures      figures 2, 3 and 6 to 11 from a folder of runs
python -m experiments.tables --readme                                  rewrites README.md and paper_tables.md; --check
"""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path

from absl import flags

from sparse_lm.errors import UserError
from sparse_lm.flags import run
from sparse_lm.table_config import PaperTable

_TABLE = flags.DEFINE_list("table", None, "files of configs/tables, separated by commas; all if none is named")
_RUNS = flags.DEFINE_string("runs", None, "folder of the runs of the one table; those of experiments/records if none")
_FIGURES = flags.DEFINE_string("figures", None, "folder of runs: draw the paper's figures of them, and no tables")
_OUT = flags.DEFINE_string("out", None, "folder for NAME.md and NAME.csv of each table, or for the figures")
_README = flags.DEFINE_boolean("readme", False, "rewrite the marked tables of the documents from experiments/records")
_CHECK = flags.DEFINE_boolean("check", False, "with --readme: change nothing, fail if a table is not up to date")

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "experiments" / "records"
DOCUMENTS = ("README.md", "experiments/records/paper_tables.md")
# Of the many cases of a block, those that README.md shows.
_FFN = (
  *(f"density/M=131072 {percent}%" for percent in (0, 0.1, 0.5, 1, 2, 10, 100)),
  *(f"density/M=16384 {percent}%" for percent in (0.5, 1)),
  *(f"pattern/{name}" for name in ("misleading", "trained", "trained sorted")),
  *(f"shape/{name}%" for name in ("nongated 0.5", "wide 0.5", "wide 1", "narrow 0.5", "narrow 1")),
  *(f"decode/M={tokens} {percent}%" for tokens in (1, 8, 64) for percent in (0.5, 5, 50)),
)
_DEMO = ("dense", "sparse", "sparser", "no FFN")  # importing the demo for its names would add its flags to ours


def main(argv: list[str]) -> None:
  """Does one of: tables, figures, documents."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  asked = [name for name in ("table", "figures", "readme") if flags.FLAGS[name].value]
  if len(asked) > 1:
    raise UserError(f"--{asked[0]} and --{asked[1]} exclude each other; give them in two calls")
  if _CHECK.value and not _README.value:
    raise UserError("--check compares the tables of the documents; give it with --readme")
  if _README.value and (_OUT.value or _RUNS.value):
    raise UserError("--readme writes the documents from experiments/records; leave out --out and --runs")
  if not _README.value and not _OUT.value:
    raise UserError("--out is missing; name a folder, such as --out=runs/tables")
  if _RUNS.value and len(_TABLE.value or []) != 1:
    raise UserError("--runs are those of one table; name it, such as --table=configs/tables/table3.py")
  if _README.value:
    write_documents(check=_CHECK.value)
  elif _FIGURES.value:
    write_figures(Path(_FIGURES.value), Path(_OUT.value))
  else:
    paths = _TABLE.value or [f"configs/tables/{name}.py" for name in table_names()]
    runs = None if _RUNS.value is None else Path(_RUNS.value)
    write_tables([load_table(path) for path in paths], [Path(path).stem for path in paths], runs, Path(_OUT.value))


def table_names() -> list[str]:
  """Returns table1, table2, ..."""
  return sorted(path.stem for path in (ROOT / "configs" / "tables").glob("table*.py"))


def load_table(path: str) -> PaperTable:
  """Returns the table of a file of configs/tables."""
  name = Path(path).stem
  ours = ROOT / "configs" / "tables" / f"{name}.py"
  if name not in table_names() or not Path(path).exists() or not Path(path).samefile(ours):
    raise UserError(f"--table={path} is no table; configs/tables has {', '.join(f'{x}.py' for x in table_names())}")
  return importlib.import_module(f"configs.tables.{name}").get_table()


def write_tables(tables: list[PaperTable], names: list[str], runs: Path | None, out: Path) -> None:
  """Writes NAME.md and NAME.csv, and prints the Markdown."""
  from sparse_lm.tables import fill, to_csv, to_markdown  # seconds to import: a wrong flag is answered before

  if runs is not None and not runs.is_dir():
    raise UserError(f"--runs={runs} is no folder; give the --workdir of a sweep")
  out.mkdir(parents=True, exist_ok=True)
  for name, table in zip(names, tables):
    lines = fill(table, ROOT, runs)
    text = to_markdown(table, lines)
    (out / f"{name}.md").write_text(text)
    (out / f"{name}.csv").write_text(to_csv(lines))
    print(text)


def write_figures(runs: Path, out: Path) -> None:
  """Draws what the runs have data for, and says what they lack."""
  from sparse_lm import figures, report

  records = report.read_runs(runs)
  out.mkdir(parents=True, exist_ok=True)
  paths, left_out = figures.paper(records, out)
  print(*(f"left out: {line}" for line in left_out), *(f"written: {path}" for path in paths), sep="\n")


def write_documents(*, check: bool) -> None:
  """Rewrites the marked tables of the documents, or fails with their names if they are not up to date."""
  from sparse_lm.tables import regenerate

  for document in DOCUMENTS:
    path = ROOT / document
    text, changed = regenerate(path.read_text(), _document_tables(), document)
    if changed and check:
      raise UserError(
        f"{document}: table {', '.join(changed)} is not what experiments/records say; run"
        " python -m experiments.tables --readme"
      )
    if changed:
      path.write_text(text)
    print(f"{document}: {f'rewritten: {", ".join(changed)}' if changed else 'up to date'}")


def _document_tables() -> dict[str, Callable[[], str]]:
  from experiments import attention_tables, ffn_tables, ffn_training, recsys_ladder, recsys_modules
  from pallas_kernels import bench
  from sparse_lm.tables import decode_table, fill, sparse_table, speed_table, to_markdown

  def paper(name: str) -> str:
    table = load_table(str(ROOT / "configs" / "tables" / f"{name}.py"))
    return to_markdown(table, fill(table, ROOT))

  cases = lambda *names: [case for name in names for case in bench.load_cases(RECORDS / name)]
  newest = lambda found: list({case["name"]: case for case in found}.values())  # of those measured twice
  documents = {name: functools.partial(paper, name) for name in table_names()}
  return documents | {
    "demo": _demo_table,
    "trained_wide": lambda: _trained_table("wide"),
    "trained_small": lambda: _trained_table("small"),
    "movielens_time": lambda: _movielens_table("time"),
    "movielens_users": lambda: _movielens_table("users"),
    "recsys_modules": lambda: recsys_modules.table(cases("bench_recsys_modules")),
    "recsys_ladder": lambda: recsys_ladder.table(cases("bench_recsys_ladder", "bench_recsys_comp_skip")),
    "speed": lambda: speed_table(cases("bench_lm_dense")),
    "decode": lambda: decode_table(cases("bench_generate_decode")),
    "sparse": lambda: sparse_table(cases("bench_lm_sparse", "bench_lm_sparse_2b")),
    "ffn": lambda: ffn_tables.summary(
      [case for case in cases("bench_ffn_inference", "bench_ffn_decode") if case["name"] in _FFN]
    ),
    "training_ffn": lambda: ffn_training.table(cases("bench_ffn_training")),
    "training": lambda: sparse_table(cases("bench_lm_training", "bench_lm_training_dots", "bench_lm_training_batch")),
    "attention": lambda: attention_tables.summary(
      newest(cases("bench_attention", "bench_attention_other", "bench_attention_masks", "bench_attention_packed"))
    ),
  }


def _demo_table() -> str:
  from sparse_lm import report

  runs = {name: report.read_run(RECORDS / "demo" / name.replace(" ", "_")) for name in _DEMO}
  return report.markdown_table(runs, baseline="dense", with_speed=False)


def _trained_table(size: str) -> str:
  from sparse_lm import report

  return report.markdown_table(report.read_runs(RECORDS / f"trained_{size}"), baseline="dense")


def _movielens_table(split: str) -> str:
  from sparse_lm import recsys_report, report

  folder = RECORDS / f"movielens_{split}"
  models = recsys_report.by_model(report.read_runs(folder))
  return recsys_report.markdown_table(models, recsys_report.read_floors(folder))


if __name__ == "__main__":
  run(main)
