"""The floors, one event at a time."""

import dataclasses

import numpy as np
import pytest

from sparse_lm.data.interactions import Entities, Interactions
from sparse_lm.evaluation.biases import SHRINK_ITEM, SHRINK_RUNNING, SHRINK_USER, bias_logits

USER, ITEM = [0, 0, 1, 0, 1], [0, 1, 0, 0, 1]
TIME = [5, 6, 6, 6, 9]  # events 1 and 3 of user 0 share a second
LABEL = [1, 0, 1, 1, 0]
TRAIN = np.array([0, 1, 2])


@pytest.fixture
def log():
  return Interactions(
    user_N=np.array(USER),
    item_N=np.array(ITEM),
    time_N=np.array(TIME),
    label_N=np.array(LABEL, np.float32),
    users=Entities(["a", "b", "never"]),
    items=Entities(["x", "y"]),
  )


def item_bias(item, mean):
  found = [LABEL[n] - mean for n in TRAIN if ITEM[n] == item]
  return sum(found) / (len(found) + SHRINK_ITEM)


def rest(n, mean):
  return LABEL[n] - mean - item_bias(ITEM[n], mean)


@pytest.mark.parametrize("running", [False, True])
def test_event_by_event(log, running):
  mean, wanted = 2 / 3, []
  for n in range(5):
    if running:
      found, shrink = [rest(k, mean) for k in range(5) if USER[k] == USER[n] and TIME[k] < TIME[n]], SHRINK_RUNNING
    else:
      found, shrink = [rest(k, mean) for k in TRAIN if USER[k] == USER[n]], SHRINK_USER
    wanted.append(mean + item_bias(ITEM[n], mean) + sum(found) / (len(found) + shrink))
  p = 1 / (1 + np.exp(-bias_logits(log, TRAIN, running=running).astype(np.float64)))
  np.testing.assert_allclose(p, np.clip(wanted, 0.02, 0.98), rtol=1e-5)


def test_the_future_changes_nothing(log):
  poisoned = dataclasses.replace(log, label_N=np.array([1, 0, 1, 0, 1], np.float32))  # of events 3 and 4
  for running in (False, True):
    np.testing.assert_array_equal(
      bias_logits(log, TRAIN, running=running), bias_logits(poisoned, TRAIN, running=running)
    )
