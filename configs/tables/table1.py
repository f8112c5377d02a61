"""Table 1: dense and sparse models of four sizes, L1 coefficient 2e-5.

python -m experiments.tables --table=configs/tables/table1.py --out=runs/tables
"""

from configs.tables.paper import (
  HARDWARE,
  SPARSE_NOTE,
  accuracy,
  dense_forward,
  sparse_forward,
  trained,
  training,
)
from sparse_lm.table_config import PaperTable, Row


def get_table() -> PaperTable:
  return PaperTable(
    title="Table 1: dense and sparse models of four sizes",
    note=(
      "Ours: forward is the backbone on 64 sequences of 2048 random tokens, training one AdamW step on 8 of them with"
      " float32 master weights, GB are 10^9 bytes of the compiled step. The paper trains on eight GPUs with several"
      " micro-batches a step, and its sparse 2B run takes a larger micro-batch than the dense one, as ours does: 32"
      " sequences, which do not fit with dense blocks. " + SPARSE_NOTE
    ),
    hardware=HARDWARE,
    runs="table1",
    rows=(
      _dense("0.5B", "40.4", "410", "1.63", "97.3", "26.2"),
      _sparse("0.5B", "40.4", "480 +17.0%", "1.43 -11.8%", "95.9 -1.5%", "21.2 -19.2%"),
      _dense("1B", "44.6", "185", "3.71", "48.6", "44.5"),
      _sparse("1B", "44.7", "219 +18.1%", "3.17 -14.6%", "52.1 +7.1%", "33.1 -25.5%"),
      _dense("1.5B", "46.4", "119", "5.73", "31.8", "62.8"),
      _sparse("1.5B", "46.2", "141 +18.8%", "4.87 -15.0%", "35.5 +11.6%", "45.1 -28.1%"),
      _dense("2B", "49.1", "87.8", "7.85", "22.4", "46.7"),
      _sparse("2B", "48.8", "106 +20.5%", "6.51 -17.0%", "27.3 +21.9%", "57.1 +22.3%"),
    ),
  )


def _dense(size: str, mean: str, tokens_per_ms: str, energy: str, training_speed: str, memory: str) -> Row:
  return Row(
    name=f"{size} dense",
    model=trained(f"{size.lower().replace('.', '_')}_dense", size, sweep="table1"),
    numbers=(
      accuracy(mean),
      *dense_forward(size, tokens_per_ms, energy),
      *training(size, "dense", training_speed, memory),
    ),
  )


def _sparse(size: str, mean: str, tokens_per_ms: str, energy: str, training_speed: str, memory: str) -> Row:
  """Each speed is the paper's number and its change against the dense model."""
  return Row(
    name=f"{size} sparse",
    model=trained(f"{size.lower().replace('.', '_')}_sparse", size, sweep="table1"),
    baseline=f"{size} dense",
    numbers=(
      accuracy(mean),
      *sparse_forward(size, 29, *tokens_per_ms.split(), *energy.split()),
      *training(size, "twell", training_speed, memory),
    ),
  )
