"""Tables from records: the paper's, with our number beside each of its own, and those of README.md.

A number of ours keeps where it comes from: hardware, commit, record, seed and command. One that is missing says why.
"""

import csv
import dataclasses
import functools
import io
import math
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pallas_kernels import bench
from sparse_lm.config import LmConfig
from sparse_lm.errors import UserError
from sparse_lm.evaluation.harness import PAPER_TASKS
from sparse_lm.flags import load_config
from sparse_lm.report import RunRecord, read_run
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
from sparse_lm.training import recorder

Json = dict[str, Any]
_REGION = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
# What has to be as in the paper for a gap to it to mean something; the other fields tell the rows apart.
_SIZE_FIELDS = (
  "model.vocab_size",
  "model.context_length",
  "model.num_layers",
  "model.model_width",
  "model.num_heads",
  "model.ffn_width",
  "training.steps",
  "training.batch_size",
)


@dataclasses.dataclass(frozen=True)
class Line:
  """One number of a table as it is printed; the names are the columns of the CSV file."""

  row: str
  quantity: str
  paper: str
  paper_change: str
  ours: str
  our_change: str
  gap: str
  hardware: str
  commit: str
  log: str
  seeds: str
  status: str
  command: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
  """A number of ours, or None, and its origin."""

  value: Any = None
  status: str
  command: str = "-"
  comparable: bool = True  # with the paper
  hardware: str = "-"
  commit: str = "-"
  log: str = "-"
  seeds: str = "-"


def fill(table: PaperTable, root: Path, runs: Path | None = None) -> list[Line]:
  """Returns a line for each number of a table.

  Args:
    table: what to fill.
    root: of the repository, where the table's paths start.
    runs: folder of its runs; those among the records if None.

  Raises:
    UserError: a record or a run is there but cannot be read.
  """
  folder = root / "experiments" / "records" / table.runs if runs is None else runs
  found = {(r.name, n.quantity): _find(r, n, root, folder, table.hardware) for r in table.rows for n in r.numbers}
  lines = []
  for row in table.rows:
    for number in row.numbers:
      ours = found[row.name, number.quantity]
      lines.append(
        Line(
          row=row.name,
          quantity=number.quantity,
          paper=number.paper,
          paper_change=number.change or "-",
          ours=_like(number.paper, ours.value),
          our_change="-"
          if number.change is None
          else _gap(ours.value, found[row.baseline or "", number.quantity].value),
          gap=_gap(ours.value, _number(number.paper)) if ours.comparable else "-",
          hardware=ours.hardware,
          commit=ours.commit,
          log=ours.log,
          seeds=ours.seeds,
          status=ours.status,
          command=ours.command,
        )
      )
  return lines


def to_csv(lines: list[Line]) -> str:
  """Returns the lines with a header."""
  out = io.StringIO()
  writer = csv.DictWriter(out, [field.name for field in dataclasses.fields(Line)], lineterminator="\n")
  writer.writeheader()
  writer.writerows(dataclasses.asdict(line) for line in lines)
  return out.getvalue()


def to_markdown(table: PaperTable, lines: list[Line]) -> str:
  """Returns title, note and table."""
  header = ["row", "quantity", "paper", "ours", "gap", "status", "hardware", "commit", "log", "seeds", "command"]
  rows = []
  for line in lines:
    with_change = lambda value, change: value if change == "-" else f"{value} ({change})"
    row = [line.row, line.quantity, with_change(line.paper, line.paper_change), with_change(line.ours, line.our_change)]
    row += [line.gap, line.status, line.hardware, line.commit, _code(line.log), line.seeds, _code(line.command)]
    rows.append([cell.replace("|", r"\|") for cell in row])
  return f"## {table.title}\n\n{table.note}\n\n{bench.markdown_table(header, rows)}"


