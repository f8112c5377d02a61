"""Lines with features and histories of their own: what of them is refused."""

import numpy as np
import pytest

from sparse_lm.data.impressions import Impressions
from sparse_lm.data.interactions import Categories, Entities
from sparse_lm.errors import UserError


def made(**categorical):
  """Two lines with these features beside their item."""
  one_each = lambda ids: Categories.one_each(np.array(ids, np.int32), 3)
  two = np.zeros(2, np.int32)
  items = Entities(["", ""], categorical={"item": one_each([1, 2])} | categorical)
  numbers = np.arange(2)
  return Impressions(two, numbers, numbers, np.zeros(2), Entities(["one"]), items, (numbers, two[:0], two[:0]))


def test_an_id_beyond_its_table_is_named_with_feature_and_size():
  made(brand=Categories.one_each(np.array([0, 2]), 3))
  with pytest.raises(UserError, match=r"feature brand: row 1 .* has id 3, but its table has 3 rows"):
    made(brand=Categories.one_each(np.array([0, 3]), 3))
  with pytest.raises(UserError, match=r"feature history\.item: row 0 .* has id -1, but its table has 3 rows"):
    made(**{"history.item": Categories.one_each(np.array([-1, 0]), 3)})


def test_a_history_that_does_not_fit_its_items_or_actions_is_refused():
  past = Categories(np.array([1, 2], np.int32), np.array([0, 0, 2], np.int32), 3)
  made(**{"history.item": past, "history.action": past})
  with pytest.raises(ValueError, match=r"history\.item has a table of 4 rows, but that of item has 3"):
    made(**{"history.item": Categories(past.ids_T, past.offsets, 4), "history.action": past})
  with pytest.raises(ValueError, match="must have as many ids in every row"):
    made(**{"history.item": past, "history.action": Categories.one_each(np.array([0, 0]), 3)})
