"""A run on a stream: killed and resumed it sees the same text, over the end of the data set too."""

import time

import pytest
from hub_folder import stream_from
from run_helpers import losses

from sparse_lm import config_io
from sparse_lm.errors import UserError
from sparse_lm.training import checkpoint
from sparse_lm.training.language_model import train
from sparse_lm.training.progress import Progress


class Killed(BaseException):
  """As sudden as a signal that nobody listens to."""


class KilledAt(Progress):
  """Kills the run when it shows a step, once a checkpoint is there."""

  def __init__(self, step, checkpoint):
    super().__init__(step)
    self._step, self._checkpoint = step, checkpoint

  def step(self, done, text):
    super().step(done, text)
    if done == self._step:
      deadline = time.monotonic() + 60
      while not self._checkpoint.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
      raise Killed


def test_killed_the_same_command_reaches_the_same_losses_bit_for_bit(config, tmp_path, capsys):
  config = config_io.overlay(config, stream_from(tmp_path))
  train(config, tmp_path / "whole")
  assert "ends after 12 documents; epoch 2 starts over" in capsys.readouterr().out
  workdir = tmp_path / "run"
  with pytest.raises(Killed):
    train(config, workdir, progress=KilledAt(14, workdir / "checkpoints" / "10"))
  state = checkpoint.read_metadata(workdir / "checkpoints" / "10")["batches"]
  assert (state["batches"], state["epoch"]) == (10, 2), "10 steps of 8 x 16 tokens; an epoch has 969"
  train(config, workdir)
  assert "resuming at step 10" in capsys.readouterr().out
  assert losses(workdir) == losses(tmp_path / "whole")
  assert "validation_loss" in losses(workdir)[16]

  file = tmp_path / "hub" / "train-2.parquet"
  file.rename(file.with_name("train-3.parquet"))
  with pytest.raises(
    UserError, match=r"were trained on other data .* \(hub: give the commit that the run named at its"
  ):
    train(config, workdir)


def test_a_work_folder_inside_the_streamed_folder_is_refused(config, tmp_path):
  config = config_io.overlay(config, stream_from(tmp_path))
  with pytest.raises(UserError, match=r"lies inside the corpus data\.path="):
    train(config, tmp_path / "hub" / "run")
