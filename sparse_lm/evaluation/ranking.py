"""How high the right item ranks among all items of a catalogue: HR@K and NDCG@K.

Ties are broken against the model: an item that has the same score as others ranks behind them all. Otherwise a model
that gives every item the same score would look perfect.

Dimension key: N predictions, V items.
"""

import numpy as np


def ranks(scores_NV: np.ndarray, target_N: np.ndarray) -> np.ndarray:
  """i64[N]: place of each target among the items, 1 for the best; the last of those with its score.

  Items that are not to be ranked have a score of -inf. A target whose score is -inf or NaN is behind everything, and so
  is one beside NaN scores, which count as higher.

  Raises:
    ValueError: a target is no item.
  """
  scores_NV, target_N = np.asarray(scores_NV), np.asarray(target_N)
  if scores_NV.ndim != 2 or target_N.shape != scores_NV.shape[:1]:
    raise ValueError(
      f"ranks: scores_NV of shape {scores_NV.shape} and target_N of {target_N.shape} do not fit together"
    )
  num_items = scores_NV.shape[1]
  if (bad := np.flatnonzero((target_N < 0) | (target_N >= num_items))).size:
    raise ValueError(f"ranks: target {bad[0]} is {target_N[bad[0]]}; items are 0 to {num_items - 1}")
  own_N1 = np.take_along_axis(scores_NV, target_N[:, None].astype(np.int64), axis=1)
  return num_items - np.sum(scores_NV < own_N1, axis=1)


def hit_rate(ranks_N: np.ndarray, k: int) -> float:
  """HR@k: share of targets among the first k; NaN of none."""
  return float(np.mean(ranks_N <= k)) if len(ranks_N) else np.nan


def ndcg(ranks_N: np.ndarray, k: int) -> float:
  """NDCG@k with one right item each: mean of 1 / log2(1 + rank) where rank <= k, else 0; NaN of none."""
  return float(np.mean(np.where(ranks_N <= k, 1 / np.log2(1 + ranks_N), 0))) if len(ranks_N) else np.nan
