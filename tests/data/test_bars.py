"""BARS by hand, what of it is unknown, every way in which a folder or a file can be wrong, and runs with histories."""

import itertools

import numpy as np
import pytest

from sparse_lm import config_io
from sparse_lm.data import impressions
from sparse_lm.data.bars import read
from sparse_lm.data.recsys import open_samples
from sparse_lm.errors import UserError
from sparse_lm.recsys_config import InteractionsConfig, RecsysConfig
from sparse_lm.training.recommender import train

AMAZON = "label,user_id,item_id,cate_id,item_history,cate_history\n"
TAOBAO = "clk,btag_his,cate_his,brand_his,userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,"
TAOBAO += (
  "shopping_level,occupation,new_user_class_level,adgroup_id,cate_id,campaign_id,customer,brand,price,pid,btag\n"
)
KUAI = "timestamp,user_id,item_id,is_click,is_like,is_follow,pos_items,neg_items\n"

FILES = {
  "train.csv": AMAZON + "1,7,30,1,10^20,2^1\n0,7,40,2,10^20,2^1\n1,8,20,1,,\n0,8,10,2,,\n",
  "test.csv": AMAZON + "1,7,50,1,10^60^30,2^9^1\n0,9,20,1,20,1\n",
}


def write(folder, files):
  """`files` in `folder`."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, text in files.items():
    (folder / name).write_text(text)
  return folder


def read_all(folder, fraction=0.0, report=lambda line: None):
  return read(folder, fraction, report)


def rows(log, name):
  it = log.items.categorical[name]
  return [it.ids_T[a:b].tolist() for a, b in itertools.pairwise(it.offsets)]


def parts(log):
  return [part.tolist() for part in log.parts]


# Reading -------------------------------------------------------------------------------------------------------------


def test_amazon_by_hand_with_items_of_histories_and_targets_in_one_table(tmp_path):
  lines = []
  log = read_all(write(tmp_path, FILES), report=lines.append)
  assert parts(log) == [[0, 1, 2, 3], [], [4, 5]]
  assert log.label_N.tolist() == [1, 0, 1, 0, 1, 0]
  of = dict(zip(["30", "40", "20", "10"], (row for (row,) in rows(log, "item")[:4])))
  assert sorted(of.values()) == [1, 2, 3, 4]
  # 50 and 60 are in the test alone, and so is category 9.
  assert rows(log, "item")[4:] == [[0], [of["20"]]]
  known = [of["10"], of["20"]]
  assert rows(log, "history.item") == [known, known, [], [], [of["10"], 0, of["30"]], [of["20"]]]
  assert rows(log, "history.action") == [[1, 2], [1, 2], [], [], [1, 0, 2], [2]]
  assert rows(log, "cate_id") == [[1], [2], [1], [2], [1], [1]]
  assert rows(log, "user") == [[1], [1], [2], [2], [1], [0]]
  assert log.items.categorical["history.item"].table_size == log.items.categorical["item"].table_size == 5
  assert "train.csv, test.csv of AmazonElectronics_x1; there is no valid.csv" in lines[0]


def test_users_whom_training_does_not_know_are_still_told_apart(tmp_path):
  more = FILES["test.csv"] + "1,11,20,1,,\n"
  log = read_all(write(tmp_path, FILES | {"test.csv": more}))
  assert log.user_N.tolist() == [0, 0, 1, 1, 0, 2, 3]
  assert rows(log, "user")[-2:] == [[0], [0]]


def taobao(*, clk=1, btag="pv^buy", cate="5^6", brand="71^72", user=1, item=5, price="99.0"):
  return f"{clk},{btag},{cate},{brand},{user},1,2,1,3,2,3,0,4,800,{item},30,40,71,{price},430548_1007,1\n"


def test_taobao_by_hand(tmp_path):
  files = {"train.csv": TAOBAO + taobao() + taobao(clk=0, brand="72", price="0")}
  log = read_all(write(tmp_path, files | {"test.csv": TAOBAO + taobao(btag="", cate="", brand="", item=6, price="")}))
  assert log.label_N.tolist() == [1, 0, 1]
  five, six = rows(log, "item")[0][0], rows(log, "item")[2][0]
  assert {five, six} == {1, 2}, "6 is known from histories"
  assert rows(log, "history.item") == [[five, six], [five, six], []]
  assert rows(log, "history.action") == [[1, 2], [1, 2], []]
  assert rows(log, "brand_his") == [[1, 2], [2], []]
  assert rows(log, "pid") == [[1]] * 3
  features = "cms_segid cms_group_id final_gender_code age_level pvalue_level shopping_level occupation brand brand_his"
  features += " new_user_class_level adgroup_id campaign_id customer pid user item history.item history.action"
  assert set(log.items.categorical) == set(features.split())
  np.testing.assert_allclose(log.items.numeric["price"], [1, -1, 0], rtol=1e-6)


def test_actions_of_another_number_than_their_history_are_unknown_and_counted(tmp_path):
  lines, more = [], [taobao(), taobao(btag="buy"), taobao(clk=0, btag="pv^pv^pv"), taobao(btag="", cate="")]
  log = read_all(write(tmp_path, {"train.csv": TAOBAO + "".join(more), "test.csv": TAOBAO + taobao()}), 0, lines.append)
  assert rows(log, "history.action") == [[1, 2], [0, 0], [0, 0], [], [1, 2]]
  assert [len(row) for row in rows(log, "history.item")] == [2, 2, 2, 0, 2]
  assert "2 of 5 lines have another number of entries in btag_his than in cate_his" in lines[-1]


def test_kuaivideo_by_hand(tmp_path):
  files = {
    "train.csv": KUAI + "0.1,3,40,0,1,0,,50\n0.2,3,50,1,0,0,40,50^60\n",
    "test.csv": KUAI + "0.3,3,60,0,1,1,40,\n",
  }
  log = read_all(write(tmp_path, files))
  assert log.label_N.tolist() == [0, 1, 0]
  assert rows(log, "item") == [[1], [2], [0]]  # 60 was no item in training, and not in pos_items
  assert rows(log, "history.item") == [[], [1], [1]]
  assert rows(log, "history.action") == [[], [0], [0]]
  assert rows(log, "neg_items") == [[1], [1, 2], []]
  assert set(log.items.categorical) == {"user", "item", "neg_items", "history.item", "history.action"}
  assert not log.items.numeric


def test_validation_is_a_file_or_the_end_of_training(tmp_path):
  write(tmp_path, FILES)
  assert parts(read_all(tmp_path, 0.25)) == [[0, 1, 2], [3], [4, 5]]
  lines = []
  write(tmp_path, {"valid.csv": AMAZON + "1,8,99,1,,\n"})
  log = read_all(tmp_path, InteractionsConfig.validation_fraction, lines.append)
  assert parts(log) == [[0, 1, 2, 3], [4], [5, 6]]
  assert rows(log, "item")[4] == [0]
  assert "reading train.csv, valid.csv, test.csv of AmazonElectronics_x1" in lines[0]
  with pytest.raises(UserError, match=r"data\.validation_fraction=0\.25, but .*valid\.csv is the validation; leave it"):
    read_all(tmp_path, 0.25)


def test_what_only_lines_held_out_of_training_have_is_unknown(tmp_path):
  log = read_all(write(tmp_path, FILES), 0.75)  # one line to train on: item 30 after 10 and 20
  assert [row == [0] for row in rows(log, "item")] == [False, True, False, False, True, False]
  assert log.items.categorical["item"].table_size == 4


def test_columns_may_come_in_another_order_in_each_file(tmp_path):
  turned = "".join(f"{','.join(line.split(',')[::-1])}\n" for line in FILES["test.csv"].splitlines())
  good = read_all(write(tmp_path / "good", FILES))
  other = read_all(write(tmp_path / "other", FILES | {"test.csv": turned}))
  for name in good.items.categorical:
    assert rows(other, name) == rows(good, name)
  assert other.label_N.tolist() == good.label_N.tolist()


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("name", "text", "said"),
  [
    ("train.csv", "", "line 1: found the header ''; for .* must be in it, once"),
    ("train.csv", AMAZON, "train.csv: holds no lines with an impression"),
    ("test.csv", AMAZON, "test.csv: holds no lines with an impression"),
    (
      "train.csv",
      AMAZON.replace("cate_id", "category"),
      r"line 1: found the header 'label,.*'; for AmazonElectronics_x1 \(of .*_x1\) cate_id must be in it, once",
    ),
    ("train.csv", AMAZON.replace("cate_id", "item_id"), "item_id, cate_id must be in it, once"),
    (
      "test.csv",
      KUAI,
      r"test.csv: line 1: found the header 'timestamp,.*'; for AmazonElectronics_x1 .* label, cate_id",
    ),
    ("test.csv", AMAZON + "1,7,50,1,10\n", "line 2: found 5 columns; there must be 6: label, user_id"),
    (
      "test.csv",
      AMAZON + "1,7,50,1,,\n\n0.5,7,50,1,,\n",
      r"line 4: column 1 \(label\): found '0.5'; it must be 0 or 1",
    ),
    ("train.csv", AMAZON + ",7,50,1,,\n", r"line 2: column 1 \(label\): found ''"),
  ],
)
def test_a_wrong_file_is_named_with_line_and_column(tmp_path, name, text, said):
  with pytest.raises(UserError, match=said) as error:
    read_all(write(tmp_path, FILES | {name: text}))
  assert str(error.value).startswith(f"{tmp_path / name}: ")
  assert "\n" not in str(error.value)


def test_a_price_that_is_no_number_is_refused(tmp_path):
  write(tmp_path, {"train.csv": TAOBAO + taobao() + taobao(price="nan"), "test.csv": TAOBAO + taobao()})
  with pytest.raises(
    UserError, match=r"train\.csv: line 3: column 19 \(price\): found 'nan'; it must be a finite number"
  ):
    read_all(tmp_path)


def test_more_entries_than_offsets_can_count_are_refused(tmp_path, monkeypatch):
  write(tmp_path, FILES)
  monkeypatch.setattr(impressions, "_MOST_ENTRIES", 5)
  read_all(
    write(tmp_path / "as many", {name: FILES["train.csv"] for name in FILES} | {"test.csv": AMAZON + "1,7,3,1,4,5\n"})
  )
  monkeypatch.setattr(impressions, "_MOST_ENTRIES", 4)
  with pytest.raises(
    UserError, match=r"test\.csv: column \d \(\w+\): up to line 3 it has \d entries; there can be 4; give"
  ):
    read_all(tmp_path)


def test_a_path_without_the_files_says_what_to_give(tmp_path):
  give = "give the folder with train.csv and test.csv of a data set of BARS"
  write(tmp_path, {"train.csv": FILES["train.csv"]})
  for path, said in (
    (tmp_path / "nowhere", "there is no such file or folder"),
    (tmp_path / "train.csv", "is no folder"),
    (tmp_path, r"holds no test\.csv"),
    (write(tmp_path / "other", {"test.csv": FILES["test.csv"]}), r"holds no train\.csv"),
  ):
    with pytest.raises(UserError, match=f"{said}; {give}$"):
      read_all(path)


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"path": None}, r"data\.source='bars' needs data\.path: the folder with train\.csv and test\.csv"),
    ({"label": "is_like"}, r"data\.source='bars' reads no data\.label"),
    ({"positive_from": 1.0}, r"data\.source='bars' reads no data\.positive_from"),
    ({"split": "user_time"}, r"data\.source='bars' reads no data\.split"),
    ({"test_fraction": 0.2}, r"data\.source='bars' reads no data\.test_fraction, but it is 0\.2; leave it out"),
  ],
)
def test_a_config_that_cannot_work_is_refused(changes, said):
  InteractionsConfig(source="bars", path="folder", validation_fraction=0.2).validate()
  with pytest.raises(UserError, match=said):
    InteractionsConfig(**{"source": "bars", "path": "folder"} | changes).validate()


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Histories of 0 to 5 items."""
  past = lambda n, of: "^".join(str((n + k) % of) for k in range(n % 6))
  line = lambda n: f"{int(n * 7 % 3 == 0)},{n % 9},{n % 11},{n % 4},{past(n, 11)},{past(n, 4)}\n"
  files = {"train.csv": map(line, range(100)), "test.csv": map(line, range(100, 130))}
  return write(tmp_path_factory.mktemp("bars"), {name: AMAZON + "".join(lines) for name, lines in files.items()})


