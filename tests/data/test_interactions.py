"""What a log refuses, splits that divide no second, and histories that never hold the present or the future."""

import itertools
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sparse_lm.data.interactions import (
  Categories,
  Entities,
  Interactions,
  histories,
  leave_last_out,
  split_by_time,
  split_by_user_time,
)
from sparse_lm.errors import UserError

HUGE = 2**63 - 1
TENTHS = (7, 2, 1)
SPLITS = {
  "by_time": lambda log: split_by_time(log, [t / 10 for t in TENTHS]),
  "by_user_time": lambda log: split_by_user_time(log, [t / 10 for t in TENTHS]),
  "last_out": leave_last_out,
}
# (user, time) of each event, in the order of the file
LOGS = {
  "no_events": [],
  "one_event": [(0, 5)],
  "all_in_one_second": [(0, 5), (1, 5), (0, 5), (0, 5), (1, 5)],
  "one_user": [(0, t) for t in range(10)],
  "one_user_backwards": [(0, -t) for t in range(10)],
  "a_tie_at_every_cut": [(0, 0)] * 6 + [(0, 1)] * 3 + [(0, 2)],
  "unordered_with_ties": [(1, 3), (0, 2), (1, 1), (0, 2), (0, 1), (1, 3), (0, 9), (1, 0)],
  "times_whose_difference_overflows": [(0, HUGE), (0, -HUGE - 1), (0, 0), (0, HUGE), (0, HUGE - 1), (1, -HUGE - 1)],
  "users_without_events": [(2, 1), (2, 2)],
}
events = st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 3)), max_size=30)


def log_of(pairs, *, items=5, seed=0):
  rng = np.random.default_rng(seed)
  number = len(pairs)
  return Interactions(
    user_N=np.array([user for user, _ in pairs], np.int32),
    item_N=rng.integers(0, items, number).astype(np.int32),
    time_N=np.array([time for _, time in pairs], np.int64),
    label_N=rng.random(number).astype(np.float32),
    users=Entities(["ann", "bob", "cyd"]),
    items=Entities([f"film {n}" for n in range(items)]),
  )


def each_log(test):
  return pytest.mark.parametrize("log", [log_of(pairs) for pairs in LOGS.values()], ids=LOGS)(test)


# What a log refuses --------------------------------------------------------------------------------------------------


def columns(**changes):
  """Arguments of a log of three events, some of them changed."""
  good = dict(
    user_N=np.array([0, 1, 1]), item_N=np.array([2, 0, 1]), time_N=np.array([5, 6, 7]), label_N=np.array([1.0, 0, 1])
  )
  return good | dict(users=Entities(["ann", "bob"]), items=Entities(["a", "b", "c"])) | changes


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"item_N": [0, 3, 1]}, "feature item_N: row 1 has id 3, but its table has 3 rows"),
    ({"item_N": [0, 1, -1]}, "feature item_N: row 2 has id -1, but its table has 3 rows"),
    ({"user_N": np.array([2**40, 0, 0])}, f"feature user_N: row 0 has id {2**40}, but its table has 2 rows"),
    ({"user_N": np.array([0, 0, 2**64 - 1], np.uint64)}, f"feature user_N: row 2 has id {2**64 - 1}"),
    ({"users": Entities([])}, "feature user_N: row 0 has id 0, but its table has 0 rows"),
    ({"label_N": [0, 1, np.nan]}, "feature label_N: row 2 is nan"),
    ({"label_N": [0, np.inf, 0]}, "feature label_N: row 1 is inf"),
    ({"label_N": np.array([1e39, 0, 0])}, r"feature label_N: row 0 is 1e\+39"),
  ],
)
def test_an_event_that_cannot_be_is_named(changes, said):
  with pytest.raises(UserError, match=said):
    Interactions(**columns(**{k: v if isinstance(v, Entities) else np.asarray(v) for k, v in changes.items()}))


@pytest.mark.parametrize("name", ["item_N", "time_N", "label_N"])
def test_columns_of_other_lengths_are_refused(name):
  with pytest.raises(ValueError, match=rf"feature {name} has shape \(2,\) and must have \(3,\)"):
    Interactions(**columns(**{name: np.zeros(2, np.int32)}))


