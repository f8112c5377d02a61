"""Base Batch Shuffling: devices get sub-batches of about the same total work, however unequal the samples are.

A step lasts as long as its most loaded device, so what counts is imbalance = max / mean of the work over devices. The
samples are cut into sub-batches of consecutive ones; a sub-batch moves whole, so that what devices exchange stays in
blocks of that size. Sub-batches are sorted by work and dealt from the heaviest on, each to the lightest local batch
that has room; a local batch is what one device gets in one step. Of two sub-batches each, that pairs the heaviest with
the lightest, and no other pairs have a smaller maximum. Of more, it looks at the loads so far, where dealing in snake
order (1 2 2 1 1 2) looks at ranks alone and leaves more imbalance: `experiments/records/bench_batch_shuffling`. It is
no search: of more than two each, a lucky order of few sub-batches can be better.

Of x_1 >= ... >= x_S dealt to P, loads differ by at most x_1 - x_S, so imbalance <= 1 + (P - 1) (x_1 - x_S) / sum(x).

Dimension key: N samples, S sub-batches, P local batches, Q sub-batches of a local batch, M samples of a local batch.
"""

import heapq

import numpy as np

from sparse_lm.errors import UserError

SUB_BATCH = 128  # samples


def local_batches(work_N: np.ndarray, number: int, *, sub_batch: int = SUB_BATCH) -> np.ndarray:
  """Returns i64[P, Q], the numbers of the sub-batches of each local batch, ascending; each sub-batch occurs once.

  Over a global batch, `number` is that of its devices. Such a permutation leaves the gradient of the batch as it was
  but for rounding: it is a mean over all samples, and every device has as many. Over the next batches of one device,
  `number` is how many those are: the device keeps its samples, so that nothing has to be sent, but other samples share
  a step. The same work gives the same answer in every process.

  Args:
    work_N: what each sample costs, such as the length of its history; finite, not negative.
    number: local batches, all of the same size.
    sub_batch: samples of a sub-batch.

  Raises:
    UserError: the samples cannot be divided so, or a cost is negative or not finite.
  """
  work_N = np.asarray(work_N, np.float64)
  if number < 1 or sub_batch < 1:
    raise UserError(f"local_batches: number={number} and sub_batch={sub_batch} must both be at least 1")
  if work_N.ndim != 1 or len(work_N) % (number * sub_batch):
    raise UserError(
      f"local_batches: work of shape {work_N.shape} does not divide into {number} local batches of whole sub-batches of"
      f" {sub_batch} samples; give one number a sample, of a multiple of {number * sub_batch} samples"
    )
  wrong_N = ~(np.isfinite(work_N) & (work_N >= 0))
  if wrong_N.any():
    sample = int(wrong_N.argmax())
    raise UserError(f"local_batches: work {work_N[sample]} of sample {sample} must be finite and at least 0")
  return _dealt(work_N.reshape(-1, sub_batch).sum(axis=1), number)


def sample_numbers(sub_batches_PQ: np.ndarray, *, sub_batch: int = SUB_BATCH) -> np.ndarray:
  """Returns i64[P, M], the samples of local batches of these sub-batches, in that order."""
  return (sub_batches_PQ[:, :, None] * sub_batch + np.arange(sub_batch)).reshape(len(sub_batches_PQ), -1)


def imbalance(work_P: np.ndarray) -> float:
  """Returns max / mean: how much longer a step lasts than it would with equal loads. No work at all is balanced, 1."""
  work_P = np.asarray(work_P, np.float64)
  return float(work_P.max() / work_P.mean()) if work_P.any() else 1.0


# Why loads end at most x_1 - x_S apart. Of any two local batches, let a and b be the loads, i and j the numbers of
# sub-batches; then a - b + (j - i) z <= x_1 - z for all z from 0 to the next x, which for i = j and z = x_S is the
# claim. It stays true when b gets x, as z <= x. When a gets x, nothing changes at z = x; at z = 0 it is true if b has
# room, since then a <= b, and between them as all is linear; if b is full, j > i makes z = x the worst.
def _dealt(work_S: np.ndarray, number: int) -> np.ndarray:
  room = len(work_S) // number
  batches: list[list[int]] = [[] for _ in range(number)]
  loads = [(0.0, place) for place in range(number)]  # a heap of those with room; ties go to the first
  for sub_batch in np.argsort(-work_S, kind="stable").tolist():
    load, place = heapq.heappop(loads)
    batches[place].append(sub_batch)
    if len(batches[place]) < room:
      heapq.heappush(loads, (load + work_S[sub_batch], place))
  return np.sort(np.array(batches, np.int64), axis=1)