def config_of(folder, kind):
  changes = {
    "model.kind": kind,
    "model.width": 1 if kind == "logistic" else 4,
    "model.stream.width": 8,
    "model.num_layers": 1,
    "data.source": "bars",
    "data.path": str(folder),
    "data.longest": 3,
    "training.steps": 2,
    "training.batch_size": 16,
    "training.warmup_steps": 1,
  }
  return config_io.overlay(RecsysConfig(), changes)


def test_a_batch_holds_the_newest_events_by_their_steps_back(folder):
  part = open_samples(config_of(folder, "din"), lambda line: None).train
  log, batch = part.log, part.gather(np.array([5, 6, 1, 2]))  # of 5, 0, 1 and 2 events
  assert batch.history.offsets.tolist() == [0, 3, 3, 4, 6] + [6] * 12
  assert batch.history.age_T[:6].tolist() == [3, 2, 1, 1, 2, 1]
  expected = [rows(log, "history.item")[n][-3:] for n in (5, 6, 1, 2)]
  assert batch.history.item_T[:6].tolist() == list(itertools.chain(*expected))
  expected = [rows(log, "history.action")[n][-3:] for n in (5, 6, 1, 2)]
  assert batch.history.action_T[:6].tolist() == list(itertools.chain(*expected))
  assert len(batch.history.item_T) in part.capacities == (24, 48)
  assert set(batch.bags) == {"user", "item", "cate_id"}
  assert part.table_sizes == {"user": 10, "item": 12, "cate_id": 5, "action": 5}
  assert batch.label_B[:4].tolist() == log.label_N[[5, 6, 1, 2]].tolist()