@pytest.mark.parametrize(
  ("name", "dtype"), [("user_N", np.float64), ("item_N", bool), ("time_N", np.float64), ("time_N", np.uint64)]
)
def test_columns_of_other_kinds_are_refused(name, dtype):
  with pytest.raises(TypeError, match=rf"{name}.*{np.dtype(dtype)}"):
    Interactions(**columns(**{name: np.zeros(3, dtype)}))


@pytest.mark.parametrize(
  ("feature", "said"),
  [
    (Categories.one_each(np.array([0, 4]), 4), r"feature f: row 1 \('bob'\) has id 4, but its table has 4 rows"),
    (Categories(np.array([0, 1, 9]), np.array([0, 0, 3]), 9), r"feature f: row 1 \('bob'\) has id 9"),
    (Categories(np.array([9, 1, 0]), np.array([0, 3, 3]), 9), r"feature f: row 0 \('ann'\) has id 9"),
    (Categories(np.array([0]), np.array([0, 1]), 1), r"feature f \(offsets\) has shape \(2,\) and must have \(3,\)"),
    (Categories(np.array([0, 0]), np.array([0, 2, 1]), 1), "offsets must rise from 0 to its 2 ids"),
    (Categories(np.array([0, 0]), np.array([1, 1, 2]), 1), "offsets must rise from 0"),
    (Categories(np.array([0, 0, 0]), np.array([0, 4, 3]), 1), "offsets must rise from 0"),
  ],
)
def test_a_category_that_cannot_be_is_named(feature, said):
  with pytest.raises(ValueError, match=said):
    Entities(["ann", "bob"], categorical={"f": feature})


def test_a_number_that_is_none_is_named():
  with pytest.raises(UserError, match=r"feature age: row 1 \('bob'\) is nan; it must be a finite number"):
    Entities(["ann", "bob"], numeric={"age": np.array([30, np.nan])})


def test_rows_without_a_value_are_legal():
  empty = Entities(["ann", "bob"], categorical={"f": Categories(np.zeros(0, np.int32), np.zeros(3, np.int32), 0)})
  assert empty.categorical["f"].offsets.tolist() == [0, 0, 0]


def test_columns_have_their_documented_types_and_cannot_be_written():
  log = Interactions(**columns())
  found = [column.dtype for column in (log.user_N, log.item_N, log.time_N, log.label_N)]
  assert found == [np.int32, np.int32, np.int64, np.float32]
  with pytest.raises(ValueError, match="read-only"):
    log.time_N[0] = 0


def test_ratings_become_clicks():
  log = Interactions(**columns(label_N=np.array([3.5, 4, 5]))).with_binary_labels(at_least=4)
  assert log.label_N.tolist() == [0, 1, 1]
  with pytest.raises(UserError, match="labels of at least 4 are asked for, but these interactions have none"):
    Interactions(**columns(label_N=None)).with_binary_labels(at_least=4)


# Splits --------------------------------------------------------------------------------------------------------------


def parts_by_loop(log, tenths, of_user):
  """Part of each event: how many cuts lie at or before the first event of its second."""
  result = []
  for user, time in zip(log.user_N, log.time_N):
    times = [t for u, t in zip(log.user_N, log.time_N) if u == user or not of_user]
    first = sorted(times).index(time)
    result.append(sum(round(Fraction(sum(tenths[:k]) * len(times), 10)) <= first for k in range(1, len(tenths))))
  return result


def check_splits(log):
  order = sorted(range(len(log)), key=lambda n: log.time_N[n])  # stable: ties in the order of the file
  for of_user, split in ((False, split_by_time), (True, split_by_user_time)):
    parts = split(log, [t / 10 for t in TENTHS])
    wanted = parts_by_loop(log, TENTHS, of_user)
    assert [part.tolist() for part in parts] == [[n for n in order if wanted[n] == p] for p in range(3)]


@each_log
def test_splits_equal_a_loop(log):
  check_splits(log)


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(events)
def test_splits_equal_a_loop_on_any_log(pairs):
  check_splits(log_of(pairs))


def test_ten_events_by_hand():
  log = log_of(LOGS["one_user_backwards"])
  assert [part.tolist() for part in split_by_time(log, (0.7, 0.2, 0.1))] == [[9, 8, 7, 6, 5, 4, 3], [2, 1], [0]]
  # 0.1 + 0.2 is a little more than 0.3.
  assert [len(part) for part in split_by_time(log, (0.1, 0.2, 0.7))] == [1, 2, 7]


