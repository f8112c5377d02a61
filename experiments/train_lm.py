"""Trains a language model: `python -m experiments.train_lm --config=configs/lm/tiny.py --workdir=runs/tiny`.

Fields of the config are flags (`--config.sparsity.l1_coefficient=1e-3`); `--help` lists them. The same command
continues a run that was stopped.
"""

from pathlib import Path

from absl import flags

from sparse_lm.config import LmConfig
from sparse_lm.errors import UserError
from sparse_lm.flags import run_with_config

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run: config, metrics and checkpoints go there")


def main(config: LmConfig) -> None:
  """Trains, and prints the last metrics."""
  if not _WORKDIR.value:
    raise UserError("--workdir is missing; name a folder for the run, such as --workdir=runs/tiny")
  from sparse_lm.training.language_model import train  # seconds to import: a wrong flag is answered before

  train(config, Path(_WORKDIR.value))


if __name__ == "__main__":
  run_with_config(main, LmConfig)
