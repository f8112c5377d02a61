"""The paper's 0.5 B model, non-gated: 0.503 B parameters, 10.5 B tokens; recipe and its choices in configs/lm/paper.py.

Not run here: needs eight GPUs of 80 GB for about 3 hours.

python -m experiments.train_lm --config=configs/lm/paper_0_5b_nongated.py --workdir=...
"""

from configs.lm.paper import paper
from sparse_lm.config import LmConfig


def get_config() -> LmConfig:
  return paper(num_layers=8, steps=10_000, gated=False)