def speed_table(cases: list[Json]) -> str:
  """Returns README.md's table of a record of `experiments.bench_lm --what=dense`; training at its largest batch."""
  header = ["model", "forward", "forward + backward", "whole AdamW step", "MFU of the step", "peak memory of the step"]
  rows = []
  for model in dict.fromkeys(case["model"] for case in cases):
    largest = {case["what"]: case for case in sorted(cases, key=lambda c: c["sequences"]) if case["model"] == model}
    speeds = [f"{largest[what]['tokens_per_ms']:.1f} tokens/ms" for what in ("forward", "forward + backward")]
    step = largest["AdamW step"]
    rows.append([_size(model), *speeds, f"{step['tokens_per_ms']:.1f} tokens/ms", f"{step['mfu']:.1%}"])
    rows[-1].append(f"{step['peak_bytes'] / 2**30:.1f} GiB")
  return bench.markdown_table(header, rows)


_MEMORY = {"temporary_bytes": "temporaries", "peak_bytes": "peak memory"}


def sparse_table(cases: list[Json]) -> str:
  """Returns the table of a record of `experiments.bench_lm --what=sparse` or `training`.

  Changes are against dense blocks of the same model, batch and policy. What is off is the hidden states, or the norm of
  the gradient.
  """
  memory = {name: title for name, title in _MEMORY.items() if any(name in c for c in cases)}
  policies = ["remat"] if len({c.get("remat") for c in cases}) > 1 else []
  header = [
    "model",
    "sequences",
    *policies,
    "blocks",
    "non-zeros a token",
    cases[0]["what"],
    "energy",
    *memory.values(),
  ]
  header += ["off by", "ms (min to max)"]
  key = lambda c: (c["model"], c["sequences"], c.get("remat"), c["non_zeros"])
  dense = {key(c): c for c in cases if c["ffn"] == "dense"}
  rows = []
  for c in cases:
    row = [_size(c["model"]), str(c["sequences"]), *(c[p] for p in policies), c["ffn"]]
    row.append(f"{c.get('l0', c['non_zeros']):.1f}")
    if "error" in c:
      rows.append([*row, c["error"], *["-"] * (len(header) - len(row) - 1)])
      continue
    base = dense[key(c)]
    change = lambda metric, c=c, base=base: "" if c is base else f" ({_gap(c[metric], base.get(metric))})"
    energy = c["millijoules_per_token"]
    row.append(f"{c['tokens_per_ms']:.1f} tokens/ms{change('tokens_per_ms')}")
    row.append("-" if energy is None else f"{energy:.2f} mJ/token{change('millijoules_per_token')}")
    row += [f"{c[name] / 2**30:.1f} GiB{change(name)}" for name in memory]
    row.append("-" if c["relative_error"] is None else f"{c['relative_error']:.1e}")
    rows.append([*row, f"{1e3 * c['seconds']:.1f} ({1e3 * c['seconds_min']:.1f} to {1e3 * c['seconds_max']:.1f})"])
  return bench.markdown_table(header, rows)


def _size(model: str) -> str:
  """paper_1_5b as 1.5B."""
  return model.removeprefix("paper_").replace("_", ".").upper()


def decode_table(cases: list[Json]) -> str:
  """Returns the table of a record of `experiments.bench_generate --what=decode`."""
  header = ["model", "sequences", "cache slots", "tokens/s", "ms a step (min to max)", "share of the bandwidth limit"]
  rows = [
    [
      _size(c["model"]) + (f", {c['ffn']} blocks, {c['non_zeros']:g} non-zeros" if "ffn" in c else ""),
      str(c["batch"]),
      str(c["slots"]),
      f"{c['tokens_per_second']:,.0f}",
      f"{1e3 * c['seconds']:.3f} ({1e3 * c['seconds_min']:.3f} to {1e3 * c['seconds_max']:.3f})",
      "-" if c["share_of_bandwidth"] is None else f"{c['share_of_bandwidth']:.1%}",
    ]
    for c in cases
  ]
  return bench.markdown_table(header, rows)


