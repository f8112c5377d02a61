"""Criteo by hand, what of it is unknown, every way in which a file can be wrong, and runs without any history."""

import math

import numpy as np
import pytest

from sparse_lm import config_io
from sparse_lm.data import criteo, impressions
from sparse_lm.data.interactions import Entities, Interactions, split_by_time
from sparse_lm.data.recsys import open_samples
from sparse_lm.errors import UserError
from sparse_lm.recsys_config import InteractionsConfig, RecsysConfig
from sparse_lm.training.recommender import train

ALL, HALF = (1.0, 0.0, 0.0), (0.5, 0.25, 0.25)


def line(label=0, *, numbers=None, categories=None):
  """Of counts 1 and categories that say where they stand, but for those that are given by their number from 1."""
  counts, hashes = ["1"] * 13, [f"{k:08x}" for k in range(1, 27)]
  for values, given in ((counts, numbers or {}), (hashes, categories or {})):
    for k, value in given.items():
      values[k - 1] = str(value)
  return "\t".join([str(label), *counts, *hashes]) + "\n"


def write(folder, lines, name="train.txt"):
  folder.mkdir(parents=True, exist_ok=True)
  (folder / name).write_text("".join(lines))
  return folder


def read(path, fractions=ALL, report=lambda line: None):
  return criteo.read(path, fractions, report)


def ids(log, name):
  return log.items.categorical[name].ids_T.tolist()


# Reading -------------------------------------------------------------------------------------------------------------


def test_a_file_by_hand(tmp_path):
  lines = [line(1, numbers={2: 8}, categories={1: "aa", 26: "x"}), line(0, categories={1: "bb", 26: ""})]
  lines += [line(0, categories={1: "aa", 26: "x"}), line(1, categories={1: "", 26: ""})]
  log = read(write(tmp_path, lines))
  assert log.label_N.tolist() == [1, 0, 0, 1]
  assert list(log.items.categorical) == ["item", *(f"C{k}" for k in range(2, 27))]
  assert ids(log, "item") == [1, 2, 1, 3]  # nothing is a value too: there was none
  assert ids(log, "C26") == [1, 2, 1, 2]
  assert ids(log, "C2") == [1] * 4
  assert [log.items.categorical[name].table_size for name in ("item", "C2", "C26")] == [4, 2, 3]
  assert list(log.items.numeric) == [f"I{k}" for k in range(1, 14)]
  # log 9 and three times log 2: the mean is log 2 + d / 4 and the variance 3 d^2 / 16.
  np.testing.assert_allclose(log.items.numeric["I2"], np.array([3, -1, -1, -1]) / math.sqrt(3), rtol=1e-5)
  assert log.items.numeric["I1"].tolist() == [0] * 4  # all the same
  assert log.user_N.tolist() == [0] * 4


def test_an_unknown_number_is_average_and_told_apart(tmp_path):
  lines = [line(numbers={1: "0"}), line(numbers={1: ""}), line(numbers={1: "99"}), line(numbers={1: "-1"})]
  numeric = read(write(tmp_path, lines)).items.numeric
  np.testing.assert_allclose(numeric["I1"], [-1, 0, 1, 0], atol=1e-6)
  assert numeric["I1.unknown"].tolist() == [0, 1, 0, 1]
  assert len(numeric) == 14


def test_a_number_that_no_line_knows_is_zero(tmp_path):
  numeric = read(write(tmp_path, [line(numbers={5: ""}), line(1, numbers={5: ""})])).items.numeric
  assert (numeric["I5"].tolist(), numeric["I5.unknown"].tolist()) == ([0, 0], [1, 1])


def test_a_value_that_training_does_not_have_is_row_0(tmp_path):
  values = ["a", "b", "a", "", "c", "b", "", "c"]
  log = read(write(tmp_path, [line(categories={3: value}) for value in values]), HALF)
  assert ids(log, "C3") == [1, 2, 1, 3, 0, 2, 3, 0]
  assert log.items.categorical["C3"].table_size == 4


def test_numbers_of_validation_and_test_do_not_decide_the_scale(tmp_path):
  lines = [line(numbers={1: value}) for value in ("0", "3", "1000", "")]
  numeric = read(write(tmp_path, lines), HALF).items.numeric
  np.testing.assert_allclose(numeric["I1"][:2], [-1, 1], rtol=1e-6)
  np.testing.assert_allclose(numeric["I1"][2], 2 * math.log(1001) / math.log(4) - 1, rtol=1e-5)
  assert "I1.unknown" not in numeric, "training has no line to learn it from"
  assert numeric["I1"][3] == 0


@pytest.mark.parametrize("number", [1, 2, 3, 9, 10, 11])
@pytest.mark.parametrize("fractions", [ALL, HALF, (0.8, 0.1, 0.1), (0.7, 0.0, 0.3)])
def test_parts_follow_each_other_in_the_file_as_events_do_in_time(tmp_path, number, fractions):
  log = read(write(tmp_path, [line()] * number), fractions)
  one = Entities(["one"])
  nothing = np.zeros(number, np.int32)
  events = Interactions(nothing, nothing, np.arange(number), None, users=one, items=one)
  for found, expected in zip(log.parts, split_by_time(events, fractions), strict=True):
    assert found.tolist() == expected.tolist()


