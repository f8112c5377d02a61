"""The GEM-style model on MovieLens-100K, which is fetched once; two CPU cores.

python -m experiments.train_recsys --config=configs/recsys/movielens.py --workdir=runs/movielens
python -m experiments.train_recsys --config=configs/recsys/movielens.py:dlrm --workdir=runs/dlrm     any kind of model
"""

from typing import Any

from sparse_lm.config import CheckpointConfig
from sparse_lm.errors import UserError
from sparse_lm.recsys_config import MODEL_KINDS, RecsysConfig

# What validation preferred, of 300 to 800 steps and rates of 0.05 to 0.15, for one seed; interformer: as din.
_TUNED: dict[str, dict[str, dict[str, Any]]] = {
  "time": {
    "logistic": {"training.steps": 800, "tables.learning_rate": 0.15},
    "dlrm": {"training.steps": 300},
    "dcnv2": {"training.steps": 300},
    "wukong": {"training.steps": 300},
    "din": {"training.steps": 300},
    "interformer": {"training.steps": 300},
    "gem": {"training.steps": 300, "tables.learning_rate": 0.1, "model.num_layers": 1},
  },
  "user_time": {
    "logistic": {"training.steps": 800, "tables.learning_rate": 0.15},
    "dlrm": {"training.steps": 800},
    "dcnv2": {"training.steps": 800},
    "wukong": {"training.steps": 800, "tables.learning_rate": 0.15},
    "din": {"training.steps": 600},
    "interformer": {"training.steps": 600},
    "gem": {"training.steps": 600, "tables.learning_rate": 0.1, "model.num_layers": 1},
  },
}


_UNTUNED = {"model.width": 16, "model.num_layers": 2, "tables.learning_rate": 0.05}  # unless said above


def tuned(kind: str, split: str) -> dict[str, Any]:
  """Fields of a kind of model on a split of the data, whatever the config had before."""
  if kind not in MODEL_KINDS:
    raise UserError(f"model {kind!r} is unknown; allowed: {', '.join(MODEL_KINDS)}")
  width = {"model.width": 1} if kind == "logistic" else {}
  return {"model.kind": kind, "data.split": split, "training.eval_every": 100} | _UNTUNED | width | _TUNED[split][kind]


def all_kinds(split: str) -> dict[str, dict[str, Any]]:
  """A sweep over kinds and three seeds."""
  return {f"{kind}_{seed}": tuned(kind, split) | {"seed": seed} for kind in MODEL_KINDS for seed in range(3)}


def get_config(kind: str = "gem") -> RecsysConfig:
  config = RecsysConfig(checkpoint=CheckpointConfig(every=500))
  for name, value in tuned(kind, "time").items():
    section, field = name.split(".")
    setattr(getattr(config, section), field, value)
  return config
