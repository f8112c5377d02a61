"""The folder of a run: who may write it, and what a reader finds after a kill."""

import json
import math
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_lm.errors import SaveError, UserError
from sparse_lm.training import recorder

REPOSITORY = Path(__file__).parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from sparse_lm.training import recorder
held = recorder.lock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


def test_a_folder_locked_by_another_process_is_refused_by_its_name_and_is_free_once_it_is_killed(tmp_path):
  holder = subprocess.Popen(
    [sys.executable, "-c", HOLDER, str(tmp_path / "run")], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
  )
  try:
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(UserError, match=f"run is in use by another live run \\(process {holder.pid} on .+\\)"):
      recorder.lock(tmp_path / "run")
    with pytest.raises(UserError, match=f"process {holder.pid} on"):  # the one refused has not erased the name
      recorder.lock(tmp_path / "run")
  finally:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
  with recorder.lock(tmp_path / "run"):
    assert (tmp_path / "run" / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_folder_is_free_again_when_its_run_has_ended(tmp_path):
  recorder.lock(tmp_path).close()
  with recorder.lock(tmp_path), pytest.raises(UserError, match="in use"):
    recorder.lock(tmp_path)
  recorder.lock(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path):
  (tmp_path / "file").write_text("in the way")
  with pytest.raises(UserError, match=r"file/run cannot be used \(Not a directory\); give a --workdir"):
    recorder.lock(tmp_path / "file" / "run")


def write_lines(workdir, *lines):
  (workdir / "metrics.jsonl").write_text("\n".join(lines))


def test_resuming_drops_the_steps_after_the_checkpoint_and_appends_to_the_others(tmp_path):
  write_lines(tmp_path, '{"step": 5, "loss": 2.0}', '{"step": 10, "loss": 1.5}', '{"step": 15, "loss": 1.25}', "")
  writer = recorder.MetricsWriter(tmp_path, first_step=10, tensorboard=False)
  writer.write({"step": 15, "loss": 1.0})
  writer.close()
  assert recorder.read_metrics(tmp_path / "metrics.jsonl") == [
    {"step": 5, "loss": 2.0},
    {"step": 10, "loss": 1.5},
    {"step": 15, "loss": 1.0},
  ]
  assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", ["{", '{"step": 10, "lo', '{"step": 10, "loss": 1.5', "\x00\x00\x00"])
def test_a_last_line_that_a_kill_cut_short_is_left_out_and_not_glued_to_the_next(tmp_path, cut):
  write_lines(tmp_path, '{"step": 5, "loss": 2.0}', cut)
  assert recorder.read_metrics(tmp_path / "metrics.jsonl") == [{"step": 5, "loss": 2.0}]
  writer = recorder.MetricsWriter(tmp_path, first_step=10, tensorboard=False)
  writer.write({"step": 15})
  writer.close()
  assert recorder.read_metrics(tmp_path / "metrics.jsonl") == [{"step": 5, "loss": 2.0}, {"step": 15}]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
  write_lines(tmp_path, '{"step": 5}', '{"step": 10}')
  recorder.MetricsWriter(tmp_path, first_step=10, tensorboard=False).close()
  assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 5}\n{"step": 10}\n'


def test_metrics_of_a_run_that_has_none_are_empty(tmp_path):
  assert recorder.read_metrics(tmp_path / "metrics.jsonl") == []
  (tmp_path / "metrics.jsonl").touch()
  assert recorder.read_metrics(tmp_path / "metrics.jsonl") == []


def test_every_line_is_strict_json_in_which_nan_and_infinities_are_strings(tmp_path):
  writer = recorder.MetricsWriter(tmp_path, first_step=0, tensorboard=False)
  writer.write({"step": 1, "loss": math.nan, "per_layer": [1.0, math.inf, -math.inf], "nested": {"x": [math.nan]}})
  writer.write({"step": 2, "loss": 1e-300, "mfu": None})
  writer.close()

  def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")

  first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
  read = json.loads(first, parse_constant=refuse)
  assert read == {"step": 1, "loss": "nan", "per_layer": [1.0, "inf", "-inf"], "nested": {"x": ["nan"]}}
  assert math.isnan(float(read["loss"]))
  assert json.loads(second, parse_constant=refuse) == {"step": 2, "loss": 1e-300, "mfu": None}


def test_a_step_is_in_the_file_before_the_writer_is_closed(tmp_path):
  writer = recorder.MetricsWriter(tmp_path, first_step=0, tensorboard=False)
  writer.write({"step": 1})
  assert recorder.read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]
  writer.close()


def test_writing_json_replaces_the_file_so_a_reader_who_has_it_open_sees_the_whole_old_one(tmp_path):
  recorder.write_json(tmp_path / "a.json", {"old": list(range(1000))})
  with (tmp_path / "a.json").open() as reader:
    beginning = reader.read(1)
    recorder.write_json(tmp_path / "a.json", {"new": 1})
    assert json.loads(beginning + reader.read()) == {"old": list(range(1000))}
  assert recorder.read_json(tmp_path / "a.json") == {"new": 1}
  assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path, monkeypatch):
  recorder.write_json(tmp_path / "a.json", {"old": 1})
  whole = Path.write_text

  def full_disk(path, text, **options):
    whole(path, text[: len(text) // 2], **options)
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(Path, "write_text", full_disk)
  with pytest.raises(SaveError, match=r"a.json could not be written \(No space left on device\); make room"):
    recorder.write_json(tmp_path / "a.json", {"new": 2})
  assert recorder.read_json(tmp_path / "a.json") == {"old": 1}
  assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
  ("content", "reason"),
  [(None, "No such file"), (b"", "Expecting value"), (b'{"a": 1', "delimiter"), (b'"\xff"', "decode")],
  ids=["missing", "empty", "cut", "not_utf8"],
)
def test_a_json_file_that_cannot_be_read_is_named_with_what_to_do(tmp_path, content, reason):
  if content is not None:
    (tmp_path / "env.json").write_bytes(content)
  with pytest.raises(UserError, match=f"env.json cannot be read .*{reason}.*restore it, or remove it"):
    recorder.read_json(tmp_path / "env.json")


def events(folder):
  """(step, name, value) of every scalar, by the framing of TensorFlow records: length, checksum, bytes, checksum."""
  from tensorboardX.proto.event_pb2 import Event

  scalars = []
  for path in sorted(folder.iterdir()):
    content = path.read_bytes()
    while content:
      (length,) = struct.unpack_from("<Q", content)
      event = Event.FromString(content[12 : 12 + length])
      scalars += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
      content = content[12 + length + 4 :]
  return scalars


def test_tensorboard_gets_every_number_under_its_name_and_step(tmp_path):
  pytest.importorskip("tensorboardX")
  writer = recorder.MetricsWriter(tmp_path, first_step=0, tensorboard=True)
  writer.write({"step": 3, "loss": 2.5, "dead": 1, "mfu": None, "l0_per_layer": [1.0, 2.0]})
  writer.write({"step": 4, "loss": math.inf})
  writer.close()
  assert events(tmp_path / "tensorboard") == [(3, "loss", 2.5), (3, "dead", 1.0), (4, "loss", math.inf)]


def test_no_tensorboard_folder_is_made_unless_it_is_asked_for(tmp_path):
  writer = recorder.MetricsWriter(tmp_path, first_step=0, tensorboard=False)
  writer.write({"step": 1, "loss": 1.0})
  writer.close()
  assert not (tmp_path / "tensorboard").exists()


def test_the_environment_names_every_package_that_decides_a_number():
  environment = recorder.environment()
  assert {"python", "jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint"} <= set(environment["versions"])
  assert json.loads(json.dumps(environment, allow_nan=False)) == environment
