"""What a table of the paper is made of: for every number what the paper says, and where ours comes from.

Files of configs/tables return a `PaperTable` from `get_table()`; `sparse_lm/tables.py` fills it from records and runs.
Nothing is imported here, for configs build on it. Paths are relative to the root of the repository.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkCase:
  """A number in the record of a benchmark."""

  record: str  # folder
  case: Mapping[str, str | int]  # the fields that pick one case of it
  metric: str
  scale: float = 1.0  # from the record's unit to the table's
  command: str  # that makes such a record
  needs: str  # hardware of the command


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunMetric:
  """A number in the last line of a run's metrics.jsonl; the run is the row's."""

  metric: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScore:
  """A share, shown in percent, in a run's evaluation/tasks.json; the run is the row's."""

  path: str  # dotted: mean_acc, tasks.piqa.acc


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """A field of config files, which have to agree on it."""

  files: tuple[str, ...]
  field: str  # dotted


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedSetting:
  """What our code does without a field to change it."""

  value: str
  file: str  # where it does


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotBuilt:
  """Nothing of ours can measure it yet."""

  missing: str


Source = BenchmarkCase | RunMetric | TaskScore | Setting | FixedSetting | NotBuilt


@dataclasses.dataclass(frozen=True)
class Number:
  """One number of the paper."""

  quantity: str  # with its unit
  paper: str  # as printed: ours is rounded alike
  source: Source
  change: str | None = None  # against the row's baseline, as printed


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModel:
  """The training run behind a row."""

  name: str  # folder of the run inside the table's folder of runs
  config: str  # file of the paper's model
  command: str  # that makes the run
  needs: str  # hardware of the command


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One row of the paper."""

  name: str
  numbers: tuple[Number, ...]
  model: TrainedModel | None = None  # None where no number comes from a run
  baseline: str | None = None  # name of the row that changes are relative to


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperTable:
  """One table of the paper."""

  title: str
  note: str
  hardware: str  # of the paper
  runs: str  # folder of its runs inside experiments/records
  rows: tuple[Row, ...]
