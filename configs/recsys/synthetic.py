"""The GEM-style model on drawn interactions, whose teacher's own NE is printed beside the model's.

python -m experiments.train_recsys --config=configs/recsys/synthetic.py --workdir=runs/synthetic
"""

from sparse_lm.recsys_config import InteractionsConfig, RecsysConfig


def get_config() -> RecsysConfig:
  return RecsysConfig(data=InteractionsConfig(source="synthetic"))
