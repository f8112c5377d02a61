"""A floor under next-item models: the same ranking for everybody, by how often an item was met in training.

Dimension key: N predictions, V items.
"""

import numpy as np


def popularity_ranks(counts_V: np.ndarray, target_N: np.ndarray) -> np.ndarray:
  """i64[N]: place of each target among all items, 1 for the most frequent; ties as in `ranking.ranks`."""
  ascending_V = np.sort(counts_V)
  return len(counts_V) - np.searchsorted(ascending_V, counts_V[target_N], side="left")
