"""A DLRM that also learns from a GEM-style model of old events, with and without an adapter; drawn interactions.

The teacher is trained on the first 40 % of the events, the students on the first 80 %; all are tested on the last 10 %.
First the teacher, then students: by labels alone, by labels and teacher, by labels and what the adapter makes of it.

python -m experiments.train_recsys --config=configs/recsys/distill.py:teacher --workdir=runs/distill/teacher
python -m experiments.train_recsys --config=configs/recsys/distill.py:alone --workdir=runs/distill/alone
python -m experiments.train_recsys --config=configs/recsys/distill.py:student --workdir=runs/distill/student
python -m experiments.train_recsys --config=configs/recsys/distill.py:adapter --workdir=runs/distill/adapter

`--config.distillation.teacher=WORKDIR` names another teacher.
"""

from sparse_lm.config import CheckpointConfig
from sparse_lm.errors import UserError
from sparse_lm.recsys_config import DistillationConfig, InteractionsConfig, RecommenderConfig, RecsysConfig

_TEACHER = "runs/distill/teacher"
# What the teacher has no label of is validation to it.
_STUDENTS = {
  "alone": DistillationConfig(),
  "student": DistillationConfig(teacher=_TEACHER),
  "adapter": DistillationConfig(teacher=_TEACHER, adapter=True),
}


def get_config(role: str = "adapter") -> RecsysConfig:
  if role == "teacher":
    return _teacher()
  if role not in _STUDENTS:
    raise UserError(f"role {role!r} is unknown; allowed: teacher, {', '.join(_STUDENTS)}")
  return _student(_STUDENTS[role])


def _teacher() -> RecsysConfig:
  config = RecsysConfig(
    model=RecommenderConfig(kind="gem"),
    data=InteractionsConfig(source="synthetic", validation_fraction=0.5, test_fraction=0.1),
    checkpoint=CheckpointConfig(every=500),
  )
  config.tables.learning_rate = 0.1
  config.training.steps = 500  # one and a half epochs; twice as many, and it knows its events by heart
  config.training.eval_every = 500
  config.training.eval_batches = 80  # about the events that are validation to its students
  return config


def _student(distillation: DistillationConfig) -> RecsysConfig:
  config = RecsysConfig(
    model=RecommenderConfig(kind="dlrm"),
    data=InteractionsConfig(source="synthetic", validation_fraction=0.1, test_fraction=0.1),
    distillation=distillation,
    checkpoint=CheckpointConfig(every=500),
  )
  config.training.steps = 800
  config.training.eval_every = 400
  return config
