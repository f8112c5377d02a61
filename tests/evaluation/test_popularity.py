"""Ranks by frequency are those of the general ranking, and ties are broken against it too."""

import numpy as np
import pytest

from sparse_lm.evaluation.popularity import popularity_ranks
from sparse_lm.evaluation.ranking import ranks


@pytest.mark.parametrize("counts", [[5, 0, 2, 2, 9], [0, 0, 0], [3]], ids=str)
def test_equals_ranking_everybody_by_the_same_scores(counts):
  target_N = np.arange(len(counts))
  scores_NV = np.tile(np.array(counts), (len(counts), 1))
  np.testing.assert_array_equal(popularity_ranks(np.array(counts), target_N), ranks(scores_NV, target_N))


def test_a_hand_worked_case():
  np.testing.assert_array_equal(
    popularity_ranks(np.array([5, 0, 2, 2, 9]), np.array([4, 0, 2, 3, 1, 4])), [1, 2, 4, 4, 5, 1]
  )


def test_nobody_to_judge():
  assert popularity_ranks(np.array([1, 2]), np.zeros(0, np.int64)).shape == (0,)
