"""The demo: 1.4 M parameters on the messages of US presidents, float32, made for two CPU cores.

python -m experiments.train_lm --config=configs/lm/tiny.py --workdir=runs/tiny
"""

from sparse_lm.config import LmConfig, PrecisionConfig


def get_config() -> LmConfig:
  return LmConfig(precision=PrecisionConfig(recipe="fp32"))
