"""What the README promises of a run that is stopped, damaged or fails, each promise under its own name."""

import os
import resource
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from run_helpers import finish, losses

from sparse_lm import config_io
from sparse_lm.errors import EXIT_NONFINITE, EXIT_PREEMPTED, EXIT_SAVE_FAILED, SaveError, UserError
from sparse_lm.parallel.mesh import make_mesh
from sparse_lm.training import checkpoint
from sparse_lm.training.language_model import train
from sparse_lm.training.state import make_init


@pytest.fixture
def uninterrupted(trained_once):
  """Losses of a run that nobody disturbed."""
  return losses(trained_once)


def wait_until(condition, process):
  deadline = time.monotonic() + 120
  while not condition():
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < deadline, "the run does not come to the point where it was to be disturbed"
    time.sleep(0.001)


def lines_of(workdir):
  path = workdir / "metrics.jsonl"
  return len(path.read_text().splitlines()) if path.exists() else 0


def test_killed_at_any_moment_the_same_command_reaches_the_same_losses_bit_for_bit(start, tmp_path, uninterrupted):
  """Killed in the L1 warm-up, in a save, and under L0 control; with accumulation and re-initialisation throughout."""
  workdir = tmp_path / "run"
  saving = lambda: any(".orbax-checkpoint-tmp" in path.name for path in (workdir / "checkpoints").glob("*"))
  for moment in (lambda: lines_of(workdir) >= 4, saving, lambda: lines_of(workdir) >= 12):
    process = start()
    wait_until(moment, process)
    process.send_signal(signal.SIGKILL)
    finish(process)
  code, out, err = finish(start())
  assert code == 0, err
  assert "resuming at step" in out
  assert losses(workdir) == uninterrupted
  assert not list((workdir / "checkpoints").glob("*tmp*")), "stale temporary folders are cleaned"


@pytest.mark.gpu
def test_killed_on_a_gpu_the_same_command_reaches_the_same_losses_bit_for_bit(start, tmp_path):
  """There, atomic additions and kernels chosen by timing them would differ in every process."""
  changes = {"precision.recipe": "bf16", "model.model_width": 256, "model.ffn_width": 512, "model.context_length": 64}
  changes |= {"training.steps": 200, "checkpoint.every": 50, "training.eval_every": 100}
  environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}  # beside the process of these tests
  again = lambda workdir: start(workdir, changes=changes, env=environment)
  code, _, err = finish(again("whole"))
  assert code == 0, err
  process = again("run")
  wait_until(lambda: checkpoint.steps(tmp_path / "run" / "checkpoints"), process)
  process.send_signal(signal.SIGKILL)
  finish(process)
  code, out, err = finish(again("run"))
  assert code == 0, err
  assert "resuming at step" in out
  assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_killed_ten_times_at_random_moments_the_losses_are_still_the_same(start, tmp_path, uninterrupted):
  rng = np.random.default_rng(0)
  for _ in range(10):
    process = start()
    time.sleep(rng.uniform(4, 14))
    process.send_signal(signal.SIGKILL)
    finish(process)
  code, _, err = finish(start())
  assert code == 0, err
  assert losses(tmp_path / "run") == uninterrupted


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_signal_saves_and_exits_with_its_own_code_and_the_run_goes_on_from_there(
  name, start, tmp_path, uninterrupted
):
  workdir = tmp_path / "run"
  process = start()
  wait_until(lambda: lines_of(workdir) >= 7, process)
  process.send_signal(getattr(signal, name))
  code, _, err = finish(process)
  assert code == EXIT_PREEMPTED
  assert err.startswith(f"error: stopped by {name} after step ")
  assert "Traceback" not in err
  saved = checkpoint.steps(workdir / "checkpoints")[-1]
  assert saved == int(err.split("after step ")[1].split()[0])
  code, out, err = finish(start())
  assert code == 0, err
  assert f"resuming at step {saved}" in out
  assert losses(workdir) == uninterrupted


def damage_flip(path: Path, where: float):
  data = bytearray(path.read_bytes())
  data[int(where * (len(data) - 1))] ^= 0x40
  path.write_bytes(data)


def damage_cut(path: Path, where: float):
  data = path.read_bytes()
  path.write_bytes(data[: int(where * len(data))])


def damage_remove(path: Path, where: float):
  del where
  path.unlink()


def damage_nothing(path: Path, where: float):
  del path, where


@pytest.mark.parametrize("damage", [damage_flip, damage_cut, damage_remove])
def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_is_used(damage, config, finished, capsys):
  workdir, before = finished, losses(finished)
  newest = workdir / "checkpoints" / "16"
  largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
  damage(largest, 0.5)
  train(config, workdir)
  out = capsys.readouterr().out
  assert f"checkpoint {newest} is damaged" in out
  assert "resuming at step 15" in out
  assert losses(workdir) == before
  assert newest.with_name("16.damaged").is_dir(), "a damaged checkpoint is set aside, not deleted"


def test_no_damage_to_any_file_of_a_checkpoint_gives_wrong_weights(config, tmp_path):
  """Each file is flipped at several places, cut and removed: loading raises, or gives exactly what was saved."""
  mesh = make_mesh(config)
  with jax.set_mesh(mesh):
    state = make_init(config)()
    saver = checkpoint.Saver(tmp_path / "whole", keep=2)
    saver.save(3, state, {"step": 3})
    saver.wait()
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())), state)
    wanted = jax.tree.leaves(jax.device_get(state))
    outcomes = {"refused": 0, "same": 0}
    for file in sorted(path for path in (tmp_path / "whole" / "3").rglob("*") if path.is_file()):
      tries = [(damage_cut, 0.5), (damage_remove, 0)] + [(damage_flip, where) for where in (0, 0.3, 0.7, 1)]
      for damage, where in tries:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "whole" / "3", copy)
        damage(copy / file.relative_to(tmp_path / "whole" / "3"), where)
        try:
          loaded = jax.tree.leaves(jax.device_get(checkpoint.load(copy, abstract)))
        except checkpoint.DamagedError:
          outcomes["refused"] += 1
          continue
        outcomes["same"] += 1
        assert all(np.array_equal(a, b) for a, b in zip(loaded, wanted)), f"{damage.__name__} of {file} at {where}"
  assert outcomes["refused"] >= 10, outcomes


