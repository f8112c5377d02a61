"""What decides a run of a recommender. Fields, their meaning and their limits; nothing here imports JAX."""

import dataclasses
import math
from typing import Any

from sparse_lm.config import LOADERS, CheckpointConfig, PrecisionConfig, TrainingConfig
from sparse_lm.errors import UserError

MODEL_KINDS = ("logistic", "dlrm", "dcnv2", "wukong", "din", "interformer", "gem")
MODELS_WITH_HISTORY = ("din", "interformer", "gem")
INTERACTION_SOURCES = ("movielens_100k", "movielens", "kuairand", "bars", "criteo", "synthetic")
KUAIRAND_LABELS = (
  "is_click",
  "long_view",
  "is_like",
  "is_follow",
  "is_comment",
  "is_forward",
  "is_hate",
  "is_profile_enter",
)
SPLITS = ("time", "user_time")


@dataclasses.dataclass
class StreamConfig:
  """gem, interformer: what becomes of a stream of events, with sizes of its own (event-level personalisation)."""

  width: int = 16  # gem: of its events inside the model; those of interformer are as wide as its tokens
  num_heads: int = 2
  window: int | None = 16  # events on either side that an event sees
  block: int | None = None  # or the events of its block, counted from the first; neither: all events
  neurons: int = 16  # gem: of the personalised feed-forward block
  seeds: int = 8  # that gather from the events
  pooled_tokens: int | None = 4  # gem: that they are compressed to; None: each seed is a token (PMA)

  def validate(self, name: str, width_name: str, width: int) -> None:
    """Raises UserError for sizes that cannot work together; `name` is that of the section, `width` that of events."""
    _require_positive(name, self)
    if self.window is not None and self.block is not None:
      raise UserError(
        f"{name}.window={self.window} and {name}.block={self.block}: an event has one of them; set the other to None"
      )
    if width % self.num_heads or width // self.num_heads % 4:
      raise UserError(
        f"{width_name}={width} / {name}.num_heads={self.num_heads} must be a multiple of 4: half of a head's pairs turn"
        " with the position, half with time"
      )

  @property
  def tokens(self) -> int:
    """That it gives to the interaction side."""
    return self.seeds if self.pooled_tokens is None else self.pooled_tokens


@dataclasses.dataclass
class RecommenderConfig:
  """Sizes of a model; each kind reads those that it has."""

  kind: str = "gem"  # one of MODEL_KINDS; gem: Kunlun's blocks over the history beside Wukong layers
  width: int = 16  # of interaction tokens; logistic regression has 1
  embedding_width: int | None = None  # of the tables' rows; None: as wide as the tokens
  head_width: int = 64  # of the hidden layer before the logit
  num_layers: int = 2  # of crosses, Wukong layers or blocks
  rank: int = 8  # of factorisation machines
  tokens: int = 8  # that a Wukong layer puts out, half of them by its factorisation machine
  mlp_width: int = 64  # inside a Wukong layer
  mlp_layers: int = 1  # hidden ones inside a Wukong layer
  experts: int = 1  # gem: Wukong layers beside each other, each with its share of the tokens
  summary_tokens: int = 4  # gem, interformer: from which the weights of personalised feed-forward blocks are made
  comp_skip: bool = False  # gem: feed-forward and pooling in every other block, attention in those between
  recompute: bool = False  # gem: blocks are computed again in the backward pass, so that less is kept
  time_scale: float = 86400.0  # gem, interformer: seconds; much younger events are told apart by their position alone
  stream: StreamConfig = dataclasses.field(default_factory=StreamConfig)

  @property
  def table_width(self) -> int:
    """Of the rows of embedding tables."""
    return self.width if self.embedding_width is None else self.embedding_width

  def validate(self) -> None:
    """Raises UserError for sizes that cannot work together."""
    if self.kind not in MODEL_KINDS:
      raise UserError(f"model.kind={self.kind!r} is unknown; allowed: {', '.join(MODEL_KINDS)}")
    _require_positive("model", self)
    if self.kind == "logistic" and (self.width, self.table_width) != (1, 1):
      raise UserError(
        f"model.width={self.width}, model.embedding_width={self.embedding_width}, but logistic regression has one"
        " weight for each id; set model.width=1 and leave the other out"
      )
    if self.kind == "gem" and self.comp_skip and self.num_layers < 3:
      raise UserError(
        f"model.num_layers={self.num_layers} with model.comp_skip=True has no attention, which every other block"
        " between the first and the last has; set at least 3 layers, or comp_skip=False"
      )
    if self.kind in ("wukong", "interformer", "gem") and self.tokens % 2:
      raise UserError(f"model.tokens={self.tokens} must be even: half of them come from the factorisation machine")
    if self.kind == "interformer":  # its events are as wide as its tokens
      self.stream.validate("model.stream", "model.width", self.width)
    else:
      self.stream.validate("model.stream", "model.stream.width", self.stream.width)


