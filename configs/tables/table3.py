"""Table 3: ReLU against SiLU, 1.5B.

python -m experiments.tables --table=configs/tables/table3.py --runs=runs/table3 --out=runs/tables
"""

from configs.tables.paper import (
  ENERGY,
  FORWARD,
  HARDWARE,
  SPARSE_NOTE,
  accuracy,
  cross_entropy,
  dense_forward,
  non_zeros,
  sparse_forward,
  trained,
)
from sparse_lm.table_config import NotBuilt, Number, PaperTable, Row

_SILU = NotBuilt(missing="a case of SiLU in experiments.bench_lm")


def get_table() -> PaperTable:
  return PaperTable(
    title="Table 3: activation function, 1.5B",
    note=(
      "SiLU is zero only where rounding makes it so: all 5632 hidden units of its model count as non-zeros. "
      + SPARSE_NOTE
    ),
    hardware=HARDWARE,
    runs="table3",
    rows=(
      Row(
        name="ReLU dense",
        model=trained("relu_dense", "1.5B", sweep="table3"),
        numbers=(
          accuracy("46.4"),
          cross_entropy("2.255"),
          non_zeros("911"),
          *dense_forward("1.5B", "117.1", "5.77"),
        ),
      ),
      Row(
        name="SiLU dense",
        model=trained("silu_dense", "1.5B", sweep="table3"),
        baseline="ReLU dense",
        numbers=(
          accuracy("47.1"),
          cross_entropy("2.240"),
          non_zeros("5632"),
          Number(FORWARD, "116.5", _SILU, "-0.5%"),
          Number(ENERGY, "5.82", _SILU, "+0.1%"),
        ),
      ),
      Row(
        name="ReLU sparse, L1 2e-5",
        model=trained("relu_sparse", "1.5B", sweep="table3"),
        baseline="ReLU dense",
        numbers=(
          accuracy("46.2"),
          cross_entropy("2.297"),
          non_zeros("29"),
          *sparse_forward("1.5B", 29, "138.0", "+17.9%", "5.07", "-12.1%"),
        ),
      ),
    ),
  )
