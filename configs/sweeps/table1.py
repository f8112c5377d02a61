"""Table 1 of the paper, and the models of its table 6: four sizes, each dense and sparse.

Not run here: needs eight GPUs of 80 GB for about a week (3, 11, 26 and 45 hours a run; configs/lm/paper.py
says where these estimates come from).

python -m experiments.sweep --config=configs/lm/paper_1_5b.py --sweep=configs/sweeps/table1.py --workdir=runs/table1
"""

from configs.sweeps.shrink import Sweep

# Layers and steps.
SIZES = {"0_5b": (8, 10_000), "1b": (18, 20_000), "1_5b": (28, 30_000), "2b": (38, 40_000)}


def table1(sizes: dict[str, tuple[int, int]]) -> Sweep:
  return {
    f"{size}_{kind}": {
      "model.num_layers": layers,
      "training.steps": steps,
      "sparsity.l1_coefficient": coefficient,
    }
    for size, (layers, steps) in sizes.items()
    for kind, coefficient in (("dense", 0.0), ("sparse", 2e-5))
  }


def get_sweep() -> Sweep:
  return table1(SIZES)
