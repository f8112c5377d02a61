"""The cache on disk: every damage is found, and neither kills nor crowds leave a bad folder behind."""

import os
import subprocess
import sys

import numpy as np
import pytest

from sparse_lm.config import DataConfig
from sparse_lm.data.cache import DamagedError, cache_root, load_or_build
from sparse_lm.data.shards import load_store, write_store
from sparse_lm.errors import UserError

MADE_FROM = {"texts": "abc"}
DOCUMENTS = [np.arange(n, n + 7, dtype=np.uint32) for n in range(10)]


def store_in(folder, *, vocab_size=1000, shard_tokens=16):
  folder.mkdir(exist_ok=True)
  write_store(folder, DOCUMENTS, vocab_size=vocab_size, made_from=MADE_FROM, shard_tokens=shard_tokens)
  return folder


def stream_of(store):
  out = np.empty(store.num_tokens, np.int32)
  store.read(0, out)
  return out.tolist()


@pytest.mark.parametrize(("vocab_size", "bytes_each"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_tokens_take_two_bytes_where_the_vocabulary_allows(tmp_path, vocab_size, bytes_each):
  store = load_store(store_in(tmp_path, vocab_size=vocab_size), made_from=MADE_FROM)
  assert sum(file.stat().st_size for file in tmp_path.glob("*.bin")) == 70 * bytes_each
  assert stream_of(store) == np.concatenate(DOCUMENTS).tolist()
  assert store.starts_N.tolist() == list(range(0, 71, 7))


def test_the_largest_id_survives(tmp_path):
  for vocab_size in (1 << 16, 1 << 20):
    ids = np.array([0, vocab_size - 1], np.uint32)
    write_store(tmp_path, [ids], vocab_size=vocab_size, made_from={}, shard_tokens=9)
    assert stream_of(load_store(tmp_path, made_from={})) == ids.tolist()


def test_shards_are_full_but_for_the_last(tmp_path):
  store_in(tmp_path)
  sizes = [(tmp_path / f"tokens-{n:05d}.bin").stat().st_size // 2 for n in range(5)]
  assert sizes == [16, 16, 16, 16, 6]


@pytest.mark.parametrize(
  "how", ["cut 10 bytes", "delete", "flip the first byte", "flip the last byte", "empty", "append"]
)
@pytest.mark.parametrize(
  "name", ["index.json", "starts.npy", "tokens-00000.bin", "tokens-00002.bin", "tokens-00004.bin"]
)
def test_damage_is_found_and_the_file_named(tmp_path, name, how):  # F35
  damage(store_in(tmp_path) / name, how)
  with pytest.raises(DamagedError, match=name):
    load_store(tmp_path, made_from=MADE_FROM)


def damage(file, how):
  raw = bytearray(file.read_bytes())
  if how.startswith("flip"):
    # Of the index, a digit inside: its last byte is a line end.
    place = 0 if "first" in how else len(raw) - 1 if file.suffix != ".json" else raw.rindex(b"16")
    raw[place] ^= 1
  content = {"cut 10 bytes": raw[:-10], "empty": b"", "append": raw + b"0"}.get(how, raw)
  file.unlink()
  if how != "delete":
    file.write_bytes(content)


def test_a_store_made_from_other_data_is_not_taken(tmp_path):
  with pytest.raises(DamagedError, match="belongs to other data"):
    load_store(store_in(tmp_path), made_from={"texts": "abd"})


# Folders --------------------------------------------------------------------------------------------------------------


def load_text(folder):
  """A content that says itself whether it is whole."""
  text = (folder / "file").read_text() if (folder / "file").exists() else ""
  if text != "whole" * 1000:
    raise DamagedError(f"{folder / 'file'} holds {len(text)} characters")
  return text


def build_text(folder):
  with (folder / "file").open("w") as file:
    for _ in range(1000):
      file.write("whole")


def open_text(folder, report, build=build_text):
  return load_or_build(folder, load=load_text, build=build, report=report, what="text")


def test_a_good_folder_is_not_built_again(tmp_path, lines):
  open_text(tmp_path / "a" / "b", lines.append)
  open_text(tmp_path / "a" / "b", lines.append, build=None)
  assert lines == []


def test_a_damaged_folder_is_said_and_built_anew(tmp_path, lines):
  open_text(tmp_path / "f", lines.append)
  (tmp_path / "f/file").write_text("who")
  (tmp_path / "f/left over").write_text("")
  open_text(tmp_path / "f", lines.append)
  assert lines == [f"data: cached text damaged: {tmp_path}/f/file holds 3 characters; building anew from the source"]
  assert os.listdir(tmp_path / "f") == ["file"]


def test_an_error_while_building_leaves_nothing_that_is_taken_for_whole(tmp_path, lines):
  def fail(folder):
    build_text(folder)
    raise UserError("the source is bad")

  with pytest.raises(UserError, match="the source is bad"):
    open_text(tmp_path / "f", lines.append, build=fail)
  assert not (tmp_path / "f").exists()
  assert open_text(tmp_path / "f", lines.append)


def test_a_kill_while_building_leaves_nothing_that_is_taken_for_whole_and_no_lock(tmp_path, lines):
  script = (
    "import os, signal, sys, pathlib; from sparse_lm.data.cache import load_or_build\n"
    "def build(folder):\n"
    "  (folder / 'file').write_text('who'); (folder / 'left over').write_text('')\n"
    "  os.kill(os.getpid(), signal.SIGKILL)\n"
    "load_or_build(pathlib.Path(sys.argv[1]), load=None, build=build, report=print, what='text')"
  )
  assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "f")], check=False).returncode == -9
  assert (tmp_path / "f.partial/file").exists()
  assert open_text(tmp_path / "f", lines.append)
  assert lines == []
  assert sorted(os.listdir(tmp_path)) == ["f", "f.lock"]
  assert os.listdir(tmp_path / "f") == ["file"]


