"""The paper's 2 B model, non-gated: 2.013 B parameters, 41.9 B tokens; recipe and its choices in configs/lm/paper.py.

Not run here: needs eight GPUs of 80 GB for about two days.

python -m experiments.train_lm --config=configs/lm/paper_2b_nongated.py --workdir=...
"""

from configs.lm.paper import paper
from sparse_lm.config import LmConfig


def get_config() -> LmConfig:
  return paper(num_layers=38, steps=40_000, gated=False)
