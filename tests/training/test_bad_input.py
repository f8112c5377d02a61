"""What a user gets wrong ends in one line that says what was given and what to do, and loses nothing on disk."""

import io
import os
import re
import signal

import pytest
from run_helpers import finish, losses
from test_promises import lines_of, wait_until

from sparse_lm import config_io
from sparse_lm.errors import EXIT_PREEMPTED, EXIT_USER_ERROR, UserError
from sparse_lm.training import checkpoint, recorder
from sparse_lm.training.language_model import train
from sparse_lm.training.progress import Progress


def contents(folder):
  return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


def refused(config, workdir, message, **changes):
  before = contents(workdir)
  with pytest.raises(UserError, match=message):
    train(config_io.overlay(config, {name.replace("__", "."): value for name, value in changes.items()}), workdir)
  assert contents(workdir) == before


def test_resuming_with_a_changed_config_names_the_fields_and_both_values(config, finished):
  message = (
    r"finished holds a run with another config \(model.num_layers: 2 -> 3; training.learning_rate: 0.001 -> 0.01\)"
  )
  refused(config, finished, message, model__num_layers=3, training__learning_rate=0.01)


def test_fields_that_decide_no_result_may_change_when_a_run_resumes(config, finished):
  before = losses(finished)
  train(config_io.overlay(config, {"checkpoint.keep": 1, "training.log_every": 3, "data.loader": "numpy"}), finished)
  assert losses(finished) == before


def test_a_run_that_failed_before_its_first_step_does_not_pin_its_config(config, tmp_path):
  recorder.write_json(tmp_path / "config.json", config_io.to_dict(config_io.overlay(config, {"seed": 7})))
  train(config, tmp_path)
  assert recorder.read_json(tmp_path / "config.json")["seed"] == config.seed


def other_corpus(folder):
  folder.mkdir()
  for n in range(40):
    (folder / f"{n}.txt").write_text(f"zyxw vuts {n} " * 60)
  return folder


def test_resuming_on_other_data_or_with_another_tokenizer_is_refused(config, finished, tmp_path):
  other = str(other_corpus(tmp_path / "other"))
  refused(config, finished, "finished was trained with another tokenizer .* its vocabulary", data__path=other)


@pytest.mark.parametrize(
  "changes",
  [
    {"model.ffn_kind": "relu"},
    {"model.tie_embeddings": False},
    {"model.model_width": 64},
    {"model.rope_theta": 5.0},
  ],
  ids=str,
)
def test_parameters_of_another_model_are_refused_by_the_field(changes, config, finished, tmp_path):
  changes |= {"checkpoint.restore_path": str(finished / "checkpoints" / "16")}
  with pytest.raises(
    UserError, match=rf"checkpoint.restore_path=.*16' holds .* another config \({next(iter(changes))}"
  ):
    train(config_io.overlay(config, changes), tmp_path / "new")


def test_parameters_of_another_tokenizer_are_refused(config, finished, tmp_path):
  changes = {"checkpoint.restore_path": str(finished / "checkpoints" / "16")}
  changes |= {"data.path": str(other_corpus(tmp_path / "other"))}
  with pytest.raises(UserError, match=r"checkpoint.restore_path=.*16' was trained with another tokenizer"):
    train(config_io.overlay(config, changes), tmp_path / "new")


@pytest.mark.slow
def test_parameters_of_another_run_are_taken_and_said(config, finished, tmp_path, capsys):
  path = finished / "checkpoints" / "16"
  changes = {"checkpoint.restore_path": str(path), "training.learning_rate": 1e-9, "seed": 5}
  last = train(config_io.overlay(config, changes), tmp_path / "new")
  assert f"parameters come from {path}" in capsys.readouterr().out
  assert last["validation_loss"] == pytest.approx(losses(finished)[16]["validation_loss"], rel=1e-4)
  train(config_io.overlay(config, changes | {"checkpoint.restore_path": "/nowhere"}), tmp_path / "new")
  assert "resuming" not in capsys.readouterr().err


@pytest.mark.parametrize("path", ["nowhere", "finished", "finished/checkpoints", "finished/config.json", "x" * 300])
def test_a_restore_path_that_is_no_checkpoint_is_refused_with_what_to_give(path, config, finished, tmp_path):
  del finished
  changes = {"checkpoint.restore_path": str(tmp_path / path)}
  with pytest.raises(UserError, match="is no checkpoint; give WORKDIR/checkpoints/STEP of another run"):
    train(config_io.overlay(config, changes), tmp_path / "new")


def test_a_damaged_restore_path_is_refused(config, finished, tmp_path):
  (finished / "checkpoints" / "16" / "_CHECKPOINT_METADATA").write_text("{")
  changes = {"checkpoint.restore_path": str(finished / "checkpoints" / "16")}
  with pytest.raises(UserError, match=r"16' cannot be used: its metadata is damaged"):
    train(config_io.overlay(config, changes), tmp_path / "new")


def test_a_restore_path_that_a_resumed_run_does_not_read_is_said(config, finished, capsys):
  train(config_io.overlay(config, {"checkpoint.restore_path": "/nowhere"}), finished)
  assert "and not from checkpoint.restore_path" in capsys.readouterr().out


def test_a_run_whose_checkpoints_were_deleted_is_not_trained_again_over_its_metrics(config, finished):
  for path in (finished / "checkpoints").rglob("*"):
    if path.is_file():
      path.unlink()
  for path in sorted((finished / "checkpoints").rglob("*"), reverse=True):
    path.rmdir()
  refused(config, finished, "has metrics up to step 16 but no checkpoint; restore its checkpoints")