def regenerate(text: str, tables: Mapping[str, Callable[[], str]], where: str) -> tuple[str, list[str]]:
  """Rewrites what stands between `<!-- table: NAME -->` and `<!-- /table -->`, each on a line of its own.

  Args:
    text: of a Markdown file.
    tables: by name.
    where: the file, for messages.

  Returns:
    The new text, and the names of the tables that were not up to date.

  Raises:
    UserError: a table is unknown, or its end is missing.
  """
  changed = []

  def render(match: re.Match[str]) -> str:
    begin, name, old, end = match.groups()
    if name not in tables:
      raise UserError(f"{where}: table {name!r} is unknown; allowed: {', '.join(tables)}")
    new = tables[name]()
    if new != old:
      changed.append(name)
    return begin + new + end

  starts = text.count("<!-- table:")
  if len(_REGION.findall(text)) != starts or text.count("<!-- /table -->") != starts:
    raise UserError(f"{where}: every '<!-- table: NAME -->' needs its '<!-- /table -->', each on a line of its own")
  return _REGION.sub(render, text), changed


def _find(row: Row, number: Number, root: Path, runs: Path, paper_hardware: str) -> _Found:
  match number.source:
    case BenchmarkCase() as source:
      return _from_benchmark(source, root, paper_hardware)
    case RunMetric() | TaskScore() as source:
      assert row.model is not None, f"row {row.name!r} takes a number from a run but names none"
      return _from_run(source, row.model, root, runs, paper_hardware)
    case Setting() as source:
      return _from_config(source, number.paper, root)
    case FixedSetting() as source:
      return _Found(value=source.value, status=_same(source.value, number.paper), log=source.file)
    case NotBuilt() as source:
      return _Found(status=f"not measured: needs {source.missing}, not built yet")


def _from_benchmark(source: BenchmarkCase, root: Path, paper_hardware: str) -> _Found:
  folder = root / source.record
  if not (folder / "metrics.jsonl").exists():
    return _Found(status=f"not run here: needs {source.needs}", command=source.command)
  origin = _origin(recorder.read_json(folder / "env.json"), paper_hardware) | {"log": source.record}
  cases = [case for case in bench.load_cases(folder) if source.case.items() <= case.items()]
  wanted = ", ".join(f"{name}={value}" for name, value in source.case.items())
  if not cases:
    return _Found(status=f"not run here: {source.record} has no case {wanted}", command=source.command)
  if len(cases) > 1:
    raise UserError(f"{source.record} has {len(cases)} cases {wanted}; name more of their fields in the table's config")
  if "error" in cases[0]:
    return _Found(status=f"failed: {cases[0]['error']}", **origin)
  if cases[0].get(source.metric) is None:
    return _Found(status=f"not measured: the case has no {source.metric}", **origin)
  return _Found(value=cases[0][source.metric] * source.scale, status="measured", **origin)


def _from_run(
  source: RunMetric | TaskScore, model: TrainedModel, root: Path, runs: Path, paper_hardware: str
) -> _Found:
  folder = runs / model.name
  if not folder.exists():
    return _Found(status=f"not run here: needs {model.needs}", command=model.command)
  run = read_run(folder)
  log = folder.relative_to(root) if folder.is_relative_to(root) else folder
  origin = _origin(run.env, paper_hardware) | {"log": str(log), "seeds": str(run.config["seed"])}
  origin["comparable"] = _has_size_of(run, model, root)
  if not run.finished:
    return _Found(status=f"unfinished: step {run.last['step']} of {run.steps}", **origin)
  if isinstance(source, RunMetric):
    value = run.last.get(source.metric)
    missing = f"not measured: the run has no {source.metric}"
  else:
    tasks = run.evaluations.get("tasks", {})
    if "step" in tasks and tasks["step"] != run.steps:
      return _Found(status=f"not evaluated: tasks.json is of step {tasks['step']} of {run.steps}", **origin)
    if (lacking := _lacking(source, tasks)) is not None:
      return _Found(status=lacking, **origin)
    share: Any = functools.reduce(lambda node, name: node.get(name, {}), source.path.split("."), tasks)
    value = None if share == {} else 100 * share
    missing = f"not evaluated: no {source.path} in evaluation/tasks.json"
  if value is None:
    return _Found(status=missing, **origin)
  if not math.isfinite(value):
    return _Found(value=value, status="measured, but not finite", **origin)
  return _Found(
    value=value, status="measured" if origin["comparable"] else "measured, not at the paper's size", **origin
  )


