"""Every kind of recommender on MovieLens-100K, cut at two moments, three seeds each; minutes on two cores.

python -m experiments.sweep --config=configs/recsys/movielens.py --sweep=configs/sweeps/movielens_time.py \
  --workdir=runs/movielens_time
python -m experiments.report_recsys --workdir=runs/movielens_time
"""

from configs.recsys.movielens import all_kinds
from configs.sweeps.shrink import Sweep


def get_sweep() -> Sweep:
  return all_kinds("time")
