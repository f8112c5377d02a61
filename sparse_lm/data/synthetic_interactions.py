"""Made-up interactions whose true probabilities are known, so that a model can be judged against the best there is.

A click of user u on item i, of category c, at time t is drawn with probability sigmoid(z):

  z = BIAS + quality[i] + taste[segment[u], c] + HISTORY_WEIGHT * sum_j 2^(-(t - t_j) / HALF_LIFE)

The sum is over the user's newest TEACHER_REMEMBERS events strictly earlier than t, those of them whose item is of
category c too. No sum of a function of u and one of i expresses taste; no function of u and i expresses the history.
Quality and taste are normal. The log tells what the teacher sees: segment is a feature of users, category one of items.

The i-th most frequent item has a share in proportion to 1 / i; the length of a user's history is log-normal, with the
median and mean of MovieLens-100K; gaps between events are log-normal, from none to months.

Dimension key: N events, U users, V items, C categories, S segments, M events of a chunk, T entries of histories.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from sparse_lm.data.interactions import Categories, Entities, Interactions, histories
from sparse_lm.errors import UserError

NUM_CATEGORIES = 16
NUM_SEGMENTS = 8
TEACHER_REMEMBERS = 64  # events; of the older ones, 1 in 200 would weigh more than 1/1000
HALF_LIFE = 6 * 3600.0  # seconds
BIAS = -2.5
QUALITY_SCALE = 0.5
TASTE_SCALE = 1.0
HISTORY_WEIGHT = 2.0

_MEDIAN_LENGTH, _LOG_LENGTH_SCALE = 64.0, 1.0  # mean 106
_MEDIAN_GAP, _LOG_GAP_SCALE = 600.0, 3.0  # seconds; one in 60 is shorter than one
_FIRST_SECOND, _SECONDS = 1_600_000_000, 180 * 86_400  # when users begin
_EVENTS_AT_ONCE = 1 << 14  # bounds the memory for their histories


class Synthetic(NamedTuple):
  log: Interactions  # label 1 for a click, else 0
  logit_N: np.ndarray  # f64, z
  probability_N: np.ndarray  # f64, of a click: sigmoid(z), which may round to 1


def generate(*, num_users: int, num_items: int, seed: int) -> Synthetic:
  """The same arguments give the same events."""
  if num_users < 1 or num_items < 1 or seed < 0:
    raise UserError(
      "synthetic interactions need at least 1 user, 1 item and a seed of at least 0, got"
      f" num_users={num_users}, num_items={num_items}, seed={seed}"
    )
  rng = np.random.default_rng(seed)
  user_N, time_N = _users_and_times(rng, num_users)
  item_N = _power_law(rng, num_items, len(user_N))
  segment_U = rng.integers(0, NUM_SEGMENTS, num_users, dtype=np.int32)
  category_V = rng.integers(0, NUM_CATEGORIES, num_items, dtype=np.int32)
  quality_V = rng.normal(scale=QUALITY_SCALE, size=num_items)
  taste_SC = rng.normal(scale=TASTE_SCALE, size=(NUM_SEGMENTS, NUM_CATEGORIES))
  log = Interactions(
    user_N=user_N,
    item_N=item_N,
    time_N=time_N,
    label_N=None,
    users=_entities("u", {"segment": Categories.one_each(segment_U, NUM_SEGMENTS)}, num_users),
    items=_entities("i", {"category": Categories.one_each(category_V, NUM_CATEGORIES)}, num_items),
  )
  taste_N = taste_SC[segment_U[user_N], category_V[item_N]]
  logit_N = BIAS + quality_V[item_N] + taste_N + HISTORY_WEIGHT * recent_matches(log, category_V[item_N])
  probability_N = 1 / (1 + np.exp(-logit_N))
  clicked_N = rng.random(len(log)) < probability_N
  return Synthetic(dataclasses.replace(log, label_N=clicked_N.astype(np.float32)), logit_N, probability_N)


def recent_matches(log: Interactions, category_N: np.ndarray) -> np.ndarray:
  """f64[N]: the teacher's sum over the history of each event."""
  past = histories(log, longest=TEACHER_REMEMBERS)
  sum_N = np.empty(len(log))
  for start in range(0, len(log), _EVENTS_AT_ONCE):
    events_M = np.arange(start, min(start + _EVENTS_AT_ONCE, len(log)))
    offsets, past_T = past.gather(events_M)
    event_T = np.repeat(events_M, np.diff(offsets))
    weight_T = np.exp2((log.time_N[past_T] - log.time_N[event_T]) / HALF_LIFE)
    matches_T = category_N[past_T] == category_N[event_T]
    sum_N[events_M] = np.bincount(event_T - start, weights=weight_T * matches_T, minlength=len(events_M))
  return sum_N


def _users_and_times(rng: np.random.Generator, num_users: int) -> tuple[np.ndarray, np.ndarray]:
  """Of all events, by time."""
  length_U = np.ceil(rng.lognormal(np.log(_MEDIAN_LENGTH), _LOG_LENGTH_SCALE, num_users)).astype(np.int64)
  user_N = np.repeat(np.arange(num_users, dtype=np.int32), length_U)
  begin_U = _FIRST_SECOND + rng.integers(0, _SECONDS, num_users)
  passed_N = np.cumsum(rng.lognormal(np.log(_MEDIAN_GAP), _LOG_GAP_SCALE, len(user_N)).astype(np.int64))
  first_U = np.cumsum(length_U) - length_U
  time_N = begin_U[user_N] + passed_N - passed_N[first_U[user_N]]
  order_N = np.argsort(time_N, kind="stable")
  return user_N[order_N], time_N[order_N]


def _power_law(rng: np.random.Generator, num_items: int, number: int) -> np.ndarray:
  share_V = 1 / np.arange(1, num_items + 1)
  return rng.choice(num_items, size=number, p=share_V / share_V.sum()).astype(np.int32)


def _entities(letter: str, categorical: dict[str, Categories], number: int) -> Entities:
  return Entities([f"{letter}{row}" for row in range(number)], categorical=categorical)
