"""The GEM-style model on drawn interactions, whose teacher's own NE is printed beside the model's.

python -m experiments.train_recsys --config=configs/recsys/synthetic.py --workdir=runs/synthetic
python -m experiments.train_recsys --config=configs/recsys/synthetic.py:large --workdir=runs/synthetic_large

small: 170,000 training samples, for a laptop. large: five million, seen once, for a GPU, with heads of a width that its
kernels have.
"""

from sparse_lm.config import CheckpointConfig, PrecisionConfig
from sparse_lm.errors import UserError
from sparse_lm.recsys_config import InteractionsConfig, RecommenderConfig, RecsysConfig, StreamConfig


def get_config(size: str = "small") -> RecsysConfig:
  if size not in ("small", "large"):
    raise UserError(f"size {size!r} is unknown; allowed: small, large")
  return RecsysConfig(data=InteractionsConfig(source="synthetic")) if size == "small" else _large()


def _large() -> RecsysConfig:
  config = RecsysConfig(
    model=RecommenderConfig(width=128, head_width=256, stream=StreamConfig(width=128, num_heads=2)),
    precision=PrecisionConfig(recipe="bf16"),
    data=InteractionsConfig(source="synthetic", synthetic_users=60_000, longest=64),  # as many as the teacher remembers
    checkpoint=CheckpointConfig(every=500),
  )
  config.tables.learning_rate = 0.1
  config.training.learning_rate = 2e-3
  config.training.batch_size = 2048
  config.training.steps = 2480  # an epoch
  config.training.warmup_steps = 100
  config.training.eval_every = 500
  return config
