"""Every kind of recommender on MovieLens-100K, each user's last events, three seeds each; minutes on two cores.

python -m experiments.sweep --config=configs/recsys/movielens.py --sweep=configs/sweeps/movielens_users.py \
  --workdir=runs/movielens_users
python -m experiments.report_recsys --workdir=runs/movielens_users
"""

from configs.recsys.movielens import all_kinds
from configs.sweeps.shrink import Sweep


def get_sweep() -> Sweep:
  return all_kinds("user_time")
