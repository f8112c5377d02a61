"""Runs of the small config of `tests/conftest.py`, in this process and in others."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_lm import config_io

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def config(base_config):
  """A copy for each test."""
  return copy.deepcopy(base_config)


@pytest.fixture
def finished(trained_once, tmp_path):
  """A copy of that folder for each test."""
  return shutil.copytree(trained_once, tmp_path / "finished")


@pytest.fixture
def start(tmp_path, config):
  """Starts `python -m experiments.train_lm` on the config, or on a change of it, in tmp_path/run."""

  def start(workdir="run", **popen):
    changes = popen.pop("changes", {})
    path = tmp_path / f"config_{abs(hash(str(changes)))}.py"
    values = config_io.to_dict(config_io.overlay(config, changes))
    path.write_text(
      "from sparse_lm import config_io\nfrom sparse_lm.config import LmConfig\n\n\n"
      f"def get_config():\n  return config_io.from_dict(LmConfig, {values!r})\n"
    )
    command = [sys.executable, "-m", "experiments.train_lm", f"--config={path}", f"--workdir={tmp_path / workdir}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=REPOSITORY, **(pipes | popen))

  return start
