"""How good predicted probabilities are: NE, log loss, calibration, AUC, and AUC within users.

Predictions are logits, so that a confident one is not rounded to 0 or 1. All is over a whole evaluation: sums and
histograms of its parts add up to the same numbers, whatever the size of a batch or the number of devices.

Dimension key: N predictions, S values of a histogram.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

_BITS = 20  # of a float32 that choose its bin: sign, exponent, 11 of the significand


class GroupedAuc(NamedTuple):
  value: float  # NaN if no user has both labels
  users: int  # that have both labels
  left_out: int  # users with one label, whose AUC is not defined


@dataclasses.dataclass(frozen=True)
class PredictionSums:
  """What evaluation keeps of predictions; parts add up by `+`, exactly but for the rounding of float64."""

  number: int
  positives: int
  loss: float  # nats
  probability: float
  histogram_2S: np.ndarray  # i64[2, 2**20]: negatives and positives in each bin of logits

  @classmethod
  def of(cls, logits_N: np.ndarray, labels_N: np.ndarray) -> "PredictionSums":
    """Of finite logits and labels 0 or 1."""
    logits_N, labels_N = _checked(logits_N, labels_N)
    bins_N = _bins(logits_N)
    counts = [np.bincount(bins_N[labels_N == label], minlength=1 << _BITS) for label in (0, 1)]
    return cls(
      number=len(labels_N),
      positives=int(labels_N.sum()),
      loss=float(_losses(logits_N, labels_N).sum()),
      probability=float(_sigmoid(logits_N).sum()),
      histogram_2S=np.stack(counts).astype(np.int64),
    )

  def __add__(self, other: "PredictionSums") -> "PredictionSums":
    fields = (field.name for field in dataclasses.fields(self))
    return PredictionSums(**{name: getattr(self, name) + getattr(other, name) for name in fields})

  @property
  def logloss(self) -> float:
    """Mean, in nats; NaN of nothing."""
    return _ratio(self.loss, self.number)

  @property
  def ne(self) -> float:
    """Normalised entropy: log loss over that of always predicting the mean label; NaN if all labels are the same."""
    return _ratio(self.logloss, entropy(_ratio(self.positives, self.number)))

  @property
  def calibration(self) -> float:
    """Predicted over observed positives; NaN if there are none."""
    return _ratio(self.probability, self.positives)

  @property
  def auc(self) -> float:
    """Logits in one bin, which differ by less than 1 in 2048, count as equal; NaN if all labels are the same."""
    return _auc(*self.histogram_2S)


def entropy(rate: float) -> float:
  """Of a label that is 1 at this rate, in nats."""
  return float(-sum(p * np.log(p) for p in (rate, 1 - rate) if p > 0)) if np.isfinite(rate) else np.nan


def auc(scores_N: np.ndarray, labels_N: np.ndarray) -> float:
  """Share of pairs of a positive and a negative in which the positive has the higher score; equal ones count half.

  NaN if all labels are the same.
  """
  scores_N, labels_N = _checked(scores_N, labels_N)
  _, value_N = np.unique(scores_N, return_inverse=True)
  return _auc(*(np.bincount(value_N[labels_N == label], minlength=len(labels_N)) for label in (0, 1)))


def grouped_auc(scores_N: np.ndarray, labels_N: np.ndarray, users_N: np.ndarray) -> GroupedAuc:
  """Mean of the users' AUC, each weighted by its number of predictions; users with one label are left out."""
  scores_N, labels_N = _checked(scores_N, labels_N)
  users_N = np.asarray(users_N)
  if users_N.shape != labels_N.shape:
    raise ValueError(f"grouped_auc: users_N has shape {users_N.shape} and labels_N has {labels_N.shape}")
  order = np.argsort(users_N, kind="stable")
  changes = np.flatnonzero(users_N[order][1:] != users_N[order][:-1]) + 1
  groups = [group for group in np.split(order, changes) if len(group)]  # nothing splits into one part of nothing
  found = [(auc(scores_N[group], labels_N[group]), len(group)) for group in groups]
  kept = [(value, size) for value, size in found if not np.isnan(value)]
  total = sum(size for _, size in kept)
  return GroupedAuc(_ratio(sum(value * size for value, size in kept), total), len(kept), len(found) - len(kept))


def reliability(logits_N: np.ndarray, labels_N: np.ndarray, groups: int = 10) -> tuple[list[float], list[float]]:
  """Mean prediction and mean label of groups of equal size, by rising prediction; of few predictions, fewer groups."""
  logits_N, labels_N = _checked(logits_N, labels_N)
  order = np.argsort(logits_N, kind="stable")
  parts = [part for part in np.array_split(order, groups) if len(part)]
  return [float(_sigmoid(logits_N[part]).mean()) for part in parts], [float(labels_N[part].mean()) for part in parts]


def _checked(scores_N, labels_N) -> tuple[np.ndarray, np.ndarray]:
  scores_N, labels_N = np.asarray(scores_N), np.asarray(labels_N)
  if scores_N.ndim != 1 or scores_N.shape != labels_N.shape:
    raise ValueError(f"predictions of shape {scores_N.shape} and labels of {labels_N.shape} must both be [N]")
  if (bad := np.flatnonzero(~np.isfinite(scores_N))).size:
    raise ValueError(f"prediction {bad[0]} is {scores_N[bad[0]]}; it has no place in an order")
  if (bad := np.flatnonzero((labels_N != 0) & (labels_N != 1))).size:
    raise ValueError(f"label {bad[0]} is {labels_N[bad[0]]}; labels must be 0 or 1")
  return scores_N, labels_N.astype(np.int64)


def _auc(negatives_S: np.ndarray, positives_S: np.ndarray) -> float:
  """From counts by rising score; integers until the last division."""
  below_S = np.cumsum(negatives_S) - negatives_S
  twice = np.sum(positives_S * (2 * below_S + negatives_S), dtype=object)  # of any size
  return _ratio(int(twice), 2 * int(negatives_S.sum()) * int(positives_S.sum()))


def _bins(logits_N: np.ndarray) -> np.ndarray:
  """Upper bits of float32, in the order of the numbers: negative ones have theirs reversed."""
  bits_N = (logits_N.astype(np.float32) + np.float32(0)).view(np.uint32)  # -0 becomes 0
  ordered_N = np.where(bits_N >> 31 == 1, ~bits_N, bits_N | np.uint32(1 << 31))
  return (ordered_N >> np.uint32(32 - _BITS)).astype(np.int64)


def _losses(logits_N: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
  logits_N = logits_N.astype(np.float64)
  return np.logaddexp(0, logits_N) - labels_N * logits_N


def _sigmoid(logits_N: np.ndarray) -> np.ndarray:
  return np.exp(-np.logaddexp(0, -logits_N.astype(np.float64)))


def _ratio(a: float, b: float) -> float:
  return float(a / b) if b else np.nan
