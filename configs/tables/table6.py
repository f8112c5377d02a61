"""Table 6: accuracy by task of the models of table 1.

python -m experiments.tables --table=configs/tables/table6.py --runs=runs/table1 --out=runs/tables
"""

from configs.tables.paper import HARDWARE, accuracy, trained
from sparse_lm.table_config import Number, PaperTable, Row, TaskScore

_TASKS = ("hellaswag", "commonsense_qa_cloze", "piqa", "winogrande", "arc_easy", "arc_challenge", "openbookqa")


def get_table() -> PaperTable:
  return PaperTable(
    title="Table 6: accuracy by task",
    note="The paper states neither the number of examples in a prompt nor a normalisation; ours is plain accuracy.",
    hardware=HARDWARE,
    runs="table1",
    rows=(
      _row("0.5B", "dense", "40.4", "33.7", "20.9", "64.5", "50.9", "64.1", "28.1", "20.8"),
      _row("0.5B", "sparse", "40.4", "34.0", "22.3", "66.4", "53.8", "60.5", "27.5", "18.0"),
      _row("1B", "dense", "44.6", "39.2", "20.0", "68.7", "54.4", "72.6", "34.0", "23.6"),
      _row("1B", "sparse", "44.7", "39.8", "18.6", "68.1", "54.8", "71.6", "35.3", "24.4"),
      _row("1.5B", "dense", "46.4", "41.0", "20.8", "70.2", "55.9", "72.5", "36.7", "27.4"),
      _row("1.5B", "sparse", "46.2", "41.1", "21.0", "69.1", "54.4", "74.3", "37.5", "26.0"),
      _row("2B", "dense", "49.1", "45.7", "21.0", "72.0", "57.8", "77.2", "41.7", "28.6"),
      _row("2B", "sparse", "48.8", "45.0", "21.3", "70.9", "57.5", "75.6", "42.2", "28.8"),
    ),
  )


def _row(size: str, kind: str, mean: str, *scores: str) -> Row:
  numbers = [Number(f"{task} (%)", paper, TaskScore(path=f"tasks.{task}.acc")) for task, paper in zip(_TASKS, scores)]
  return Row(
    name=f"{size} {kind}",
    model=trained(f"{size.lower().replace('.', '_')}_{kind}", size, sweep="table1"),
    numbers=(accuracy(mean), *numbers),
  )
