"""A model that trains in seconds on one device, on a small corpus, with every feature that has state switched on."""

import copy
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_lm import config_io
from sparse_lm.config import LmConfig
from sparse_lm.training.loop import train

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
  """Forty documents of made-up words that a bigram can learn a little of, and a cache beside them."""
  folder = tmp_path_factory.mktemp("corpus")
  rng = random.Random(0)
  words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 5))) for _ in range(60)]
  for n in range(40):
    (folder / f"{n:02}.txt").write_text(" ".join(rng.choice(words[k % 7 :: 7]) for k in range(rng.randint(60, 200))))
  return folder


@pytest.fixture(scope="session")
def base_config(corpus):
  """L1 warm-up until step 6, then the L0 controller; re-initialisation; two micro-batches; documents masked."""
  config = LmConfig()
  config.precision.recipe = "fp32"
  model, data, training, sparsity = config.model, config.data, config.training, config.sparsity
  model.vocab_size, model.context_length, model.num_layers = 300, 16, 2
  model.model_width, model.num_heads, model.num_kv_heads, model.ffn_width = 32, 4, 2, 64
  data.source, data.path, data.cache_dir = "text", str(corpus / "*.txt"), str(corpus / "cache")
  data.document_mask = True
  sparsity.l1_coefficient, sparsity.l1_warmup_start, sparsity.l1_warmup_end = 1e-3, 2, 6
  sparsity.target_l0, sparsity.reinit_rate = 8.0, 0.1
  training.steps, training.batch_size, training.accumulation_steps, training.warmup_steps = 16, 8, 2, 4
  training.log_every, training.eval_every, training.eval_batches = 1, 8, 2
  config.checkpoint.every, config.parallel.data = 5, 1
  config.validate()
  return config


@pytest.fixture
def config(base_config):
  """A copy for each test."""
  return copy.deepcopy(base_config)


@pytest.fixture(scope="session")
def trained_once(base_config, tmp_path_factory):
  """The folder of a finished run, not to be touched."""
  folder = tmp_path_factory.mktemp("trained")
  train(copy.deepcopy(base_config), folder)
  return folder


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
