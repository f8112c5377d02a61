"""From a config to samples: what is said of data that nothing can be learnt from."""

import pytest

from sparse_lm import config_io
from sparse_lm.data.recsys import open_samples
from sparse_lm.errors import UserError
from sparse_lm.recsys_config import RecsysConfig

SECONDS = range(10)  # a tenth is validation, a tenth test
ALL_ONE = "data: all 8 training events are of one label"
AMAZON = "label,user_id,item_id,cate_id,item_history,cate_history\n" + "1,7,30,1,10,2\n" * 8
FILES = {
  "movielens": {"ratings.csv": "userId,movieId,rating,timestamp\n" + "".join(f"1,{n},3.0,{n}\n" for n in SECONDS)},
  "kuairand": {
    "log_standard_4_08_to_4_21_pure.csv": "user_id,video_id,time_ms,is_click\n"
    + "".join(f"1,{n},{n}000,0\n" for n in SECONDS)
  },
  "bars": {"train.csv": AMAZON, "test.csv": AMAZON},
  "criteo": {"train.txt": ("1" + "\t" * 39 + "\n") * len(SECONDS)},
}


@pytest.mark.parametrize(
  ("source", "changes", "said"),
  [
    ("movielens", {}, f"{ALL_ONE} (positive from 4); change data.positive_from or the split"),
    ("movielens", {"positive_from": 3.0}, f"{ALL_ONE} (positive from 3); change data.positive_from or the split"),
    ("kuairand", {}, f"{ALL_ONE}; change data.label or the split"),
    ("bars", {"validation_fraction": 0.0}, f"{ALL_ONE}; change the files"),
    ("criteo", {}, f"{ALL_ONE}; change the split"),
  ],
)
def test_labels_of_one_kind_are_refused_by_what_the_source_reads(tmp_path, source, changes, said):
  for name, text in FILES[source].items():
    (tmp_path / name).write_text(text)
  changes = {"source": source, "path": str(tmp_path)} | changes
  config = config_io.overlay(RecsysConfig(), {f"data.{name}": value for name, value in changes.items()})
  config.validate()
  with pytest.raises(UserError) as error:
    open_samples(config, lambda line: None)
  assert str(error.value) == said
