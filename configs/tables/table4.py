"""Table 4: gated against non-gated feed-forward layers, 1.5B.

python -m experiments.tables --table=configs/tables/table4.py --runs=runs/table4 --out=runs/tables
"""

from configs.tables.paper import (
  HARDWARE,
  SPARSE_NOTE,
  accuracy,
  dense_forward,
  forward,
  nongated_case,
  sparse_forward,
  trained,
)
from sparse_lm.table_config import Number, PaperTable, Row


def get_table() -> PaperTable:
  return PaperTable(
    title="Table 4: gated and non-gated feed-forward layers, 1.5B",
    note="Changes are against the dense model of the same kind. " + SPARSE_NOTE,
    hardware=HARDWARE,
    runs="table4",
    rows=(
      _dense("gated", "46.36", dense_forward("1.5B", "117.1", "5.79")),
      _sparse("gated", "2e-5", 29, "46.20", "138.0", "+17.9%", "5.07", "-12.5%"),
      _sparse("gated", "3e-5", None, "44.83", "147.0", "+25.5%", "4.75", "-18.0%"),
      _dense("nongated", "46.57", forward(nongated_case, "125.8", "5.52")),
      _sparse("nongated", "2e-5", None, "46.46", "139.9", "+11.2%", "5.03", "-8.8%"),
      _sparse("nongated", "3e-5", None, "44.71", "142.3", "+13.1%", "4.86", "-12.0%"),
    ),
  )


def _dense(kind: str, mean: str, speed: tuple[Number, ...]) -> Row:
  return Row(
    name=f"{kind} dense",
    model=trained(f"{kind}_dense", "1.5B", sweep="table4", gated=kind == "gated"),
    numbers=(accuracy(mean), *speed),
  )


def _sparse(kind: str, coefficient: str, non_zeros: int | None, mean: str, *speed: str) -> Row:
  return Row(
    name=f"{kind}, L1 {coefficient}",
    model=trained(f"{kind}_{coefficient}", "1.5B", sweep="table4", gated=kind == "gated"),
    baseline=f"{kind} dense",
    numbers=(accuracy(mean), *sparse_forward("1.5B", non_zeros, *speed)),
  )
