"""Criteo's display advertising challenge (Kaggle, 2014), from train.txt on this machine.

A line is a label, 13 whole numbers and 26 categories (hashes of 32 bits in hexadecimal), with tabs between them; any
but the label may be empty. There is no header; columns are called label, I1 to I13, C1 to C26. test.txt has no labels
and is refused.

Lines are in the order of time (a week, says the publisher) and have none: the log is cut by position. No column says
which user a line is of, so AUC within users is AUC; none is a history, so all are empty; and none is known to be the
item. Models want one, so C1 goes by that name, which without a history means nothing.

Categories get ids from the training lines; rare values are not thrown together, so tables are as large as training has
values. All lies in memory, about 250 bytes a line, and while reading 180 for each different value: the 45.8 M lines
with their 33.8 M values should take some 17 GiB and a quarter of an hour. That is extrapolated from 1.5 M lines that
were made up; the real file has not been tried.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sparse_lm.data import delimited, impressions
from sparse_lm.data.delimited import Column, Table
from sparse_lm.data.impressions import Impressions, Roles
from sparse_lm.data.progress import Report

_FILE = "train.txt"
_GIVE = f"give Criteo's {_FILE}, or its folder"
_COLUMNS = [Column("label", "float")]
_COLUMNS += [Column(f"I{k}", "count") for k in range(1, 14)]
_COLUMNS += [Column(f"C{k}", "token") for k in range(1, 27)]


def read(path: Path, fractions: Sequence[float], report: Report) -> Impressions:
  """Reads all lines.

  Args:
    path: the file, under any name, or the folder of train.txt.
    fractions: of training, validation and test, which follow each other in the file.
    report: is told what is read.
  """
  file = path if impressions.is_file(path, _GIVE) else path / _FILE
  impressions.is_file(file, _GIVE)
  report(f"data: reading {file}")
  rows = ((number, line.split("\t")) for number, line in delimited.lines(file, "utf-8"))
  return impressions.read(
    [Table(file, _COLUMNS, rows)],
    Roles(label="label", item="C1"),
    lambda lengths: _cut(lengths[0], fractions),
    report,
  )


def _cut(number: int, fractions: Sequence[float]) -> list[int]:
  """Lines of each part."""
  # 0.1 + 0.2 is a little more than 0.3: a cut that is meant to lie half way between two lines must still do so.
  ends = np.rint(np.round(number * np.cumsum(fractions[:-1]), 6)).astype(int)
  return np.diff([0, *ends, number]).tolist()