def test_a_feature_of_several_ids_has_room_for_the_most_that_a_line_has(tmp_path):
  files = {"train.csv": KUAI + "1,3,40,0,0,0,,50^60^40\n2,3,50,1,0,0,40,\n3,4,50,1,0,0,40,50\n4,4,50,0,0,0,40,50\n"}
  config = config_of(write(tmp_path, files | {"test.csv": KUAI + "5,3,60,0,0,0,,\n6,3,60,1,0,0,,\n"}), "din")
  part = open_samples(config_io.overlay(config, {"data.validation_fraction": 0.0}), lambda line: None).train
  bag = part.gather(np.array([1, 0, 2])).bags["neg_items"]
  assert bag.offsets.tolist() == [0, 0, 3, 4] + [4] * 13
  assert bag.ids_T.tolist() == [1, 2, 3, 1] + [0] * 44


def test_a_model_trains_on_it_and_is_judged_by_the_test_file(folder, tmp_path):
  last = train(config_of(folder, "gem"), tmp_path)
  assert last["step"] == 2
  assert np.isfinite([last["loss"], last["validation_ne"], last["test_ne"]]).all()


def test_a_student_learns_from_a_teacher_of_the_same_files(folder, tmp_path):
  train(config_of(folder, "din"), tmp_path / "teacher")
  changes = {"distillation.teacher": str(tmp_path / "teacher"), "data.longest": 2}
  assert np.isfinite(train(config_io.overlay(config_of(folder, "dlrm"), changes), tmp_path / "student")["test_ne"])
