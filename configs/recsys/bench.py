"""The GEM-style model of a cluster's size on one GPU: 512 = 4 x 128 wide, 6 blocks, histories up to 2048 events.

python -m experiments.bench_recsys --what=ladder --record=runs/bench_recsys
"""

from sparse_lm.config import PrecisionConfig
from sparse_lm.recsys_config import RecommenderConfig, RecsysConfig, StreamConfig


def get_config() -> RecsysConfig:
  stream = StreamConfig(width=512, num_heads=4, window=None, neurons=256, seeds=256, pooled_tokens=32)
  model = RecommenderConfig(
    width=512,
    embedding_width=128,
    head_width=512,
    num_layers=6,
    rank=32,
    tokens=64,
    mlp_width=2048,
    mlp_layers=3,
    summary_tokens=16,
    stream=stream,
  )
  config = RecsysConfig(model=model, precision=PrecisionConfig(recipe="bf16"))
  config.data.longest = 2048
  config.training.batch_size = 768
  return config
