"""The paper's 1.5 B model, gated: 1.539 B parameters, 31.5 B tokens; recipe and its choices in configs/lm/paper.py.

Not run here: needs eight GPUs of 80 GB for about a day.

python -m experiments.train_lm --config=configs/lm/paper_1_5b.py --workdir=...
"""

from configs.lm.paper import paper
from sparse_lm.config import LmConfig


def get_config() -> LmConfig:
  return paper(num_layers=28, steps=30_000, gated=True)
