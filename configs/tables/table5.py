"""Table 5: keeping neurons alive, 1.5B.

python -m experiments.tables --table=configs/tables/table5.py --runs=runs/table5 --out=runs/tables
"""

from configs.tables.paper import (
  HARDWARE,
  SPARSE_NOTE,
  accuracy,
  cross_entropy,
  dense_forward,
  non_zeros,
  sparse_forward,
  trained,
)
from sparse_lm.table_config import PaperTable, Row


def get_table() -> PaperTable:
  return PaperTable(
    title="Table 5: against dead neurons, 1.5B",
    note=(
      "Re-initialisation redraws a tenth of each dead gate row after every step; the warm-up ends at step 10000. "
      + SPARSE_NOTE
    ),
    hardware=HARDWARE,
    runs="table5",
    rows=(
      Row(
        name="dense",
        model=trained("dense", "1.5B", sweep="table5"),
        numbers=(
          accuracy("46.4"),
          cross_entropy("2.255"),
          non_zeros("911"),
          *dense_forward("1.5B", "117.1", "5.77"),
        ),
      ),
      _sparse("standard, L1 2e-5", "standard", "46.2", "2.297", "29", "138.0", "+17.9%", "5.07", "-12.1%"),
      _sparse("re-initialisation, L1 2e-5", "reinit", "46.6", "2.298", "29", "139.4", "+19.1%", "4.96", "-14.0%"),
      _sparse("L1 warm-up, L1 3e-4", "l1_warmup", "45.9", "2.293", "108", "119.3", "+1.9%", "5.76", "-0.1%"),
    ),
  )


def _sparse(name: str, run: str, mean: str, loss: str, active: str, *speed: str) -> Row:
  return Row(
    name=name,
    model=trained(run, "1.5B", sweep="table5"),
    baseline="dense",
    numbers=(accuracy(mean), cross_entropy(loss), non_zeros(active), *sparse_forward("1.5B", int(active), *speed)),
  )
