"""120 M parameters on the messages of US presidents; one GPU, well under an hour (not timed yet).

The corpus is small for this model, which will overfit; for your own text:
--config.data.source=text --config.data.path=...

python -m experiments.train_lm --config=configs/lm/medium.py --workdir=runs/medium
"""

from sparse_lm.config import CheckpointConfig, LmConfig, ModelConfig, TrainingConfig


def get_config() -> LmConfig:
  return LmConfig(
    model=ModelConfig(
      vocab_size=8192, context_length=1024, num_layers=12, model_width=768, num_heads=12, ffn_width=3072
    ),
    training=TrainingConfig(steps=2000, batch_size=64, warmup_steps=200, eval_every=200),
    checkpoint=CheckpointConfig(every=500),
  )
