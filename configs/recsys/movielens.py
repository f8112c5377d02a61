"""The GEM-style model on MovieLens-100K, which is fetched once; two CPU cores.

python -m experiments.train_recsys --config=configs/recsys/movielens.py --workdir=runs/movielens
"""

from sparse_lm.config import CheckpointConfig
from sparse_lm.recsys_config import RecsysConfig


def get_config() -> RecsysConfig:
  return RecsysConfig(checkpoint=CheckpointConfig(every=500))
