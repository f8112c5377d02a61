"""HR@K and NDCG@K by hand and against scikit-learn; ties count against the model."""

import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from sparse_lm.evaluation.ranking import hit_rate, ndcg, ranks


def test_ranks_by_hand():
  scores = np.array([[3.0, 1, 2], [3, 1, 2], [3, 3, 3], [1, 2, 2], [-np.inf, -np.inf, 0]])
  assert ranks(scores, np.array([0, 1, 1, 2, 0])).tolist() == [1, 3, 3, 2, 3]


@pytest.mark.parametrize("target", [0, 1, 2])
def test_scores_that_are_no_numbers_help_nobody(target):
  scores = np.array([[np.nan, 1.0, 2.0]])
  assert ranks(scores, np.array([target])).tolist() == [[3, 3, 2][target]]
  assert ranks(np.full((1, 3), np.nan), np.array([target])).tolist() == [3]


def test_a_model_that_cannot_tell_items_apart_hits_nothing():
  found = ranks(np.zeros((5, 100)), np.arange(5))
  assert hit_rate(found, 10) == ndcg(found, 10) == 0


def test_rates_by_hand():
  found = np.array([1, 2, 3, 11])
  assert hit_rate(found, 10) == 0.75
  assert hit_rate(found, 1) == 0.25
  assert ndcg(found, 10) == pytest.approx((1 + 1 / np.log2(3) + 1 / 2) / 4)
  assert ndcg(found, 1) == 0.25


def test_ndcg_equals_scikit_learn():
  rng = np.random.default_rng(0)
  scores = rng.permuted(np.tile(np.arange(50.0), (200, 1)), axis=1)
  target = rng.integers(0, 50, 200)
  relevant = np.eye(50)[target]
  assert ndcg(ranks(scores, target), 10) == pytest.approx(ndcg_score(relevant, scores, k=10), rel=1e-12)


def test_none_is_nan():
  found = ranks(np.zeros((0, 7)), np.zeros(0, np.int64))
  assert found.shape == (0,)
  assert np.isnan(hit_rate(found, 10))
  assert np.isnan(ndcg(found, 10))


@pytest.mark.parametrize(
  ("targets", "said"), [([0, 3], "target 1 is 3; items are 0 to 2"), ([-1, 0], "target 0 is -1")]
)
def test_a_target_that_is_no_item_is_refused(targets, said):
  with pytest.raises(ValueError, match=said):
    ranks(np.zeros((2, 3)), np.array(targets))
