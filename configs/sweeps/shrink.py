"""Turns a sweep of the paper into its tiny twin: the same runs on configs/lm/tiny.py, seconds each on two CPU cores.

The coefficients stay the paper's, and so does their multiplier, 64, for a reason that configs/lm/paper.py gives: 2e-5
is a weight of 1.28e-3 at both sizes.
"""

from typing import Any

Sweep = dict[str, dict[str, Any]]


def shrink(sweep: Sweep, steps: int = 90) -> Sweep:
  """Returns the overlays with the multiplier, and with these steps where they set none."""
  return {name: {"sparsity.l1_multiplier": 64.0, "training.steps": steps} | overlay for name, overlay in sweep.items()}
