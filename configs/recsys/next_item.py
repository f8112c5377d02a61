"""HSTU, or SASRec with the same budget by `--config.model.kind=sasrec`, on MovieLens-100K; two CPU cores.

python -m experiments.train_next_item --config=configs/recsys/next_item.py --workdir=runs/next_item
"""

from sparse_lm.config import CheckpointConfig
from sparse_lm.next_item_config import NextItemConfig


def get_config() -> NextItemConfig:
  return NextItemConfig(checkpoint=CheckpointConfig(every=500))
