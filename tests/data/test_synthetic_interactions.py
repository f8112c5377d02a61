"""The teacher follows its equation, and neither logistic regression nor any model without history comes near it."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import OneHotEncoder

from sparse_lm.data import synthetic_interactions
from sparse_lm.data.synthetic_interactions import HALF_LIFE, HISTORY_WEIGHT, TEACHER_REMEMBERS, generate
from sparse_lm.errors import UserError
from sparse_lm.evaluation.prediction import PredictionSums


@pytest.fixture(scope="module")
def made():
  return generate(num_users=400, num_items=300, seed=3)


def features(log):
  """Category and segment of every event."""
  category_V = log.items.categorical["category"].ids_T
  segment_U = log.users.categorical["segment"].ids_T
  return category_V[log.item_N], segment_U[log.user_N]


def logits(made):
  return made.logit_N


def matches_by_loop(log, category_N, n):
  earlier = [m for m in range(len(log)) if log.user_N[m] == log.user_N[n] and log.time_N[m] < log.time_N[n]]
  newest = sorted(earlier, key=lambda m: log.time_N[m])[-TEACHER_REMEMBERS:]
  return sum(0.5 ** (int(log.time_N[n] - log.time_N[m]) / HALF_LIFE) for m in newest if category_N[m] == category_N[n])


@pytest.mark.parametrize(("users", "items"), [(1, 1), (1, 50), (50, 1)])
def test_smallest_sizes(users, items):
  log, _, probability = generate(num_users=users, num_items=items, seed=0)
  assert (len(log.users), len(log.items)) == (users, items)
  assert len(log) == len(probability) > 0


@pytest.mark.parametrize("sizes", [dict(num_users=0), dict(num_items=0), dict(seed=-1)])
def test_sizes_that_cannot_be_are_refused(sizes):
  with pytest.raises(UserError, match="{}={}".format(*next(iter(sizes.items())))):
    generate(**dict(num_users=1, num_items=1, seed=0) | sizes)


def test_the_seed_decides_everything():
  first, again, other = (generate(num_users=20, num_items=20, seed=seed) for seed in (5, 5, 6))
  for name in ("user_N", "item_N", "time_N", "label_N"):
    np.testing.assert_array_equal(getattr(first.log, name), getattr(again.log, name))
  np.testing.assert_array_equal(first.probability_N, again.probability_N)
  assert len(first.log) != len(other.log)


def test_events_lie_in_the_order_of_time_and_some_share_a_second(made):
  log = made.log
  assert (np.diff(log.time_N) >= 0).all()
  order = np.lexsort((log.time_N, log.user_N))
  same = (np.diff(log.user_N[order]) == 0) & (np.diff(log.time_N[order]) == 0)
  assert same.mean() == pytest.approx(1 / 60, rel=0.15)


def test_the_sum_over_the_history_equals_a_loop(made, monkeypatch):
  monkeypatch.setattr(synthetic_interactions, "_EVENTS_AT_ONCE", 1000)  # several chunks, the last not full
  category, _ = features(made.log)
  found = synthetic_interactions.recent_matches(made.log, category)
  for n in np.random.default_rng(0).integers(0, len(made.log), 12):
    assert found[n] == pytest.approx(matches_by_loop(made.log, category, n), rel=1e-12)


def test_without_the_history_the_logit_depends_on_segment_and_item_alone(made):
  category, segment = features(made.log)
  rest = logits(made) - HISTORY_WEIGHT * synthetic_interactions.recent_matches(made.log, category)
  _, group = np.unique(segment * len(made.log.items) + made.log.item_N, return_inverse=True)
  mean = np.bincount(group, rest) / np.bincount(group)
  np.testing.assert_allclose(rest, mean[group], atol=1e-9)


def test_clicks_are_as_frequent_as_their_probabilities_say(made):
  order = np.argsort(made.probability_N)
  for part in np.array_split(order, 10):
    expected = made.probability_N[part].mean()
    assert made.log.label_N[part].mean() == pytest.approx(expected, abs=4 * np.sqrt(expected / len(part)))


def test_ids_are_power_law_and_lengths_log_normal():
  log, *_ = generate(num_users=3000, num_items=1000, seed=1)
  count = np.bincount(log.item_N, minlength=1000)
  assert count[0] / count[99] == pytest.approx(100, rel=0.15)
  length = np.log(np.bincount(log.user_N))
  assert np.exp(np.median(length)) == pytest.approx(64, rel=0.1)
  assert length.std() == pytest.approx(1, rel=0.1)


def test_logistic_regression_stays_5_percent_above_the_bayes_ne(made):
  """One weight for each user, item, segment and category; the last fifth of the time is predicted."""
  log = made.log
  category, segment = features(log)
  one_hot = OneHotEncoder().fit_transform(np.stack([log.user_N, log.item_N, category, segment], axis=1))
  cut = len(log) * 4 // 5
  model = LogisticRegression(max_iter=200).fit(one_hot[:cut], log.label_N[:cut])
  learned = PredictionSums.of(model.decision_function(one_hot[cut:]), log.label_N[cut:])
  bayes = PredictionSums.of(logits(made)[cut:], log.label_N[cut:])
  assert bayes.ne < learned.ne < 1
  assert learned.ne > 1.05 * bayes.ne


@pytest.mark.parametrize("seed", range(3))
def test_whatever_ignores_the_history_stays_5_percent_above_the_bayes_ne(seed):
  """It is told the teacher's own logit without history, the category and how active the user is, and the true
  probabilities' mean among events that agree in these: more than a DLRM can learn from ids."""
  made = generate(num_users=1000, num_items=300, seed=seed)
  category, _ = features(made.log)
  rest = logits(made) - HISTORY_WEIGHT * synthetic_interactions.recent_matches(made.log, category)
  activity = np.bincount(made.log.user_N)[made.log.user_N]
  tenth = lambda values: np.searchsorted(np.quantile(values, np.arange(0.1, 1, 0.1)), values)
  cell = (category * 10 + tenth(activity)) * 10 + tenth(rest)
  best = np.bincount(cell, made.probability_N)[cell] / np.bincount(cell)[cell]
  loss = lambda p: -np.mean(made.probability_N * np.log(p) + (1 - made.probability_N) * np.log1p(-p))
  assert loss(best) > 1.05 * loss(made.probability_N)
