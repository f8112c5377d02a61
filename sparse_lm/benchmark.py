"""What every benchmark shares: its flag --record, cases recorded as they come and printed as one table."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from absl import flags

from pallas_kernels import bench
from sparse_lm.errors import UserError

RECORD = flags.DEFINE_string("record", None, "new folder for config.json, env.json, metrics.jsonl, table.md")

Json = dict[str, Any]


def record_cases(folder: str, asked: Json, cases: Iterable[Json], table: Callable[[list[Json]], str]) -> None:
  """Writes a record with its table.md.

  Args:
    folder: new; a run that dies leaves what it had.
    asked: what the record's config.json says.
    cases: measured one after the other, while this goes on.
    table: Markdown of all of them.

  Raises:
    UserError: the folder holds a record; nothing is measured then.
  """
  try:
    record = bench.Record(folder, asked)
  except FileExistsError as error:
    raise UserError(str(error)) from None
  for case in cases:
    print(case, file=sys.stderr, flush=True)
    record.add(case)
  text = table(bench.load_cases(record.folder))
  (record.folder / "table.md").write_text(text)
  print(text)