CROWD = """
import multiprocessing, pathlib, sys, time
from sparse_lm.data.cache import load_or_build
from test_token_cache import build_text, load_text

def build(folder):
  with open(sys.argv[2], "a") as builds:
    builds.write("x")
  time.sleep(0.3)  # long enough for all to arrive
  build_text(folder)

def open_in_a_crowd(_):
  lines = []
  load_or_build(pathlib.Path(sys.argv[1]), load=load_text, build=build, report=lines.append, what="text")
  return lines

with multiprocessing.get_context("fork").Pool(8) as pool:  # forked from a process without threads, hence safe
  for lines in pool.map(open_in_a_crowd, range(8), chunksize=1):
    print(*lines, sep="\\n")
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_of_eight_processes_at_once_one_builds_and_all_read_the_whole(tmp_path, damaged):
  folder, builds = tmp_path / "f", tmp_path / "builds"
  if damaged:
    folder.mkdir()
    (folder / "file").write_text("who")
  environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
  command = [sys.executable, "-c", CROWD, str(folder), str(builds)]
  out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
  assert builds.read_text() == "x"
  assert out.count("damaged") == damaged
  assert 1 <= out.count("another process is building text; waiting for it") <= 7
  assert (folder / "file").read_text() == "whole" * 1000


def test_a_cache_folder_that_cannot_be_written_is_named_with_the_way_out(tmp_path, lines):
  (tmp_path / "file").write_text("")
  for folder in (tmp_path / "file" / "f", tmp_path / "file" / "tokens" / "f"):
    with pytest.raises(
      UserError, match=r"data\.cache_dir: cannot write .*file.* \(.*\); .* set data\.cache_dir to a folder"
    ):
      open_text(folder, lines.append)


def test_a_full_disk_is_named_with_the_way_out(tmp_path, lines):
  def fill(folder):
    raise OSError(28, "No space left on device", str(folder / "file"))

  with pytest.raises(UserError, match=r"cannot write .*file \(No space left on device\); free some space"):
    open_text(tmp_path / "f", lines.append, build=fill)


def test_a_disk_that_loses_what_was_written_is_an_error_not_a_loop(tmp_path, lines):
  with pytest.raises(UserError, match="holds 0 characters, right after it was written"):
    open_text(tmp_path / "f", lines.append, build=lambda folder: None)


def test_the_cache_lies_where_it_was_asked_for(monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
  assert cache_root(DataConfig(cache_dir="~/mine")) == tmp_path / "mine"
  assert cache_root(DataConfig()) == tmp_path / "xdg/sparse-lm"
  for unset in ("", None):
    monkeypatch.delenv("XDG_CACHE_HOME") if unset is None else monkeypatch.setenv("XDG_CACHE_HOME", unset)
    assert cache_root(DataConfig()) == tmp_path / ".cache/sparse-lm"
