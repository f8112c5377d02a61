"""Figures 2, 3, 8 and 9 of the paper: eight L1 coefficients, 1.5B.

The paper names 0, 1.5e-5, 2e-5, 3e-5 and 1e-4; 5e-6, 1e-5 and 5e-5 are our choice to make them eight.

Not run here: needs eight GPUs of 80 GB for about nine days (26 hours a run; configs/lm/paper.py says where
this estimate comes from).

python -m experiments.sweep --config=configs/lm/paper_1_5b.py --sweep=configs/sweeps/l1.py --workdir=runs/l1
"""

from configs.sweeps.shrink import Sweep


def get_sweep() -> Sweep:
  coefficients = ("0", "5e-6", "1e-5", "1.5e-5", "2e-5", "3e-5", "5e-5", "1e-4")
  return {f"l1_{text}": {"sparsity.l1_coefficient": float(text)} for text in coefficients}
