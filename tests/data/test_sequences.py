"""Rows of users: what each part holds, in which order, and that nothing of the future is in it.

Dimension key: T packed tokens.
"""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sparse_lm import config_io
from sparse_lm.data.interactions import Entities, Interactions, leave_last_out
from sparse_lm.data.sequences import open_sequences, sequences
from sparse_lm.errors import UserError
from sparse_lm.next_item_config import NextItemConfig

LONGEST, SIZE, ITEMS = 4, 3, 20


def log_of(events, *, num_users=4):
  """Events are (user, item, second)."""
  user, item, time = (np.array(column, np.int64) for column in zip(*events)) if events else (np.zeros(0, int),) * 3
  return Interactions(
    user_N=user,
    item_N=item,
    time_N=time,
    label_N=None,
    users=Entities([f"u{n}" for n in range(num_users)]),
    items=Entities([f"i{n}" for n in range(ITEMS)]),
  )


def parts_of(log, **options):
  return sequences(log, **dict(longest=LONGEST, batch_size=SIZE) | options)


def rows(part):
  """Items and seconds of each row, as lists."""
  found = []
  for n in range(len(part)):
    batch = part.gather(np.array([n]))
    found.append((batch.item_T[: batch.offsets[1]].tolist(), batch.time_T[: batch.offsets[1]].tolist()))
  return found


# User 0 has seven events, of which two share the last second; user 1 has too few, user 2 none, user 3 just enough.
EVENTS = [
  *[(0, 6, 70), (0, 1, 10), (3, 9, 5), (0, 3, 30), (1, 7, 1), (0, 2, 20), (3, 8, 4)],
  *[(1, 7, 2), (0, 5, 70), (0, 4, 40), (3, 9, 9), (1, 7, 3), (3, 1, 9), (0, 1, 12)],
]


def test_each_part_ends_with_the_event_that_it_predicts_last():
  train, validation, test, _, left_out = parts_of(log_of(EVENTS))
  # User 0 in order: 1 1 2 3 4 6 5. Event (0, 6) lies first in the log, so of the second 70 it comes first.
  assert rows(train) == [([1, 2, 3, 4], [0, 8, 18, 28]), ([8, 9], [0, 1])]
  assert rows(validation) == [([2, 3, 4, 6], [0, 10, 20, 50]), ([8, 9, 9], [0, 1, 5])]
  assert rows(test) == [([3, 4, 6, 5], [0, 10, 40, 40]), ([8, 9, 9, 1], [0, 1, 5, 5])]
  np.testing.assert_array_equal(validation.last_item_R, [6, 9])
  np.testing.assert_array_equal(test.last_item_R, [5, 1])
  assert left_out == 1  # a user without events is none who was left out


def test_frequencies_are_those_of_all_training_events_and_of_no_others():
  expected = np.zeros(ITEMS)
  expected[[1, 2, 3, 4, 8, 9]] = 2, 1, 1, 1, 1, 1
  np.testing.assert_array_equal(parts_of(log_of(EVENTS)).counts_V, expected)


logs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, ITEMS - 1), st.integers(0, 4)), max_size=30).map(log_of)


@hypothesis.given(log=logs)
def test_tests_are_the_events_that_leave_last_out_holds_out_and_so_is_validation_without_them(log):
  parts = parts_of(log, longest=40)
  for part in (parts.test, parts.validation):
    remaining, held_out = leave_last_out(log)
    last = dict(zip(log.user_N[held_out].tolist(), log.item_N[held_out].tolist(), strict=True))
    users = part.log.user_N[part.order_N[part.begin_R]]
    assert part.last_item_R.tolist() == [last[user] for user in users.tolist()]
    events_N = np.sort(remaining)  # in the order of the log, which decides ties
    columns = {name: getattr(log, name)[events_N] for name in ("user_N", "item_N", "time_N")}
    log = dataclasses.replace(log, **columns)


@hypothesis.given(log=logs)
def test_every_token_of_a_row_but_the_last_is_older_than_it_or_lies_before_it(log):
  for part in parts_of(log)[:3]:
    for _, seconds in rows(part):
      assert 2 <= len(seconds) <= LONGEST
      assert seconds[0] == 0
      assert seconds == sorted(seconds)


def test_what_happens_after_training_changes_no_training_row():
  poisoned = [(user, 19 if second >= 70 or (user, second) == (3, 9) else item, second) for user, item, second in EVENTS]
  before, after = parts_of(log_of(EVENTS)), parts_of(log_of(poisoned))
  assert rows(before.train) == rows(after.train)
  np.testing.assert_array_equal(before.counts_V, after.counts_V)
  assert rows(before.validation) != rows(after.validation)


@pytest.mark.parametrize("numbers", [[], [1], [1, 0]], ids=str)
def test_batches_have_one_shape_and_a_row_is_the_same_whoever_shares_it(numbers):
  part = parts_of(log_of(EVENTS)).test
  batch = part.gather(np.array(numbers, np.int64))
  assert {(a.dtype.name, a.shape) for a in batch[:2]} == {("int32", (SIZE * LONGEST,))}
  assert (batch.offsets.dtype.name, batch.offsets.shape) == ("int32", (SIZE + 1,))
  slices = [slice(*batch.offsets[b : b + 2]) for b in range(SIZE)]
  found = [(batch.item_T[s].tolist(), batch.time_T[s].tolist()) for s in slices]
  assert found == [rows(part)[n] for n in numbers] + [([], [])] * (SIZE - len(numbers))


def test_a_log_without_events_gives_no_rows():
  parts = parts_of(log_of([]))
  assert [len(part) for part in parts[:3]] == [0, 0, 0]
  assert (parts.counts_V.sum(), parts.left_out) == (0, 0)


@pytest.mark.parametrize(("span", "fits"), [(2**31 - 1, True), (2**31, False), (2**63 - 1, False)])
def test_seconds_that_do_not_fit_32_bits_are_refused(span, fits):
  log = log_of([(2, 1, second) for second in (-(2**63) + 1 if span == 2**63 - 1 else -5, 0, 1, span - 5)])
  if fits:
    assert rows(parts_of(log).test)[0][1][-1] == span
  else:
    with pytest.raises(UserError, match=r"the events of user 'u2' span \d+ seconds, .* less than 2\*\*31 apart"):
      parts_of(log)


def files_of(events, folder):
  lines = [f"{user},{item},3.5,{second}" for user, item, second in events]
  (folder / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *lines]) + "\n")
  changes = {"data.source": "movielens", "data.path": str(folder), "data.longest": LONGEST}
  return config_io.overlay(NextItemConfig(), changes)


def test_files_are_opened_and_what_is_left_out_is_said(tmp_path):
  lines = []
  parts = open_sequences(files_of(EVENTS, tmp_path), lines.append)
  assert [len(row) for row, _ in rows(parts.test)] == [4, 4]
  assert "2 users, 9 items, 7 training events" in lines[-1]
  assert "1 users with fewer than 4 events are left out" in lines[-1]


def test_files_in_which_nobody_has_enough_events_are_refused(tmp_path):
  with pytest.raises(UserError, match="every user has fewer than 4 events"):
    open_sequences(files_of(EVENTS[:4], tmp_path), lambda line: None)
