"""Tiny twin of table1.py: one to four layers, steps in the paper's proportion.

python -m experiments.sweep --config=configs/lm/tiny.py --sweep=configs/sweeps/table1_tiny.py --workdir=runs/table1_tiny
"""

from configs.sweeps.shrink import Sweep, shrink
from configs.sweeps.table1 import table1


def get_sweep() -> Sweep:
  return shrink(table1({"0_5b": (1, 30), "1b": (2, 60), "1_5b": (3, 90), "2b": (4, 120)}))
