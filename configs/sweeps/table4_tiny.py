"""Tiny twin of table4.py: three matrices of 512 neurons or two of 768, the same number of parameters.

python -m experiments.sweep --config=configs/lm/tiny.py --sweep=configs/sweeps/table4_tiny.py --workdir=runs/table4_tiny
"""

from configs.sweeps.shrink import Sweep, shrink
from configs.sweeps.table4 import table4


def get_sweep() -> Sweep:
  return shrink(table4(gated_width=512, nongated_width=768))
