"""Data sets of the BARS benchmark (Zhu et al., SIGIR 2022) from CSV files on this machine, told apart by their headers.

  AmazonElectronics_x1   DIN's split: of every user, the last of the goods reviewed is in the test
  TaobaoAd_x1            ads shown in a week, and in the test those of the day after it
  KuaiVideo_x1           videos shown, in the order of time; ALPINE's split

A folder has train.csv, test.csv and, where somebody has made one, valid.csv. Their split is kept: train.csv is trained
on, test.csv is the test. BARS has no valid.csv for these three, and stops training by the test; here the last lines of
train.csv, `validation_fraction` of them, are validation then. Of Amazon's, whose lines are shuffled, they are a random
share, no later one.

What becomes of the columns, found by name in the header; `impressions` says how they are read:
  Amazon      history: item_history, and of each event its cate_history, in a table apart from cate_id's
  Taobao      the item is cate_id, the finest that both events and ads tell of; history: cate_his, and of each event its
              btag_his (page view, cart, favourite, purchase). When the files were made, zeros were dropped from these
              columns one by one, so brand_his need not fit and is a feature: the mean of its brands. btag, the same in
              all lines, is left out
  KuaiVideo   history: pos_items, the videos that were clicked, of which the files have a user's first 100; neg_items,
              those that were not, is a feature: their mean. The label is is_click; is_like and is_follow come after it
              and are left out, as is timestamp, in a unit of its own, and visual embeddings, which lie in HDF5 files

Histories are taken to be in the order of time, the newest last; Taobao's description does not say so. All lies in
memory: 4 bytes for each token and each entry of a sequence, and 60 a line beside. So Taobao takes 17 GiB at most,
KuaiVideo 11, Amazon less than 1. Written from the scripts that make these files: no real one was at hand to try.
"""

from pathlib import Path
from typing import NamedTuple

from sparse_lm.data import delimited, impressions
from sparse_lm.data.delimited import Column, Table
from sparse_lm.data.impressions import Impressions, Roles
from sparse_lm.data.progress import Report
from sparse_lm.errors import UserError
from sparse_lm.recsys_config import InteractionsConfig

_GIVE = "give the folder with train.csv and test.csv of a data set of BARS"


class _DataSet(NamedTuple):
  columns: list[Column]  # that are read
  roles: Roles


def _columns(kind: str, names: str) -> list[Column]:
  return [Column(name, kind, separator="^") for name in names.split()]


_DATA_SETS = {
  "AmazonElectronics_x1": _DataSet(
    _columns("float", "label")
    + _columns("token", "user_id item_id cate_id")
    + _columns("token_seq", "item_history cate_history"),
    Roles(label="label", user="user_id", item="item_id", history="item_history", action="cate_history"),
  ),
  "TaobaoAd_x1": _DataSet(
    _columns("float", "clk")
    + _columns("token", "userid cms_segid cms_group_id final_gender_code age_level pvalue_level shopping_level")
    + _columns("token", "occupation new_user_class_level adgroup_id cate_id campaign_id customer brand pid")
    + _columns("token_seq", "cate_his btag_his brand_his")
    + _columns("count", "price"),
    Roles(label="clk", user="userid", item="cate_id", history="cate_his", action="btag_his"),
  ),
  "KuaiVideo_x1": _DataSet(
    _columns("float", "is_click") + _columns("token", "user_id item_id") + _columns("token_seq", "pos_items neg_items"),
    Roles(label="is_click", user="user_id", item="item_id", history="pos_items"),
  ),
}


def read(path: Path, validation_fraction: float, report: Report) -> Impressions:
  """Reads train.csv, valid.csv if there is one, and test.csv.

  Args:
    path: their folder.
    validation_fraction: of the lines of train.csv, where there is no valid.csv.
    report: is told what is read, and what is validation.
  """
  if impressions.is_file(path, _GIVE):
    raise UserError(f"data.path: {path}: is no folder; {_GIVE}")
  files = [path / name for name in ("train.csv", "valid.csv", "test.csv")]
  has_valid = files[1].exists()
  if not has_valid:
    del files[1]
  elif validation_fraction != InteractionsConfig.validation_fraction:
    raise UserError(f"data.validation_fraction={validation_fraction}, but {files[1]} is the validation; leave it out")
  for file in files:
    if not file.exists():
      raise UserError(f"data.path: {path}: holds no {file.name}; {_GIVE}")
  name, data_set = _recognise(files[0])
  told = (
    "" if has_valid else f"; there is no valid.csv, so validation is the last {validation_fraction:.0%} of train.csv"
  )
  report(f"data: {path}: reading {', '.join(file.name for file in files)} of {name}{told}")

  def cut(lengths: list[int]) -> list[int]:
    if has_valid:
      return lengths
    train, test = lengths
    held_out = round(train * validation_fraction)
    return [train - held_out, held_out, test]

  return impressions.read((_open(file, name, data_set) for file in files), data_set.roles, cut, report)


def _recognise(file: Path) -> tuple[str, _DataSet]:
  """The data set whose columns the header has; failing that, the one that lacks fewest."""
  _, header = next(delimited.lines(file, "utf-8"), (1, ""))
  return min(_DATA_SETS.items(), key=lambda it: len(_missing(delimited.split_csv(header), it[1])))


def _missing(names: list[str], data_set: _DataSet) -> list[str]:
  return [column.name for column in data_set.columns if names.count(column.name) != 1]


def _open(file: Path, name: str, data_set: _DataSet) -> Table:
  """Columns that are not asked for are not read."""
  lines = delimited.lines(file, "utf-8")
  _, header = next(lines, (1, ""))
  names = delimited.split_csv(header)
  if missing := _missing(names, data_set):
    raise UserError(
      f"{file}: line 1: found the header {header!r}; for {name} (of {', '.join(_DATA_SETS)}) {', '.join(missing)} must"
      " be in it, once"
    )
  asked = {column.name: column for column in data_set.columns}
  columns = [asked.get(column, Column(column, "unread")) for column in names]
  return Table(file, columns, ((number, delimited.split_csv(line)) for number, line in lines))
