"""Load balance by Base Batch Shuffling: `python -m experiments.bench_batch_shuffling --record=runs/bench`.

Draws histories of log-normal lengths, those of users in `sparse_lm.data.synthetic_interactions` cut to their newest
2048 events, and deals batches of them in sub-batches. The work of a sample is the length of its history, or the square
of that, as in attention. Imbalance is max / mean of the work over the devices of a batch:

  as drawn         without shuffling
  normal loads     what that would be in the mean if loads were normal: 1 + v m_P / sqrt(M) on P devices of M samples,
                   v a sample's standard deviation over its mean, m_P the mean maximum of P standard normal numbers
  dealt            over the devices of the batch by `local_batches`, of this work
  dealt by length  the same, of lengths, whatever the work is
  snake order      in turns, 1 2 ... P P ... 2 1 1 2 ..., for comparison
  own batches      over the next 8 batches of each device by `local_batches`: no sample changes its device
  at least         no dealing over the devices goes below: the heaviest sub-batch, together with the lightest ones
  at most          what `local_batches` guarantees for `dealt`

No time is taken: every machine gives the same numbers. Writes a record and prints it as a table.

Dimension key: W batches of a window, P devices, M samples of a device, S sub-batches of a batch, Q of a device,
L lengths.
"""

from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

import numpy as np
from absl import flags

from pallas_kernels import bench
from sparse_lm.benchmark import RECORD, record_cases
from sparse_lm.data.batch_shuffling import SUB_BATCH, imbalance, local_batches
from sparse_lm.errors import UserError
from sparse_lm.flags import run

flags.declare_key_flag("record")
_WINDOWS = flags.DEFINE_integer("windows", 40, "independent draws of 8 batches", lower_bound=1)
_MEDIAN = flags.DEFINE_float("median_length", 64.0, "of a history, before it is cut", lower_bound=1.0, upper_bound=1e6)
_SCALE = flags.DEFINE_float("log_scale", 1.0, "standard deviation of a length's logarithm", 0.01, upper_bound=10.0)
_LONGEST = flags.DEFINE_integer("longest", 2048, "events of a history", lower_bound=1, upper_bound=1 << 20)

Json = dict[str, Any]
DEVICES = (2, 8, 64, 512)
SUB_BATCHES = (2, 4, 8)  # of a device
WINDOW = 8  # batches
POWERS = {"length": 1, "length^2": 2}


