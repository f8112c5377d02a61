"""Users as rows of items, oldest first: what a next-item model is trained on, and what it is judged by.

The last event of a user is the test, the one before it validation, and the rest is training. A row ends with the event
that is predicted last: with the last one of training, with that of validation, or with that of the test; every part
thus sees all that happened before what it predicts. In a user's events of one second, the one that lies last in the log
is the last, as in `interactions.leave_last_out`.

A model is to predict token t + 1 of a row from the tokens up to t, and from the second of token t + 1, which is that of
the request. So the last item of a row reaches no prediction. A row is the same whoever shares its batch.

Dimension key: N events of a log, R rows, B rows of a batch, T packed tokens, V items, U users.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparse_lm.data import movielens
from sparse_lm.data.cache import cache_root
from sparse_lm.data.interactions import Interactions
from sparse_lm.data.progress import Report
from sparse_lm.errors import UserError
from sparse_lm.next_item_config import NextItemConfig
from sparse_lm.recsys_config import InteractionsConfig

_FEWEST = 4  # events of a user: two to learn from, one for validation, one for the test


class Batch(NamedTuple):
  """A pytree; row b is tokens offsets[b] <= t < offsets[b + 1], and what lies behind offsets[-1] is padding."""

  item_T: np.ndarray  # i32
  time_T: np.ndarray  # i32, seconds since the first token of the row
  offsets: np.ndarray  # i32[B + 1]


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
  """Row r is the events `order_N[begin_R[r]:end_R[r]]`, at least two. `gather` packs any rows, `len` counts them."""

  log: Interactions
  order_N: np.ndarray  # events by user, then time
  begin_R: np.ndarray
  end_R: np.ndarray
  batch_size: int
  longest: int

  def __len__(self) -> int:
    return len(self.end_R)

  @property
  def last_item_R(self) -> np.ndarray:
    """i32, what is predicted last in each row."""
    return self.log.item_N[self.order_N[self.end_R - 1]]

  def gather(self, numbers_B: np.ndarray) -> Batch:
    """The rows of these numbers, at most `batch_size`; empty rows follow. All batches have one shape."""
    begin_B, length_B = self.begin_R[numbers_B], (self.end_R - self.begin_R)[numbers_B]
    offsets = np.zeros(self.batch_size + 1, np.int32)
    offsets[1:] = np.cumsum(np.pad(length_B, (0, self.batch_size - len(length_B))))
    first_T = np.repeat(begin_B, length_B)
    places_T = first_T + np.arange(offsets[-1]) - np.repeat(offsets[: len(length_B)], length_B)
    event_T, start_T = self.order_N[places_T], self.order_N[first_T]
    pad = lambda values_T: np.pad(values_T.astype(np.int32), (0, self.batch_size * self.longest - len(values_T)))
    return Batch(pad(self.log.item_N[event_T]), pad(self.log.time_N[event_T] - self.log.time_N[start_T]), offsets)


class Parts(NamedTuple):
  """Rows of the same users, in the same order."""

  train: Sequences
  validation: Sequences
  test: Sequences
  counts_V: np.ndarray  # i64, how often each item occurs in the training part, before it is cut to the newest events
  left_out: int  # users with too few events


def sequences(log: Interactions, *, longest: int, batch_size: int) -> Parts:
  """Returns the rows of each part of a log, each with its newest `longest` events.

  Args:
    log: users with fewer than four events are left out.
    longest: tokens of a row, at least 2.
    batch_size: rows of a batch.

  Raises:
    UserError: seconds of a user lie too far apart for 32 bits.
  """
  order_N = np.lexsort((log.time_N, log.user_N))
  count_U = np.bincount(log.user_N, minlength=len(log.users))
  end_U = np.cumsum(count_U)
  kept_U = count_U >= _FEWEST
  start_R, end_R = (end_U - count_U)[kept_U], end_U[kept_U]
  _check_seconds(log, order_N, start_R, end_R)
  part = lambda end_R: Sequences(log, order_N, np.maximum(start_R, end_R - longest), end_R, batch_size, longest)
  place_N = np.arange(len(log)) - (end_U - count_U)[log.user_N[order_N]]
  trains_N = kept_U[log.user_N[order_N]] & (place_N < count_U[log.user_N[order_N]] - 2)
  counts_V = np.bincount(log.item_N[order_N[trains_N]], minlength=len(log.items))
  left_out = int(np.sum(~kept_U & (count_U > 0)))
  return Parts(part(end_R - 2), part(end_R - 1), part(end_R), counts_V, left_out)


def open_sequences(config: NextItemConfig, report: Report) -> Parts:
  """Returns the same value for the same config and files, on any machine.

  Raises:
    UserError: the files cannot be read, or no user has enough events.
  """
  data = config.data
  if data.source == "movielens_100k":
    folder = movielens.fetch_100k(cache_root(InteractionsConfig(cache_dir=data.cache_dir)), report)
  else:
    folder = Path(data.path or "").expanduser()
  log = movielens.read(folder, report)
  parts = sequences(log, longest=data.longest, batch_size=config.training.batch_size)
  few = f"fewer than {_FEWEST} events"
  report(
    f"data: {len(parts.train):,} users, {len(log.items):,} items, {parts.counts_V.sum():,} training events, of which"
    f" the newest {data.longest} of a user are used; {parts.left_out:,} users with {few} are left out"
  )
  if not len(parts.train):
    raise UserError(f"data: every user has {few}: two to learn from, one for validation, one for the test; give more")
  return parts


def _check_seconds(log: Interactions, order_N: np.ndarray, start_R: np.ndarray, end_R: np.ndarray) -> None:
  first_R, last_R = log.time_N[order_N[start_R]], log.time_N[order_N[end_R - 1]]
  span_R = last_R.astype(np.float64) - first_R.astype(np.float64)  # of huge times, whole numbers would overflow
  if (bad := np.flatnonzero(span_R >= 2**31)).size:
    user = log.users.names[log.user_N[order_N[start_R[bad[0]]]]]
    raise UserError(
      f"data: the events of user {user!r} span {span_R[bad[0]]:.0f} seconds, and times of a row must lie less than"
      " 2**31 apart; are they seconds?"
    )
