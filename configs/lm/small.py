"""31 M parameters on the messages of US presidents; meant for ten minutes on one GPU (not timed yet).

python -m experiments.train_lm --config=configs/lm/small.py --workdir=runs/small
"""

from sparse_lm.config import CheckpointConfig, LmConfig, ModelConfig, TrainingConfig


def get_config() -> LmConfig:
  return LmConfig(
    model=ModelConfig(vocab_size=8192, context_length=512, num_layers=8, model_width=512, num_heads=8, ffn_width=1536),
    training=TrainingConfig(steps=2000, batch_size=64, warmup_steps=200, eval_every=200),
    checkpoint=CheckpointConfig(every=500),
  )
