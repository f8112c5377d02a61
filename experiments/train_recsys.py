"""Trains a recommender.

python -m experiments.train_recsys --config=configs/recsys/movielens.py --workdir=runs/movielens

Fields of the config are flags (`--config.model.kind=dlrm`); `--help` lists them. The same command continues a run that
was stopped.
"""

from pathlib import Path

from absl import flags

from sparse_lm.errors import UserError
from sparse_lm.flags import run_with_config
from sparse_lm.recsys_config import RecsysConfig

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run: config, metrics and checkpoints go there")


def main(config: RecsysConfig) -> None:
  """Trains, and prints the last metrics."""
  if not _WORKDIR.value:
    raise UserError("--workdir is missing; name a folder for the run, such as --workdir=runs/movielens")
  from sparse_lm.training.recommender import train  # seconds to import: a wrong flag is answered before

  train(config, Path(_WORKDIR.value))


if __name__ == "__main__":
  run_with_config(main, RecsysConfig)
