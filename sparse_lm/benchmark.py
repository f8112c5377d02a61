"""What every benchmark of models does with its cases: records each as it comes, then prints them as one table."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from pallas_kernels import bench
from sparse_lm.errors import UserError

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
