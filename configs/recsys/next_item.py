"""HSTU, or SASRec with the same budget by `--config.model.kind=sasrec`, on MovieLens-100K; two CPU cores.

python -m experiments.train_next_item --config=configs/recsys/next_item.py --workdir=runs/next_item
"""

from sparse_lm.config import CheckpointConfig
from sparse_lm.next_item_config import MODEL_KINDS, SEQUENCE_SOURCES, NextItemConfig, SequencesConfig
from sparse_lm.recsys_config import RecsysConfig


def get_config() -> NextItemConfig:
  return NextItemConfig(checkpoint=CheckpointConfig(every=500))


def beside(config: RecsysConfig, steps: int) -> dict[str, NextItemConfig]:
  """Every kind of model on the log of a recommender; none where that is drawn, and has no order of items to learn."""
  if config.data.source not in SEQUENCE_SOURCES:
    return {}
  found = {}
  for kind in MODEL_KINDS:
    data = SequencesConfig(
      source=config.data.source, path=config.data.path, cache_dir=config.data.cache_dir, loader=config.data.loader
    )
    own = NextItemConfig(data=data, checkpoint=config.checkpoint, seed=config.seed)
    own.model.kind, own.training.steps, own.training.eval_every = kind, steps, 100
    found[kind] = own
  return found
