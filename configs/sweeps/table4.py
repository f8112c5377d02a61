"""Table 4 of the paper: gated against non-gated feed-forward layers, 1.5B, at three L1 coefficients.

Not run here: needs eight GPUs of 80 GB for about six days (26 hours a run; configs/lm/paper.py says where
this estimate comes from).

python -m experiments.sweep --config=configs/lm/paper_1_5b.py --sweep=configs/sweeps/table4.py --workdir=runs/table4
"""

from configs.sweeps.shrink import Sweep


def table4(gated_width: int, nongated_width: int) -> Sweep:
  return {
    f"{kind}_{name}": {
      "model.ffn_kind": ffn_kind,
      "model.ffn_width": width,
      "sparsity.l1_coefficient": coefficient,
    }
    for kind, ffn_kind, width in (("gated", "gated_relu", gated_width), ("nongated", "relu", nongated_width))
    for name, coefficient in (("dense", 0.0), ("2e-5", 2e-5), ("3e-5", 3e-5))
  }


def get_sweep() -> Sweep:
  return table4(gated_width=5632, nongated_width=8192)
