"""`wide` with dense blocks, and trained by TwELL to 0.5 % of its neurons, on the same text; minutes each on one H200.

python -m experiments.sweep --config=configs/lm/wide.py --sweep=configs/sweeps/twell_wide.py \
  --workdir=runs/twell_wide --config.data.source=python --config.data.path=FOLDER
"""

from configs.sweeps.shrink import Sweep


def twell(non_zeros: float) -> Sweep:
  """A controller steers the L1 coefficient from here to so many non-zeros a token, for better or for worse."""
  sparse = {"model.ffn_implementation": "twell", "sparsity.l1_coefficient": 1e-5, "sparsity.target_l0": non_zeros}
  return {"dense": {"sparsity.l1_coefficient": 0.0}, "twell": sparse}


def get_sweep() -> Sweep:
  return twell(28.0)