def _lacking(source: TaskScore, tasks: Json) -> str | None:
  """Why a mean is not what the paper means by it, if it is not."""
  found = tasks.get("tasks", {})
  missing, others = set(PAPER_TASKS) - set(found), set(found) - set(PAPER_TASKS)
  if source.path != "mean_acc" or not found or not (missing or others):
    return None
  listed = lambda names: ", ".join(sorted(names)) or "none"
  return f"not evaluated: the mean is not that of the 7 tasks (missing: {listed(missing)}; others: {listed(others)})"


def _has_size_of(run: RunRecord, model: TrainedModel, root: Path) -> bool:
  expected = load_config(str(root / model.config), LmConfig)
  ours = lambda name: functools.reduce(lambda node, part: node[part], name.split("."), run.config)
  return all(ours(name) == _field(expected, name) for name in _SIZE_FIELDS)


def _from_config(source: Setting, paper: str, root: Path) -> _Found:
  values = {_in_words(_field(load_config(str(root / path), LmConfig), source.field)) for path in source.files}
  log = f"{source.files[0]} and {len(source.files) - 1} more" if len(source.files) > 1 else source.files[0]
  if len(values) > 1:
    return _Found(value=" or ".join(sorted(map(str, values))), status=f"our configs differ in {source.field}", log=log)
  (value,) = values
  return _Found(value=value, status=_same(value, paper), comparable=False, log=log)  # a setting is met or not


def _field(config: Any, name: str) -> Any:
  """A field or a property, by its dotted name."""
  return functools.reduce(getattr, name.split("."), config)


def _in_words(value: Any) -> Any:
  return ("no", "yes")[value] if isinstance(value, bool) else value


def _same(value: Any, paper: str) -> str:
  number = _number(paper)
  return "the same" if value == (paper if number is None else number) else "another value"


def _origin(env: Json, paper_hardware: str) -> Json:
  """Hardware, commit and command of a record."""
  kind = env["device"]["kind"]
  commit, dirty, _ = (env["git_commit"] or "-").partition("-dirty")
  program, *arguments = env["command"]
  module = program.removesuffix(".py").replace("/", ".")
  start = ["python", "-m", module] if module.startswith("experiments.") else [program]
  other = "" if paper_hardware in kind else f" (paper: {paper_hardware})"
  return {
    "hardware": f"{env['device']['count']} x {kind}{other}",
    "commit": commit[:12] + dirty,
    "command": shlex.join([*start, *arguments]),
  }


def _number(text: str) -> float | None:
  try:
    return float(text)
  except ValueError:
    return None


def _like(paper: str, value: Any) -> str:
  """A value with as many decimals as the paper prints."""
  if value is None:
    return "-"
  if isinstance(value, float):
    return f"{value:g}" if "e" in paper else f"{value:.{len(paper.partition('.')[2])}f}"
  return str(value)


def _gap(ours: Any, reference: Any) -> str:
  numbers = isinstance(ours, int | float) and isinstance(reference, int | float)
  if not numbers or reference == 0 or not math.isfinite(ours / reference):
    return "-"
  return f"{ours / reference - 1:+.1%}"


def _code(text: str) -> str:
  return text if text == "-" else f"`{text}`"
