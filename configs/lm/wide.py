"""Layers as wide as the paper's, but only four, and a small vocabulary: 222 M parameters, 320,000 tokens/s on an H200.

Feed-forward layers take here the share of time that they take in the paper's models, so kernels can be judged on one
GPU. As a language model it is too wide for its data.

python -m experiments.train_lm --config=configs/lm/wide.py --workdir=runs/wide
"""

from sparse_lm.config import CheckpointConfig, LmConfig, ModelConfig, TrainingConfig


def get_config() -> LmConfig:
  return LmConfig(
    model=ModelConfig(
      vocab_size=8192, context_length=2048, num_layers=4, model_width=2048, num_heads=32, ffn_width=5632
    ),
    training=TrainingConfig(steps=1000, batch_size=16, warmup_steps=100, eval_every=200),
    checkpoint=CheckpointConfig(every=500),
  )