def test_when_no_checkpoint_is_whole_the_run_stops_and_changes_nothing(config, finished):
  for file in (finished / "checkpoints").rglob("_CHECKPOINT_METADATA"):
    damage_cut(file, 0.9)
  before = sorted(finished.rglob("*"))
  with pytest.raises(UserError, match=r"none of the 2 checkpoint\(s\) .* can be read; nothing was changed"):
    train(config, finished)
  assert sorted(finished.rglob("*")) == before


@pytest.mark.slow
def test_a_failed_save_ends_the_run_non_zero_with_the_old_checkpoint_intact(start, tmp_path, uninterrupted):
  workdir = tmp_path / "run"
  process = start()
  wait_until(lambda: checkpoint.steps(workdir / "checkpoints"), process)
  process.send_signal(signal.SIGTERM)
  finish(process)
  old = checkpoint.steps(workdir / "checkpoints")

  # A limit on the size of a file stands for a full disk: metrics still fit, a checkpoint does not.
  full = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64_000, 64_000))
  code, _, err = finish(start(preexec_fn=full))
  assert code == EXIT_SAVE_FAILED, err
  assert "could not be written" in err
  assert f"the newest intact one is step {old[-1]}" in err
  assert "Traceback" not in err
  assert checkpoint.steps(workdir / "checkpoints") == old

  code, _, err = finish(start())
  assert code == 0, err
  assert losses(workdir) == uninterrupted


class Failed:
  """A save that met a full disk."""

  def result(self, timeout=None):
    del timeout
    raise OSError(28, "No space left on device")


def test_a_failure_of_the_last_save_counts_too(config, tmp_path, monkeypatch):
  save = checkpoint.Saver.save

  def fail_at_the_end(self, step, tree, metadata):
    save(self, step, tree, metadata)
    if step == config.training.steps:
      self._pending[1].result()

      self._pending = (step, Failed())

  monkeypatch.setattr(checkpoint.Saver, "save", fail_at_the_end)
  with pytest.raises(SaveError, match=r"checkpoint of step 16 could not be written .*No space left on device"):
    train(config, tmp_path / "run")


def test_a_failed_save_is_said_before_the_next_one_is_due(config, tmp_path, monkeypatch):
  config = config_io.overlay(config, {"checkpoint.every": 12})
  monkeypatch.setattr(checkpoint.ocp.training.Checkpointer, "save_async", lambda *args, **kwargs: Failed())
  with pytest.raises(SaveError, match=r"checkpoint of step 12 could not be written .*No space left on device"):
    train(config, tmp_path / "run")
  assert max(losses(tmp_path / "run")) < config.training.steps


@pytest.mark.slow
def test_a_work_folder_may_be_a_relative_path(config, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  train(config, Path("run"))
  damage_cut(Path("run/checkpoints/16/_CHECKPOINT_METADATA"), 0.5)
  before = losses(Path("run"))
  train(config, Path("run"))
  assert losses(Path("run")) == before
  train(config_io.overlay(config, {"checkpoint.restore_path": "run/checkpoints/16"}), Path("other"))


@pytest.mark.parametrize("shape", [(8, 1), (2, 2), (1, 4), (1, 1)], ids=str)
def test_a_checkpoint_from_eight_devices_restores_on_fewer_with_equal_arrays(shape, config, tmp_path):
  def state_on(data, fsdp):
    mesh = make_mesh(
      config_io.overlay(config, {"parallel.data": data, "parallel.fsdp": fsdp, "training.batch_size": 16})
    )
    with jax.set_mesh(mesh):
      return mesh, make_init(config)()

  _, saved = state_on(2, 4)
  assert len(saved.model.embedding_VD[...].sharding.device_set) == 8
  saver = checkpoint.Saver(tmp_path, keep=1)
  saver.save(1, saved, {})
  saver.wait()
  mesh, like = state_on(*shape)
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
  with jax.set_mesh(mesh):
    loaded = checkpoint.load(tmp_path / "1", abstract)
  for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(loaded), strict=True):
    assert np.array_equal(a, b)
  assert loaded.model.embedding_VD[...].sharding == like.model.embedding_VD[...].sharding


def test_nan_or_infinity_writes_metrics_keeps_the_last_good_checkpoint_and_exits_non_zero(start, tmp_path):
  """The learning rate is sane until the warm-up has passed step 5, where a checkpoint lies; then it explodes."""
  changes = {"training.learning_rate": 1e30, "training.clip_norm": 1e30, "training.warmup_steps": 1}
  changes |= {"checkpoint.every": 1}
  code, _, err = finish(start(changes=changes))
  assert code == EXIT_NONFINITE, err
  workdir = tmp_path / "run"
  kept = checkpoint.steps(workdir / "checkpoints")
  bad = max(losses(workdir))
  assert f"became NaN or infinite in step {bad}" in err
  assert f"the last good checkpoint is step {kept[-1]}" in err
  assert "Traceback" not in err
  assert kept[-1] == bad - 1
  assert not np.isfinite(float(losses(workdir)[bad]["loss"])) or not np.isfinite(
    float(losses(workdir)[bad]["grad_norm"])
  )