def test_a_finished_run_that_lost_its_metrics_is_still_finished(config, finished):
  (finished / "metrics.jsonl").unlink()
  assert train(config, finished) == {}


@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_a_damaged_config_json_is_named(text, config, finished):
  (finished / "config.json").write_text(text)
  refused(config, finished, r"config.json cannot be read \(.*\); restore it, or remove it")


@pytest.mark.parametrize("damage", [b'{"step": 10, "lo', b"5", b"\xff\xfe", b'{"loss": 1}', b'{"step": "3"}'])
def test_a_damaged_line_of_metrics_costs_that_line_alone_and_the_file_is_kept(damage, config, finished, capsys):
  workdir, before = finished, losses(finished)
  lines = (workdir / "metrics.jsonl").read_bytes().splitlines()
  (workdir / "metrics.jsonl").write_bytes(b"\n".join([*lines[:3], damage, *lines[4:], b""]))
  damaged = (workdir / "metrics.jsonl").read_bytes()
  (workdir / "checkpoints" / "16").rename(workdir / "elsewhere")
  train(config, workdir)
  assert f"line 4 of {workdir / 'metrics.jsonl'} is damaged" in capsys.readouterr().out
  assert losses(workdir) == {step: entry for step, entry in before.items() if step != 4}
  assert (workdir / "metrics.jsonl.damaged").read_bytes() == damaged


def test_a_work_folder_inside_the_corpus_is_refused(config, tmp_path):
  corpus = other_corpus(tmp_path / "corpus")
  with pytest.raises(UserError, match=r"corpus/run lies inside the corpus data.path=.* give a --workdir outside"):
    train(config_io.overlay(config, {"data.path": str(corpus)}), corpus / "run")
  assert not (corpus / "run").exists()


def test_a_work_folder_without_a_utf8_name_is_refused_before_training(config, tmp_path):
  with pytest.raises(UserError, match="has a name that is no UTF-8"):
    train(config, tmp_path / os.fsdecode(b"w\xff"))


def test_a_missing_tensorboard_is_said_before_anything_is_written(config, tmp_path, monkeypatch):
  monkeypatch.setattr(recorder.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(UserError, match="needs the package tensorboardX: pip install tensorboardX"):
    train(config_io.overlay(config, {"training.tensorboard": True}), tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_work_folder_in_use_is_refused_in_one_line_and_the_run_in_it_goes_on(start, tmp_path):
  first = start(changes={"training.steps": 100_000, "training.warmup_steps": 1})
  wait_until(lambda: lines_of(tmp_path / "run") >= 1, first)
  code, _, err = finish(start(changes={"training.steps": 100_000, "training.warmup_steps": 1}))
  assert (code, err.count("\n")) == (EXIT_USER_ERROR, 1)
  assert f"run is in use by another live run (process {first.pid} on " in err
  first.send_signal(signal.SIGTERM)
  assert finish(first)[0] == EXIT_PREEMPTED


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"model.model_width": 30}, "model.model_width=30 is not divisible by model.num_heads=4"),
    (
      {"model.ffn_implementation": "packed"},
      "model.ffn_implementation='packed' is unknown; allowed: dense, twell",
    ),
    ({"sparsity.sparse_below": 0.0}, "sparsity.sparse_below=0.0 must lie in (0, 1]; 1 trains by twell from the first"),
    ({"sparsity.sparse_below": 1.5}, "sparsity.sparse_below=1.5 must lie in (0, 1]"),
    ({"data.path": "/nowhere/*.txt"}, "data.path='/nowhere/*.txt'"),
    ({"parallel.data": 3}, "4 sequences do not divide over parallel.data * parallel.fsdp = 3 devices"),
    ({"parallel.data": 16}, "parallel.data=16 and parallel.fsdp=1 do not fit 8 cpu"),
    ({"training.steps": 2**31}, "training.steps=2147483648 must be less than 2**31"),
  ],
  ids=str,
)
def test_a_mistake_is_said_before_anything_is_written(changes, said, config, tmp_path):
  with pytest.raises(UserError, match=re.escape(said)) as caught:
    train(config_io.overlay(config, changes), tmp_path / "run", progress=Progress(1, io.StringIO()))
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    pytest.param(
      {"model.model_width": 30},
      "model.model_width=30 is not divisible by model.num_heads=4",
      marks=pytest.mark.slow,
    ),
    pytest.param({"model.ffn_width": 1_500_000_000}, "out of memory (", marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_on_the_command_line_a_mistake_is_one_line_without_a_traceback(changes, said, start):
  code, _, err = finish(start(changes=changes))
  assert (code, err.count("\n")) == (EXIT_USER_ERROR, 1), err
  assert err.startswith("error: ")
  assert said in err


def test_a_signal_before_the_first_step_ends_with_the_code_of_a_stopped_run(start):
  process = start()
  assert "data: " in process.stdout.readline()
  process.send_signal(signal.SIGTERM)
  code, _, err = finish(process)
  assert (code, err.count("\n")) == (EXIT_PREEMPTED, 1)


@pytest.mark.slow
def test_a_run_goes_on_when_the_reader_of_its_output_has_left(start, tmp_path):
  process = start()
  process.stdout.close()
  assert process.wait(timeout=300) == 0
  assert process.stderr.read() == ""
  assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == 16