def test_a_divided_second_goes_to_the_earlier_part():
  log = log_of([(0, 0)] * 6 + [(0, 1)] * 3 + [(0, 2)])
  assert [part.tolist() for part in split_by_time(log, (0.7, 0.2, 0.1))] == [[*range(9)], [], [9]]


def test_a_part_may_be_empty_by_request():
  assert [len(part) for part in split_by_time(log_of(LOGS["one_user"]), (0.9, 0, 0.1))] == [9, 0, 1]
  assert [len(part) for part in split_by_time(log_of(LOGS["one_user"]), (1,))] == [10]


@pytest.mark.parametrize("fractions", [(0.9, 0.2), (1.1, -0.1), (), (0.5, float("nan")), (80, 10, 10)])
def test_fractions_that_are_no_shares_are_refused(fractions):
  for split in (split_by_time, split_by_user_time):
    with pytest.raises(UserError, match=r"must add up to 1, got \("):
      split(log_of([]), fractions)


def test_the_last_event_of_every_user_is_held_out():
  log = log_of(LOGS["unordered_with_ties"])
  train, held_out = leave_last_out(log)
  assert held_out.tolist() == [5, 6]  # of events 0 and 5, in bob's last second, the later in the file
  assert train.tolist() == [7, 2, 4, 1, 3, 0]


def test_a_user_with_one_event_is_not_held_out():
  train, held_out = leave_last_out(log_of([(0, 4), (1, 2), (1, 3)]))
  assert (train.tolist(), held_out.tolist()) == ([1, 0], [2])


# Histories -----------------------------------------------------------------------------------------------------------


def history_by_loop(log, n, longest):
  earlier = [m for m in range(len(log)) if log.user_N[m] == log.user_N[n] and log.time_N[m] < log.time_N[n]]
  return sorted(earlier, key=lambda m: log.time_N[m])[max(0, len(earlier) - longest) :]


def rows_of(log, longest, events=None):
  offsets, past = histories(log, longest=longest).gather(np.arange(len(log)) if events is None else np.array(events))
  return [past[a:b].tolist() for a, b in itertools.pairwise(offsets)]


@each_log
@pytest.mark.parametrize("longest", [0, 1, 3, 100])
def test_histories_equal_a_loop(log, longest):
  assert rows_of(log, longest) == [history_by_loop(log, n, longest) for n in range(len(log))]


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(events, st.integers(0, 8))
def test_histories_equal_a_loop_on_any_log(pairs, longest):
  log = log_of(pairs)
  assert rows_of(log, longest) == [history_by_loop(log, n, longest) for n in range(len(log))]


def test_a_history_by_hand():
  log = log_of(LOGS["unordered_with_ties"])
  assert rows_of(log, 2) == [[7, 2], [4], [7], [4], [], [7, 2], [1, 3], []]


def test_chosen_events_come_in_the_order_that_was_asked_for():
  log = log_of(LOGS["unordered_with_ties"])
  assert rows_of(log, 2, [6, 4, 6]) == [[1, 3], [], [1, 3]]
  assert rows_of(log, 2, np.zeros(0, np.int64)) == []


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(st.data(), events.filter(bool), st.integers(1, 8))
def test_no_event_of_the_same_second_or_later_changes_a_history(data, pairs, longest):
  """F10. They all get another user, item, label, and another time that is not earlier."""
  log = log_of(pairs)
  n = data.draw(st.integers(0, len(log) - 1))
  poisoned = [
    (user, time)
    if time < pairs[n][1] or m == n
    else (data.draw(st.integers(0, 2)), pairs[n][1] + data.draw(st.integers(0, 4)))
    for m, (user, time) in enumerate(pairs)
  ]
  assert rows_of(log_of(poisoned, seed=1), longest)[n] == rows_of(log, longest)[n]


@each_log
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_the_history_of_a_training_event_holds_no_held_out_event(log, split):
  train, *rest = split(log)
  _, past = histories(log, longest=100).gather(train)
  assert not np.isin(past, np.concatenate(rest)).any()
  assert sorted(np.concatenate([train, *rest])) == list(range(len(log)))


def test_a_negative_length_is_refused():
  with pytest.raises(UserError, match=r"longest=-1 .* must be 0 or more"):
    histories(log_of([]), longest=-1)
