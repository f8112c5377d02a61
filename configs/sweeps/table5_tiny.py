"""Tiny twin of table5.py: the warm-up takes the same shares of the run, a sixth at 0 and a sixth to rise.

python -m experiments.sweep --config=configs/lm/tiny.py --sweep=configs/sweeps/table5_tiny.py --workdir=runs/table5_tiny
"""

from configs.sweeps.shrink import Sweep, shrink
from configs.sweeps.table5 import table5


def get_sweep() -> Sweep:
  return shrink(table5(15, 30), steps=90)
