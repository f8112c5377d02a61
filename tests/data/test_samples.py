"""Samples of a recommender: what a batch holds, and what it may not know.

Dimension key: B samples of a batch, N numeric features, T packed ids or events.
"""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sparse_lm.data.interactions import Categories, Entities, Interactions
from sparse_lm.data.samples import samples
from sparse_lm.errors import UserError

LONGEST, SIZE = 3, 4


def log_of(events, *, num_users=3, num_items=4):
  """Events are (user, item, second, rating). Users have a height, items genres."""
  user, item, time, label = (np.array(column) for column in zip(*events)) if events else (np.zeros(0, int),) * 4
  genres = Categories(np.array([0, 1, 1], np.int32), np.array([0, 2, 2, 3, 3], np.int32), table_size=5)
  return Interactions(
    user_N=user,
    item_N=item,
    time_N=time,
    label_N=label.astype(np.float32),
    users=Entities([f"u{n}" for n in range(num_users)], numeric={"height": np.array([1.0, 2.0, 3.0])}),
    items=Entities([f"i{n}" for n in range(num_items)], categorical={"genres": genres}),
  )


EVENTS = [(0, 0, 10, 5), (0, 1, 20, 2), (0, 2, 20, 4), (1, 3, 15, 4), (0, 3, 30, 1), (0, 0, 40, 5), (1, 0, 16, 3)]


def all_of(log, **options):
  (found,) = samples(log, [np.arange(len(log))], **dict(positive_from=4, longest=LONGEST, batch_size=SIZE) | options)
  return found


def test_a_batch_holds_what_is_known_before_each_event():
  batch = all_of(log_of(EVENTS)).gather(np.array([5, 2, 6]))
  np.testing.assert_array_equal(batch.label_B, [1, 1, 0, 0])
  np.testing.assert_array_equal(batch.weight_B, [1, 1, 1, 0])
  np.testing.assert_array_equal(batch.bags["user"].ids_T, [0, 0, 1, 0])
  np.testing.assert_array_equal(batch.bags["user"].offsets, [0, 1, 2, 3, 3])
  np.testing.assert_array_equal(batch.bags["item"].ids_T, [0, 2, 0, 0])
  # Item 0 has two genres, item 2 has one; room for two each.
  np.testing.assert_array_equal(batch.bags["item.genres"].offsets, [0, 2, 3, 5, 5])
  np.testing.assert_array_equal(batch.bags["item.genres"].ids_T[:5], [0, 1, 1, 0, 1])
  assert len(batch.bags["item.genres"].ids_T) == 2 * SIZE
  # Event 5: the newest three of four; event 2: not event 1, which shares its second; event 6: event 3.
  np.testing.assert_array_equal(batch.history.offsets, [0, 3, 4, 5, 5])
  np.testing.assert_array_equal(batch.history.item_T[:5], [1, 2, 3, 0, 3])
  np.testing.assert_array_equal(batch.history.age_T[:5], [20, 20, 10, 10, 1])
  # Ratings 1, 2, 3, 4, 5 are actions 0 to 4.
  np.testing.assert_array_equal(batch.history.action_T[:5], [1, 3, 0, 4, 3])
  height = np.sqrt(1.5)
  np.testing.assert_allclose(batch.numeric_BN[:, 0], [-height, -height, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("numbers", [[], [0], [0, 1, 2, 3]])
def test_batches_of_any_number_of_samples_have_the_same_shapes_but_for_the_room_of_histories(numbers):
  found = all_of(log_of(EVENTS))
  batch = found.gather(np.array(numbers, int))
  shapes = lambda batch: (
    [bag.ids_T.shape for bag in batch.bags.values()] + [batch.numeric_BN.shape, batch.label_B.shape]
  )
  assert shapes(batch) == shapes(found.padding(12))
  assert len(batch.history.item_T) in found.capacities == (6, 12)
  assert batch.weight_B.sum() == len(numbers)
  for name, size in found.table_sizes.items():
    ids = {"action": batch.history.action_T}.get(name, batch.bags[name].ids_T if name in batch.bags else None)
    assert np.all((ids >= 0) & (ids < size))


def test_features_and_their_tables():
  assert all_of(log_of(EVENTS)).table_sizes == {"user": 3, "item": 4, "action": 5, "item.genres": 5}
  assert all_of(log_of(EVENTS)).num_numeric == 1


@hypothesis.given(
  events=st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=14
  ),
  number=st.integers(0, 13),
)
def test_nothing_from_the_predicted_second_or_later_changes_a_sample(events, number):
  number %= len(events)
  now = events[number][2]
  poisoned = [e if n == number or e[2] < now else (e[0], 3 - e[1], e[2], 6 - e[3]) for n, e in enumerate(events)]
  # Users' ids and seconds stay, so that only what an event was can leak.
  batches = [all_of(log_of([*e, *FOUR_USERS_RATINGS])).gather(np.array([number])) for e in (events, poisoned)]
  for a, b in zip(*(batch.history for batch in batches), strict=True):
    np.testing.assert_array_equal(a, b)


# Every rating occurs, so that actions keep their numbers.
FOUR_USERS_RATINGS = [(2, 0, 100, rating) for rating in range(1, 6)]


def test_a_sample_does_not_depend_on_who_shares_the_batch():
  found = all_of(log_of(EVENTS))
  alone, together = found.gather(np.array([5])), found.gather(np.array([5, 0, 4, 2]))
  for name in alone.bags:
    first = slice(*alone.bags[name].offsets[:2])
    np.testing.assert_array_equal(alone.bags[name].ids_T[first], together.bags[name].ids_T[first])
  first = slice(*alone.history.offsets[:2])
  for a, b in zip(alone.history[:3], together.history[:3], strict=True):
    np.testing.assert_array_equal(a[first], b[first])
  np.testing.assert_array_equal(alone.numeric_BN[0], together.numeric_BN[0])


def test_no_history_at_all():
  found = all_of(log_of(EVENTS), longest=0)
  assert found.capacities == (1,)
  np.testing.assert_array_equal(found.gather(np.arange(4)).history.offsets, np.zeros(5))


def test_labels_that_cannot_be_learnt_from_are_refused():
  log = log_of(EVENTS)
  with pytest.raises(UserError, match="these interactions have none"):
    all_of(dataclasses.replace(log, label_N=None))
  many = log_of([(0, 0, second, second / 7) for second in range(65)])
  with pytest.raises(UserError, match="65 different values and can be 64 kinds of action at most"):
    all_of(many)
