"""What benchmarks share: flags --record and --cases, cases recorded as they come and printed as one table, a check."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from absl import flags

from pallas_kernels import bench
from sparse_lm.config import ModelConfig
from sparse_lm.errors import UserError

RECORD = flags.DEFINE_string("record", None, "new folder for config.json, env.json, metrics.jsonl, table.md")

Json = dict[str, Any]


def cases_flag() -> flags.FlagHolder[list[str]]:
  """Defines --cases, for benchmarks that have it: the others refuse it."""
  # A process that imports several benchmarks, as the tests do, defines it several times.
  return flags.DEFINE_list("cases", [], "names of cases, or what names start with; none: all", allow_override=True)


def choose[Case](cases: dict[str, Case], wanted: list[str]) -> dict[str, Case]:
  """Returns the cases that have one of these names or, for what is no name, whose names start so; all for no names.

  Raises:
    UserError: nothing starts so.
  """
  chosen: set[str] = set()
  for start in wanted:
    found = [start] if start in cases else [name for name in cases if name.startswith(start)]
    if not found:
      raise UserError(f"--cases={start!r} starts no case's name; the cases are {', '.join(cases)}")
    chosen.update(found)
  return {name: case for name, case in cases.items() if not wanted or name in chosen}


def record_cases(folder: str, asked: Json, cases: Iterable[Json], table: Callable[[list[Json]], str]) -> None:
  """Writes a record with its table.md.

  Args:
    folder: new; a run that dies leaves what it had.
    asked: what the record's config.json says.
    cases: measured one after the other, while this goes on.
    table: Markdown of all of them.

  Raises:
    UserError: the folder holds a file of a record, or cannot be written; nothing is measured then.
  """
  try:
    record = bench.Record(folder, asked)
  except OSError as error:
    why = f"{error.strerror}; name a folder that can be written" if error.errno else error  # ours has no number
    raise UserError(f"--record={folder}: {why}") from None
  for case in cases:
    print(case, file=sys.stderr, flush=True)
    record.add(case)
  text = table(bench.load_cases(record.folder))
  (record.folder / "table.md").write_text(text)
  print(text)


def require_neurons(name: str, model: ModelConfig, non_zeros: float) -> None:
  """Raises UserError for a model of --models in which --non_zeros neurons of a layer cannot fire."""
  if model.ffn_kind not in ("gated_relu", "relu"):
    raise UserError(f"--models={name}: model.ffn_kind={model.ffn_kind!r} has no neurons that ReLU can switch off")
  if non_zeros >= model.ffn_width:
    raise UserError(f"--non_zeros={non_zeros:g} must be less than the {model.ffn_width} neurons of {name}")