def _require_positive(name: str, section: Any) -> None:
  """Raises UserError for a number of a section that is not."""
  for field, value in vars(section).items():
    if isinstance(value, int | float) and not isinstance(value, bool) and not (value > 0 and math.isfinite(value)):
      raise UserError(f"{name}.{field}={value} must be positive")


# What data.path is, for those that read one.
_PATHS = {
  "movielens": "a folder or its ratings file",
  "kuairand": "the folder with log_standard_*.csv",
  "bars": "the folder with train.csv and test.csv",
  "criteo": "train.txt or its folder",
}
# Who reads a field that not every source does: elsewhere it would be ignored.
_FIELDS_OF_SOURCES = {
  "split": ("movielens_100k", "movielens", "kuairand", "synthetic"),
  "test_fraction": ("movielens_100k", "movielens", "kuairand", "criteo", "synthetic"),
  "label": ("kuairand",),
  "positive_from": ("movielens_100k", "movielens"),
  "synthetic_users": ("synthetic",),
  "synthetic_items": ("synthetic",),
  "synthetic_seed": ("synthetic",),
}


@dataclasses.dataclass
class InteractionsConfig:
  """Where interactions come from and which of them are predicted."""

  source: str = "movielens_100k"  # fetched once; synthetic: of a known teacher; others: files of data.path
  path: str | None = None  # a folder, or a file: movielens .inter, ratings.dat or ratings.csv, criteo train.txt
  label: str | None = None  # kuairand: the signal that is predicted, one of KUAIRAND_LABELS; None: the first, is_click
  split: str = "time"  # time: the log is cut at two moments; user_time: each user's events are (not bars, criteo)
  validation_fraction: float = 0.1  # share of the events that a run is judged by; bars: of train.csv, without valid.csv
  test_fraction: float = 0.1  # share of the latest events, evaluated after the last step alone; bars has its own
  positive_from: float = 4.0  # movielens: label from which an event counts as positive; other labels are 0 or 1
  longest: int = 50  # din, interformer, gem: events of a history, the newest
  synthetic_users: int = 2000  # each with a log-normal number of events, 106 in the mean
  synthetic_items: int = 1000
  synthetic_seed: int = 0  # of the teacher and of what is drawn from it
  loader: str = "auto"  # grain where it is installed, else numpy; both give the same batches
  cache_dir: str | None = None  # fetched files; None: $XDG_CACHE_HOME/sparse-lm or ~/.cache/sparse-lm

  def reads(self, field: str) -> bool:
    """Whether the source does: what decides only about others is refused."""
    return self.source in _FIELDS_OF_SOURCES.get(field, INTERACTION_SOURCES)

  def validate(self) -> None:
    """Raises UserError for a path that is missing or would be ignored, and for shares out of range."""
    if self.source not in INTERACTION_SOURCES:
      raise UserError(f"data.source={self.source!r} is unknown; allowed: {', '.join(INTERACTION_SOURCES)}")
    if self.split not in SPLITS:
      raise UserError(f"data.split={self.split!r} is unknown; allowed: {', '.join(SPLITS)}")
    if (self.path is None) == (self.source in _PATHS):
      said = f"needs data.path: {_PATHS[self.source]}" if self.path is None else "reads no data.path; leave it out"
      raise UserError(f"data.source={self.source!r} {said}")
    for name in _FIELDS_OF_SOURCES:
      value = getattr(self, name)
      if not self.reads(name) and value != getattr(InteractionsConfig, name):
        raise UserError(f"data.source={self.source!r} reads no data.{name}, but it is {value!r}; leave it out")
    if self.label not in (None, *KUAIRAND_LABELS):
      raise UserError(f"data.label={self.label!r} is unknown; allowed: {', '.join(KUAIRAND_LABELS)}")
    held_out = self.validation_fraction, self.test_fraction
    if not (min(held_out) >= 0 and sum(held_out) < 1):
      raise UserError(
        f"data.validation_fraction={self.validation_fraction} and data.test_fraction={self.test_fraction} must be at"
        " least 0 and leave events to train on"
      )
    if not math.isfinite(self.positive_from):
      raise UserError(f"data.positive_from={self.positive_from} must be a number")
    if self.path == "":
      raise UserError(f"data.path='' names nothing; give {_PATHS[self.source]}")
    for name, least in (("longest", 0), ("synthetic_users", 1), ("synthetic_items", 1), ("synthetic_seed", 0)):
      if getattr(self, name) < least:
        raise UserError(f"data.{name}={getattr(self, name)} must be at least {least}")
    if self.loader not in LOADERS:
      raise UserError(f"data.loader={self.loader!r} is unknown; allowed: {', '.join(LOADERS)}")


