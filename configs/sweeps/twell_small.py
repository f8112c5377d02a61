"""`small` with dense blocks, and trained by TwELL to 1 % of its neurons, on the same text; minutes each on one H200.

python -m experiments.sweep --config=configs/lm/small.py --sweep=configs/sweeps/twell_small.py \
  --workdir=runs/twell_small --config.data.source=python --config.data.path=FOLDER
"""

from configs.sweeps.shrink import Sweep
from configs.sweeps.twell_wide import twell


def get_sweep() -> Sweep:
  return twell(15.0)
