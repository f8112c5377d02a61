"""KuaiRand (Gao et al., CIKM 2022) from CSV files on this machine: videos that an app showed, and what became of them.

  log_standard_4_08_to_4_21_V.csv, log_standard_4_22_to_5_08_V.csv    the events; V is pure, 1k or 27k, and 27k's come
                                                                      in _part1 and _part2
  user_features_V.csv, video_features_basic_V.csv                     may be absent: then ids are all that is known

The label is one binary signal of the log. Logs are put in the order of time_ms and then counted in whole seconds: what
shares a second counts as simultaneous, and is in no history of the others. Columns are found by name in the header.

What is left out, and why:
  log_random_*                 exposures drawn at random, no recommender's choice; they are for unbiased evaluation
  video_features_statistic_*   averages over the whole month, so over the test period: they leak what is to be predicted
  visible_status               of a video when the data set was made, so after the events: likewise
  upload_dt                    as an age it would differ from event to event, and features belong to users and videos
  tab, hourmin, play_time_ms   known of an event alone, the last one only after it

Features of users are one snapshot, of a day that the authors do not name. A value is unknown where its field is empty,
UNKNOWN or -124. A category that is unknown has no id. Counts, sizes and durations, which spread over orders of
magnitude, are read as log(1 + x); one that is unknown or negative is the mean of the others.

All lies in memory, about 100 bytes an event and 300 a video: 27k, with 322 M events and 32 M videos, should take some
40 GiB and a quarter of an hour to load. That is extrapolated from 4 M events and 1 M videos; 27k has not been run.

The data are under CC BY-SA 4.0, and to be cited.
"""

import re
from pathlib import Path

import numpy as np

from sparse_lm.data import delimited
from sparse_lm.data.delimited import Column, Field, Table
from sparse_lm.data.interactions import Interactions
from sparse_lm.data.progress import Report
from sparse_lm.errors import UserError

_LOG = re.compile(r"log_(standard|random)_\d+_\d+_to_\d+_\d+_(pure|1k|27k)(_part\d+)?\.csv")
_GIVE = "give the folder with log_standard_*.csv of one variant (pure, 1k or 27k), or the one whose data/ it is"
_UNKNOWN = frozenset(["", "UNKNOWN", "-124", "-124.0"])
_PER_SECOND = 1000


def _features(kind: str, *names: str) -> list[Column]:
  return [Column(name, kind, separator=",", unknown=_UNKNOWN) for name in names]


_USER_COLUMNS = [
  Column("user_id", "token"),
  *_features("token", "user_active_degree", "is_lowactive_period", "is_live_streamer", "is_video_author"),
  *_features("token", "follow_user_num_range", "fans_user_num_range", "friend_user_num_range", "register_days_range"),
  *_features("token", *(f"onehot_feat{k}" for k in range(18))),
  *_features("count", "follow_user_num", "fans_user_num", "friend_user_num", "register_days"),
]
_VIDEO_COLUMNS = [
  Column("video_id", "token"),
  *_features("token", "author_id", "video_type", "upload_type", "music_id", "music_type"),
  *_features("token_seq", "tag"),
  *_features("count", "video_duration", "server_width", "server_height"),
]


def read(path: Path, label: str, report: Report) -> Interactions:
  """Reads the logs in a folder, or in its folder `data`, and the features of users and videos that lie beside them.

  Args:
    path: the folder.
    label: column of the logs that is predicted, such as is_click.
    report: is told what is read and what is not.
  """
  logs, variant = _find_logs(path, report)
  beside = lambda name: logs[0].with_name(f"{name}_{variant}.csv")
  users = delimited.read_entities(beside("user_features"), lambda file: _open(file, _USER_COLUMNS), "user_id", report)
  videos = delimited.read_entities(
    beside("video_features_basic"), lambda file: _open(file, _VIDEO_COLUMNS), "video_id", report
  )
  columns = [
    Column("user_id", "token"),
    Column("video_id", "token"),
    Column("time_ms", "float"),
    Column(label, "float"),
  ]
  events = delimited.read_events(
    (_open(file, columns) for file in logs),
    users,
    videos,
    user="user_id",
    item="video_id",
    time=Field("time_ms", delimited.whole_number, "it must be whole milliseconds that fit 64 bits"),
    label=Field(label, _signal, "it must be 0 or 1"),
  )
  assert events.label_N is not None, "a label was asked for"
  order_N = np.argsort(events.time_N, kind="stable")
  return Interactions(
    user_N=events.user_N[order_N],
    item_N=events.item_N[order_N],
    time_N=events.time_N[order_N] // _PER_SECOND,
    label_N=events.label_N[order_N],
    users=events.users,
    items=events.items,
  )


def _find_logs(path: Path, report: Report) -> tuple[list[Path], str]:
  """Files of the standard logs, and the variant that they are of."""
  try:
    if not path.is_dir():
      raise UserError(f"data.path: {path}: {'is no folder' if path.exists() else 'there is no such folder'}; {_GIVE}")
    files = [file for folder in (path, path / "data") if folder.is_dir() for file in sorted(folder.iterdir())]
  except OSError as error:
    raise UserError(f"data.path: {path}: cannot be read ({error.strerror})") from error
  matches = [(file, match) for file in files if (match := _LOG.fullmatch(file.name))]
  logs = [(file, match[2]) for file, match in matches if match[1] == "standard"]
  if not logs:
    raise UserError(f"data.path: {path}: holds no log_standard_*.csv of KuaiRand; {_GIVE}")
  for file, variant in logs:
    if (file.parent, variant) != (logs[0][0].parent, logs[0][1]):
      first, other = logs[0][0].relative_to(path), file.relative_to(path)
      raise UserError(f"data.path: {path}: holds both {first} and {other}; {_GIVE}")
  report(f"data: {logs[0][0].parent}: reading {', '.join(file.name for file, _ in logs)}")
  for file, match in matches:
    if match[1] == "random":
      report(f"data: {file.name} is left out: its videos were drawn at random, no recommender chose them")
  return [file for file, _ in logs], logs[0][1]


def _open(file: Path, columns: list[Column]) -> Table:
  """Columns that are not asked for are not read."""
  lines = delimited.lines(file, "utf-8")
  header = next(lines, (1, ""))[1]
  names = delimited.split_csv(header)
  if missing := [column.name for column in columns if names.count(column.name) != 1]:
    raise UserError(f"{file}: line 1: found the header {header!r}; {', '.join(missing)} must be in it, once")
  asked = {column.name: column for column in columns}
  table_columns = [asked.get(name, Column(name, "unread")) for name in names]
  return Table(file, table_columns, ((number, delimited.split_csv(line)) for number, line in lines))


def _signal(text: str) -> float:
  if text not in ("0", "1"):
    raise ValueError
  return float(text)
