"""Tiny twin of l1.py.

python -m experiments.sweep --config=configs/lm/tiny.py --sweep=configs/sweeps/l1_tiny.py --workdir=runs/l1_tiny
"""

from configs.sweeps import l1
from configs.sweeps.shrink import Sweep, shrink


def get_sweep() -> Sweep:
  return shrink(l1.get_sweep())
