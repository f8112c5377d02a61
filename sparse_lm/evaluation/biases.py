"""Floors that a recommender must be above: a probability as a sum of means, with nothing learnt by gradients.

  p = mean + b[item] + b[user],   b[item] = sum(label - mean) / (number + SHRINK_ITEM),   b[user] alike of what is left

The means are those of training. `running` takes for b[user] the events of the user strictly before the one that is
predicted instead, those after training too: what a history can say without looking at its items.

Dimension key: N events of a log, M of its events, R users or items.
"""

import numpy as np

from sparse_lm.data.interactions import Interactions, histories

SHRINK_ITEM, SHRINK_USER, SHRINK_RUNNING = 10.0, 10.0, 5.0  # events at which a bias counts half
_SURE = 0.02  # no probability is nearer to 0 or 1


def bias_logits(log: Interactions, train_M: np.ndarray, *, running: bool) -> np.ndarray:
  """f32[N], of all events of a log with labels 0 and 1; `train_M` are the numbers of those that may be learnt from."""
  label_N = log.label_N
  assert label_N is not None, "biases of labels"
  mean = label_N[train_M].mean()
  item_bias_R = _shrunk(log.item_N[train_M], label_N[train_M] - mean, len(log.items), SHRINK_ITEM)
  rest_N = label_N - mean - item_bias_R[log.item_N]
  if running:
    offsets, past_T = histories(log, longest=len(log)).gather(np.arange(len(log)))
    sums_N = np.diff(np.concatenate([[0.0], np.cumsum(rest_N[past_T], dtype=np.float64)])[offsets])
    user_bias_N = sums_N / (np.diff(offsets) + SHRINK_RUNNING)
  else:
    user_bias_N = _shrunk(log.user_N[train_M], rest_N[train_M], len(log.users), SHRINK_USER)[log.user_N]
  p_N = np.clip(mean + item_bias_R[log.item_N] + user_bias_N, _SURE, 1 - _SURE)
  return np.log(p_N / (1 - p_N)).astype(np.float32)


def _shrunk(ids_M: np.ndarray, values_M: np.ndarray, rows: int, shrink: float) -> np.ndarray:
  """f64[R]"""
  return np.bincount(ids_M, values_M, rows) / (np.bincount(ids_M, minlength=rows) + shrink)