def test_chunks_of_lines_leave_no_trace(tmp_path, monkeypatch):
  values = ["a", "b", "a", "", "c", "b", "", "d", "d"]
  lines = [line(n % 2, numbers={4: n}, categories={9: value}) for n, value in enumerate(values)]
  whole = read(write(tmp_path, lines))
  for size in (1, 2, 3, 9, 10):
    monkeypatch.setattr(impressions, "_LINES_AT_ONCE", size)
    again = read(tmp_path)
    assert ids(again, "C9") == ids(whole, "C9")
    np.testing.assert_array_equal(again.items.numeric["I4"], whole.items.numeric["I4"])
    assert again.label_N.tolist() == whole.label_N.tolist()


def test_the_file_itself_may_be_given_under_any_name(tmp_path):
  write(tmp_path, [line(1), line()], "day_0")
  assert read(tmp_path / "day_0").label_N.tolist() == [1, 0]


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("", "holds no lines with an impression"),
    ("\n\n", "holds no lines with an impression"),
    (line() + "1\t2\n", "line 2: found 2 columns; there must be 40: label, I1, .*, C26"),
    (line().split("\t", 1)[1], "line 1: found 39 columns; there must be 40"),
    (line() * 3 + "\n" + line(2), r"line 5: column 1 \(label\): found '2'; it must be 0 or 1"),
    (line(""), r"line 1: column 1 \(label\): found ''; it must be 0 or 1"),
    (line("nan"), r"line 1: column 1 \(label\): found 'nan'"),
    (line(numbers={1: "nan"}), r"line 1: column 2 \(I1\): found 'nan'; it must be a finite number, or empty"),
    (line() + line(numbers={13: "inf"}), r"line 2: column 14 \(I13\): found 'inf'; it must be a finite number"),
    (line(numbers={2: "1e39"}), r"line 1: column 3 \(I2\): found '1e39'"),
    (line(numbers={2: "many"}), r"line 1: column 3 \(I2\): found 'many'"),
  ],
)
def test_a_wrong_file_is_named_with_line_and_column(tmp_path, text, said):
  with pytest.raises(UserError, match=said) as error:
    read(write(tmp_path, [text]))
  assert str(error.value).startswith(f"{tmp_path / 'train.txt'}: ")
  assert "\n" not in str(error.value)


def test_a_path_without_the_file_says_what_to_give(tmp_path):
  for path in (tmp_path / "nowhere", tmp_path):
    with pytest.raises(UserError, match=r"there is no such file or folder; give Criteo's train\.txt, or its folder$"):
      read(path)


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"path": None}, r"data\.source='criteo' needs data\.path: train\.txt or its folder"),
    ({"path": ""}, r"data\.path='' names nothing; give train\.txt or its folder"),
    ({"label": "is_click"}, r"data\.source='criteo' reads no data\.label"),
    ({"positive_from": 1.0}, r"data\.source='criteo' reads no data\.positive_from"),
    ({"split": "user_time"}, r"data\.source='criteo' reads no data\.split, but it is 'user_time'; leave it out"),
  ],
)
def test_a_config_that_cannot_work_is_refused(changes, said):
  InteractionsConfig(source="criteo", path="folder", test_fraction=0.2).validate()
  with pytest.raises(UserError, match=said):
    InteractionsConfig(**{"source": "criteo", "path": "folder"} | changes).validate()


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  lines = [line(int(n * 7 % 3 == 0), numbers={1: n % 5, 2: ""}, categories={1: n % 3, 2: n}) for n in range(100)]
  return write(tmp_path_factory.mktemp("criteo"), lines)


def config_of(folder, kind):
  changes = {
    "model.kind": kind,
    "model.width": 1 if kind == "logistic" else 4,
    "model.stream.width": 8,
    "model.num_layers": 1,
    "data.source": "criteo",
    "data.path": str(folder),
    "data.longest": 4,
    "training.steps": 2,
    "training.batch_size": 16,
    "training.warmup_steps": 1,
  }
  return config_io.overlay(RecsysConfig(), changes)


def test_a_batch_has_every_feature_once_and_no_history(folder):
  lines = []
  part = open_samples(config_of(folder, "din"), lines.append).train
  batch = part.gather(np.array([0, 79, 5]))
  assert batch.bags["C2"].ids_T.tolist() == [1, 80, 6] + [0] * 13
  assert batch.bags["C2"].offsets.tolist() == [0, 1, 2, 3] + [3] * 13
  assert batch.history.offsets.tolist() == [0] * 17
  assert batch.numeric_BN.shape == (16, part.num_numeric) == (16, 14)
  assert batch.weight_B.tolist() == [1, 1, 1] + [0] * 13
  assert part.table_sizes["action"] == 1
  assert "100 events: 80 training, 10 validation, 10 test" in lines[-1]
  assert "26 features and 14 numbers" in lines[-1]


@pytest.mark.parametrize("kind", ["logistic", "gem"])
def test_a_model_trains_without_any_history(folder, tmp_path, kind):
  last = train(config_of(folder, kind), tmp_path)
  assert last["step"] == 2
  assert np.isfinite([last["loss"], last["validation_ne"], last["test_ne"]]).all()
  assert last["test_gauc"] == last["test_auc"]


def test_a_run_does_not_go_on_with_other_values_or_labels(folder, tmp_path):
  train(config_of(folder, "dlrm"), tmp_path / "run")
  text = (folder / "train.txt").read_text().splitlines(keepends=True)
  for n, change in (("label", lambda line: str(1 - int(line[0])) + line[1:]), ("C26", lambda line: line[:-2] + "f\n")):
    other = write(tmp_path / n, [change(text[0]), *text[1:]])
    with pytest.raises(UserError, match="were trained on other interactions"):
      train(config_of(other, "dlrm"), tmp_path / "run")