def main(argv: list[str]) -> None:
  """Measures, records, prints."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  if not RECORD.value:
    raise UserError("--record is missing; name a new folder, such as --record=runs/bench_batch_shuffling")
  asked = {
    "windows": _WINDOWS.value,
    "median_length": _MEDIAN.value,
    "log_scale": _SCALE.value,
    "longest": _LONGEST.value,
  }
  record_cases(RECORD.value, asked, cases(**asked), table)


def cases(*, windows: int, median_length: float, log_scale: float, longest: int) -> Iterator[Json]:
  """Yields every number of devices and of sub-batches, for both kinds of work."""
  share_L = length_shares(median_length, log_scale, longest)
  for devices in DEVICES:
    for room in SUB_BATCHES:
      rng = np.random.default_rng([devices, room])
      found: dict[str, list[dict[str, float]]] = {name: [] for name in POWERS}
      for _ in range(windows):
        shape_WPM = (WINDOW, devices, room * SUB_BATCH)
        length_WPM = np.minimum(np.ceil(rng.lognormal(np.log(median_length), log_scale, shape_WPM)), longest)
        for name, power in POWERS.items():
          found[name] += imbalances(length_WPM, power)
      for name, power in POWERS.items():
        yield {
          "devices": devices,
          "sub_batches": room,
          "work": name,
          "batches": len(found[name]),
          "normal": normal_imbalance(share_L, power, devices, room * SUB_BATCH),
          **{key: _summary([batch[key] for batch in found[name]]) for key in found[name][0]},
        }


def imbalances(length_WPM: np.ndarray, power: int) -> list[dict[str, float]]:
  """Those of each batch of a window."""
  work_WPM = length_WPM**power
  work_WPQ = work_WPM.reshape(*work_WPM.shape[:2], -1, SUB_BATCH).sum(axis=3)
  own_WP = np.stack(
    [_own_batches(*of_device) for of_device in zip(work_WPM.swapaxes(0, 1), work_WPQ.swapaxes(0, 1))], 1
  )
  return [_imbalances(*batch) for batch in zip(length_WPM, work_WPM, work_WPQ, own_WP)]


def _own_batches(work_WM: np.ndarray, work_WQ: np.ndarray) -> np.ndarray:
  """f64[W]: the loads of one device, its batches dealt anew."""
  return work_WQ.ravel()[local_batches(work_WM.ravel(), len(work_WM))].sum(axis=1)


def _imbalances(length_PM: np.ndarray, work_PM: np.ndarray, work_PQ: np.ndarray, own_P: np.ndarray) -> dict[str, float]:
  devices, room = work_PQ.shape
  work_S = work_PQ.ravel()
  load, ascending_S = work_S.sum() / devices, np.sort(work_S)
  dealt = lambda sub_batches_PQ: imbalance(work_S[sub_batches_PQ].sum(axis=1))
  return {
    "drawn": imbalance(work_PQ.sum(axis=1)),
    "dealt": dealt(local_batches(work_PM.ravel(), devices)),
    "dealt_by_length": dealt(local_batches(length_PM.ravel(), devices)),
    "snake": dealt(snake(work_S, devices)),
    "own_batches": imbalance(own_P),
    "at_least": max(1.0, float(ascending_S[-1] + ascending_S[: room - 1].sum()) / load),
    "at_most": 1 + (1 - 1 / devices) * float(ascending_S[-1] - ascending_S[0]) / load,
  }


def snake(work_S: np.ndarray, devices: int) -> np.ndarray:
  """i64[P, Q]: sub-batches from the heaviest on, dealt in turns that go there and back."""
  order_QP = np.argsort(-work_S, kind="stable").reshape(-1, devices)
  order_QP[1::2] = order_QP[1::2, ::-1]
  return order_QP.T


def length_shares(median_length: float, log_scale: float, longest: int) -> np.ndarray:
  """f64[L]: the probability of each length from 1 to the longest, which has all that is cut."""
  below = NormalDist(np.log(median_length), log_scale).cdf
  up_to_L = np.array([below(np.log(length)) for length in range(1, longest)] + [1.0])
  return np.diff(up_to_L, prepend=0.0)


def normal_imbalance(share_L: np.ndarray, power: int, devices: int, samples: int) -> float:
  """Mean imbalance of normal loads: how far they lie from their mean does not depend on that mean."""
  work_L = np.arange(1, len(share_L) + 1, dtype=float) ** power
  mean = share_L @ work_L
  deviation = np.sqrt(share_L @ (work_L - mean) ** 2)
  return float(1 + deviation / mean / np.sqrt(samples) * largest_of_normals(devices))


def largest_of_normals(number: int) -> float:
  """Mean of the maximum of so many standard normal numbers: the integral of x over the density of the maximum."""
  x, step = np.linspace(-10, 10, 20_001, retstep=True)
  below = np.array([NormalDist().cdf(value) for value in x])
  density = number * below ** (number - 1) * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
  return float(np.sum(x * density) * step)


def _summary(values: list[float]) -> Json:
  return {"mean": float(np.mean(values)), "p99": float(np.percentile(values, 99))}


def table(cases: list[Json]) -> str:
  """Markdown of a record: means, and 99th percentiles in brackets."""
  shown = {
    "drawn": "as drawn",
    "normal": "normal loads",
    "dealt": "dealt",
    "dealt_by_length": "dealt by length",
    "snake": "snake order",
    "own_batches": "own batches",
    "at_least": "at least",
    "at_most": "at most",
  }
  header = ["devices", "sub-batches of a device", "work", *shown.values()]
  both = lambda value: f"{value:.3f}" if isinstance(value, float) else f"{value['mean']:.3f} ({value['p99']:.3f})"
  rows = [[str(c["devices"]), str(c["sub_batches"]), c["work"], *(both(c[key]) for key in shown)] for c in cases]
  return bench.markdown_table(header, rows)


if __name__ == "__main__":
  run(main)
