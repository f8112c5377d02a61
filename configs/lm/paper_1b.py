"""The paper's 1 B model, gated: 1.026 B parameters, 21.0 B tokens; recipe and its choices in configs/lm/paper.py.

Not run here: needs eight GPUs of 80 GB for about 11 hours.

python -m experiments.train_lm --config=configs/lm/paper_1b.py --workdir=...
"""

from configs.lm.paper import paper
from sparse_lm.config import LmConfig


def get_config() -> LmConfig:
  return paper(num_layers=18, steps=20_000, gated=True)
