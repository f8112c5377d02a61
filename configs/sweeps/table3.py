"""Table 3 of the paper: ReLU against SiLU, 1.5B.

Not run here: needs eight GPUs of 80 GB for about three days (26 hours a run; configs/lm/paper.py says where
this estimate comes from).

python -m experiments.sweep --config=configs/lm/paper_1_5b.py --sweep=configs/sweeps/table3.py --workdir=runs/table3
"""

from configs.sweeps.shrink import Sweep


def get_sweep() -> Sweep:
  return {
    "relu_dense": {"model.ffn_kind": "gated_relu", "sparsity.l1_coefficient": 0.0},
    "silu_dense": {"model.ffn_kind": "gated_silu", "sparsity.l1_coefficient": 0.0},
    "relu_sparse": {"model.ffn_kind": "gated_relu", "sparsity.l1_coefficient": 2e-5},
  }
