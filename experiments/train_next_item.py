"""Trains a model that predicts the item a user meets next.

python -m experiments.train_next_item --config=configs/recsys/next_item.py --workdir=runs/next_item

Fields of the config are flags (`--config.model.kind=sasrec`); `--help` lists them. The same command continues a run
that was stopped.
"""

from pathlib import Path

from absl import flags

from sparse_lm.errors import UserError
from sparse_lm.flags import run_with_config
from sparse_lm.next_item_config import NextItemConfig

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run: config, metrics and checkpoints go there")


def main(config: NextItemConfig) -> None:
  """Trains, and prints the last metrics."""
  if not _WORKDIR.value:
    raise UserError("--workdir is missing; name a folder for the run, such as --workdir=runs/next_item")
  from sparse_lm.training.next_item import train  # seconds to import: a wrong flag is answered before

  train(config, Path(_WORKDIR.value))


if __name__ == "__main__":
  run_with_config(main, NextItemConfig)
