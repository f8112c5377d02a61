"""Table 5 of the paper: keeping neurons alive, 1.5B.

Dense, standard, re-initialisation of a tenth of each dead gate row after every step, and a warm-up of a larger L1
coefficient: none for 5000 steps, then a linear rise over 5000.

Not run here: needs eight GPUs of 80 GB for about four days (26 hours a run; configs/lm/paper.py says where
this estimate comes from).

python -m experiments.sweep --config=configs/lm/paper_1_5b.py --sweep=configs/sweeps/table5.py --workdir=runs/table5
"""

from configs.sweeps.shrink import Sweep


def table5(warmup_start: int, warmup_end: int) -> Sweep:
  return {
    "dense": {"sparsity.l1_coefficient": 0.0},
    "standard": {"sparsity.l1_coefficient": 2e-5},
    "reinit": {"sparsity.l1_coefficient": 2e-5, "sparsity.reinit_rate": 0.1},
    "l1_warmup": {
      "sparsity.l1_coefficient": 3e-4,
      "sparsity.l1_warmup_start": warmup_start,
      "sparsity.l1_warmup_end": warmup_end,
    },
  }


def get_sweep() -> Sweep:
  return table5(5000, 10_000)
