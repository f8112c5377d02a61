"""The demo: 1.0 M parameters on the messages of US presidents, float32, a minute of training on two CPU cores.

python -m experiments.train_lm --config=configs/lm/tiny.py --workdir=runs/tiny
"""

from sparse_lm.config import CheckpointConfig, LmConfig, ModelConfig, PrecisionConfig, TrainingConfig


def get_config() -> LmConfig:
  return LmConfig(
    model=ModelConfig(vocab_size=2048, context_length=64, num_layers=3, model_width=128, num_heads=4, ffn_width=512),
    precision=PrecisionConfig(recipe="fp32"),
    training=TrainingConfig(
      steps=300, batch_size=16, learning_rate=3e-3, warmup_steps=20, log_every=10, eval_every=150, eval_batches=60
    ),
    checkpoint=CheckpointConfig(every=150),
  )
