"""NE, log loss, calibration, AUC and gAUC, by hand, against scikit-learn, and in parts."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from sklearn import metrics

from sparse_lm.evaluation import prediction
from sparse_lm.evaluation.prediction import PredictionSums, auc, grouped_auc, reliability

LOGITS = np.array([0.0, np.log(3), -np.log(3), np.log(3)])  # probabilities 1/2, 3/4, 1/4, 3/4
LABELS = np.array([0, 1, 0, 0])


def draw(seed, number, *, rate=0.2, scores=1000):
  rng = np.random.default_rng(seed)
  labels = (rng.random(number) < rate).astype(np.int64)
  return (rng.integers(0, scores, number) / scores * 6 - 4 + labels).astype(np.float32), labels


def test_four_predictions_by_hand():
  sums = PredictionSums.of(LOGITS, LABELS)
  loss = -(np.log(1 / 2) + np.log(3 / 4) + np.log(3 / 4) + np.log(1 / 4)) / 4
  assert sums.logloss == pytest.approx(loss)
  assert sums.ne == pytest.approx(loss / -(np.log(1 / 4) / 4 + np.log(3 / 4) * 3 / 4))
  assert sums.calibration == pytest.approx((1 / 2 + 3 / 4 + 1 / 4 + 3 / 4) / 1)
  # The positive is above two of three negatives, and level with the third.
  assert sums.auc == auc(LOGITS, LABELS) == 2.5 / 3


@pytest.mark.parametrize("number", [2, 3, 100, 5000])
def test_equals_scikit_learn(number):
  logits, labels = draw(number, number, rate=0.3)
  labels[:2] = 0, 1
  probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
  sums = PredictionSums.of(logits, labels)
  assert sums.logloss == pytest.approx(metrics.log_loss(labels, probabilities), rel=1e-9)
  assert auc(logits, labels) == pytest.approx(metrics.roc_auc_score(labels, logits), rel=1e-12)
  assert sums.auc == pytest.approx(metrics.roc_auc_score(labels, logits), abs=2e-3 if number < 10 else 5e-4)


def test_the_mean_label_as_every_prediction_has_an_ne_of_1_and_an_auc_of_one_half():
  labels = np.arange(1000) % 10 == 0
  sums = PredictionSums.of(np.full(1000, np.log(0.1 / 0.9)), labels)
  assert sums.ne == pytest.approx(1)
  assert sums.calibration == pytest.approx(1)
  assert sums.auc == 0.5


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 2**31))
def test_parts_of_any_size_give_what_the_whole_gives(sizes, seed):
  logits, labels = draw(seed, sum(sizes))
  ends = np.cumsum([0, *sizes])
  parts = [PredictionSums.of(logits[a:b], labels[a:b]) for a, b in itertools.pairwise(ends)]
  total = sum(parts[1:], parts[0])
  whole = PredictionSums.of(logits, labels)
  np.testing.assert_array_equal(total.histogram_2S, whole.histogram_2S)
  for name in ("logloss", "ne", "calibration", "auc"):
    np.testing.assert_allclose(getattr(total, name), getattr(whole, name), rtol=1e-12)


@pytest.mark.parametrize(("labels", "undefined"), [([0, 0], {"ne", "calibration", "auc"}), ([1, 1], {"ne", "auc"})])
def test_what_one_kind_of_label_leaves_undefined_is_nan(labels, undefined):
  sums = PredictionSums.of(np.array([-1.0, 2.0]), np.array(labels))
  assert {name for name in ("logloss", "ne", "calibration", "auc") if np.isnan(getattr(sums, name))} == undefined
  assert np.isnan(auc(np.array([-1.0, 2.0]), np.array(labels)))


def test_nothing_is_nan_and_no_error():
  nothing = PredictionSums.of(np.zeros(0), np.zeros(0))
  assert all(np.isnan(getattr(nothing, name)) for name in ("logloss", "ne", "calibration", "auc"))
  assert np.isnan(auc(np.zeros(0), np.zeros(0)))
  value, users, left_out = grouped_auc(np.zeros(0), np.zeros(0), np.zeros(0))
  assert (np.isnan(value), users, left_out) == (True, 0, 0)


def test_confident_predictions_have_a_finite_loss_and_stay_apart():
  logits, labels = np.array([-300.0, -200.0, 200.0, 300.0], np.float32), np.array([0, 1, 0, 1])
  sums = PredictionSums.of(logits, labels)
  assert sums.logloss == pytest.approx((200 + 200) / 4)
  assert sums.auc == 0.75  # one wrong pair of four


def test_bins_keep_the_order_of_logits():
  values = np.array(
    [-np.finfo(np.float32).max, -8, -1.001, -1, -1e-30, 0, 1e-30, 1, 1.001, 8, np.finfo(np.float32).max]
  )
  bins = prediction._bins(values)
  assert (np.diff(bins) > 0).all()
  assert bins.min() >= 0
  assert bins.max() < 1 << 20
  assert prediction._bins(np.array([-0.0])) == prediction._bins(np.array([0.0]))


def test_users_by_hand():
  """User 7: one pair, right. User 3: two pairs, one right, one level. Users 5 and 9 have one label each."""
  users = np.array([7, 3, 5, 3, 7, 3, 5, 9])
  scores = np.array([0.9, 0.5, 0.1, 0.5, 0.2, 0.1, 0.3, 0.4])
  labels = np.array([1, 1, 0, 0, 0, 0, 0, 1])
  found = grouped_auc(scores, labels, users)
  assert found.value == pytest.approx((2 * 1.0 + 3 * 0.75) / 5)
  assert (found.users, found.left_out) == (2, 2)


def test_users_equal_scikit_learn():
  scores, labels = draw(1, 3000, rate=0.4)
  users = np.random.default_rng(2).integers(0, 200, 3000)
  values, sizes = [], []
  for user in np.unique(users):
    mine = users == user
    if 0 < labels[mine].sum() < mine.sum():
      values.append(metrics.roc_auc_score(labels[mine], scores[mine]))
      sizes.append(mine.sum())
  assert grouped_auc(scores, labels, users).value == pytest.approx(np.average(values, weights=sizes), rel=1e-12)


@pytest.mark.parametrize(
  ("scores", "labels", "said"),
  [
    ([0.0, np.nan], [0, 1], "prediction 1 is nan"),
    ([np.inf], [0], "prediction 0 is inf"),
    ([0.0, 1.0], [0, 2], "label 1 is 2"),
    ([0.0, 1.0], [0], r"shape \(2,\) and labels of \(1,\)"),
  ],
)
def test_what_is_no_prediction_is_refused(scores, labels, said):
  for refuse in (PredictionSums.of, auc):
    with pytest.raises(ValueError, match=said):
      refuse(np.array(scores), np.array(labels))


def test_users_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match=r"users_N has shape \(1,\)"):
    grouped_auc(np.zeros(2), np.array([0, 1]), np.zeros(1))


def test_reliability_by_hand():
  predicted, observed = reliability(LOGITS, LABELS, groups=2)  # sorted: 1/4, 1/2 | 3/4, 3/4
  assert predicted == pytest.approx([3 / 8, 3 / 4])
  assert observed == [0, 1 / 2]
  assert reliability(LOGITS[:1], LABELS[:1]) == ([1 / 2], [0])
  assert reliability(LOGITS[:0], LABELS[:0]) == ([], [])
