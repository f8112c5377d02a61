"""Tiny twin of table3.py.

python -m experiments.sweep --config=configs/lm/tiny.py --sweep=configs/sweeps/table3_tiny.py --workdir=runs/table3_tiny
"""

from configs.sweeps import table3
from configs.sweeps.shrink import Sweep, shrink


def get_sweep() -> Sweep:
  return shrink(table3.get_sweep())