@dataclasses.dataclass
class TablesConfig:
  """Embedding tables, and the row-wise Adagrad that updates the rows a batch has looked up."""

  init_std: float = 0.05
  learning_rate: float = 0.05
  epsilon: float = 1e-6

  def validate(self) -> None:
    """Raises UserError for values out of range."""
    for name, value in dataclasses.asdict(self).items():
      if not (value > 0 and math.isfinite(value)):
        raise UserError(f"tables.{name}={value} must be positive")


@dataclasses.dataclass
class DistillationConfig:
  """What a model learns from another one, beside the labels."""

  teacher: str | None = None  # work folder of a finished run on the same log, trained on no event held out here
  weight: float = 1.0  # of the cross-entropy against the teacher, beside that against the labels
  adapter: bool = False  # correct the teacher by the labels of events that it was not trained on
  adapter_width: int = 32  # of the adapter's hidden layer

  def validate(self) -> None:
    """Raises UserError for a teacher that has no name, values out of range, and an adapter of nothing."""
    if self.teacher == "":
      raise UserError("distillation.teacher='' names nothing; give the --workdir of a finished run")
    if not (self.weight >= 0 and math.isfinite(self.weight)):
      raise UserError(f"distillation.weight={self.weight} must be 0 or more, and finite")
    if self.adapter_width < 1:
      raise UserError(f"distillation.adapter_width={self.adapter_width} must be at least 1")
    if self.adapter and self.teacher is None:
      raise UserError("distillation.adapter=True, but distillation.teacher=None; name a teacher, or set adapter=False")


def _training() -> TrainingConfig:
  return TrainingConfig(steps=1000, batch_size=256, weight_decay=0.0, beta2=0.999, warmup_steps=50)


@dataclasses.dataclass
class RecsysConfig:
  """Everything that decides a run; saved as config.json and compared when the run resumes. A run has one device."""

  model: RecommenderConfig = dataclasses.field(default_factory=RecommenderConfig)
  precision: PrecisionConfig = dataclasses.field(default_factory=lambda: PrecisionConfig(recipe="fp32"))
  data: InteractionsConfig = dataclasses.field(default_factory=InteractionsConfig)
  tables: TablesConfig = dataclasses.field(default_factory=TablesConfig)
  distillation: DistillationConfig = dataclasses.field(default_factory=DistillationConfig)
  training: TrainingConfig = dataclasses.field(default_factory=_training)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  seed: int = 0

  def validate(self) -> None:
    """Raises UserError, naming the field and both values, at the first thing that cannot work."""
    sections = self.model, self.precision, self.data, self.tables, self.distillation, self.training, self.checkpoint
    for section in sections:
      section.validate()
    if self.training.accumulation_steps != 1:
      raise UserError(
        f"training.accumulation_steps={self.training.accumulation_steps}, but a table takes one step on the whole"
        " batch; set 1, and a training.batch_size that fits"
      )
    if self.checkpoint.restore_path is not None:
      raise UserError("checkpoint.restore_path is for language models; a recommender goes on from its own --workdir")
    if not 0 <= self.seed < 2**32:
      raise UserError(f"seed={self.seed} must lie in [0, 2**32)")
