"""What decides a run of a next-item model. Fields, their meaning and their limits; nothing here imports JAX."""

import dataclasses
import math

from sparse_lm.config import LOADERS, CheckpointConfig, PrecisionConfig, TrainingConfig
from sparse_lm.errors import UserError

MODEL_KINDS = ("sasrec", "hstu")
SEQUENCE_SOURCES = ("movielens_100k", "movielens")


@dataclasses.dataclass
class NextItemModelConfig:
  """Sizes of a model; each kind reads those that it has."""

  kind: str = "hstu"  # one of MODEL_KINDS
  width: int = 50  # of items and tokens
  num_layers: int = 2
  num_heads: int = 1
  head_width: int = 50  # hstu; heads of sasrec share the width evenly
  dropout: float = 0.5  # for the few users of ML-100K; the public configs have 0.2 for ML-1M and ML-20M

  def validate(self) -> None:
    """Raises UserError for sizes that cannot work together."""
    if self.kind not in MODEL_KINDS:
      raise UserError(f"model.kind={self.kind!r} is unknown; allowed: {', '.join(MODEL_KINDS)}")
    for name in ("width", "num_layers", "num_heads", "head_width"):
      if getattr(self, name) < 1:
        raise UserError(f"model.{name}={getattr(self, name)} must be at least 1")
    if not 0 <= self.dropout < 1:
      raise UserError(f"model.dropout={self.dropout} must lie in [0, 1)")
    if self.kind == "sasrec" and self.width % self.num_heads:
      raise UserError(
        f"model.width={self.width} is not divisible by model.num_heads={self.num_heads}; heads of sasrec share the"
        " width evenly"
      )


@dataclasses.dataclass
class SequencesConfig:
  """Where interactions come from, and how much of a user's past is seen. Every event counts, whatever its rating."""

  source: str = "movielens_100k"  # fetched once; movielens: files of data.path
  path: str | None = None  # movielens: a folder, or its ratings file (.inter, ratings.dat, ratings.csv)
  longest: int = 50  # events of a user that are kept, the newest; the last of them is only predicted
  loader: str = "auto"  # grain where it is installed, else numpy; both give the same batches
  cache_dir: str | None = None  # fetched files; None: $XDG_CACHE_HOME/sparse-lm or ~/.cache/sparse-lm

  def validate(self) -> None:
    """Raises UserError for a path that is missing or would be ignored, and for sizes out of range."""
    if self.source not in SEQUENCE_SOURCES:
      raise UserError(f"data.source={self.source!r} is unknown; allowed: {', '.join(SEQUENCE_SOURCES)}")
    if self.source == "movielens" and not self.path:
      raise UserError("data.source='movielens' needs data.path: a folder or its ratings file")
    if self.source == "movielens_100k" and self.path is not None:
      raise UserError(f"data.source='movielens_100k' reads no data.path, but it is {self.path!r}; leave it out")
    if self.longest < 2:
      raise UserError(f"data.longest={self.longest} must be at least 2: an event, and the one that it predicts")
    if self.loader not in LOADERS:
      raise UserError(f"data.loader={self.loader!r} is unknown; allowed: {', '.join(LOADERS)}")


@dataclasses.dataclass
class SampledSoftmaxConfig:
  """What the model is trained by; the values are those of the public research configs."""

  negatives: int = 128  # items drawn uniformly for each position
  temperature: float = 0.05  # that similarities, which lie in [-1, 1], are divided by

  def validate(self) -> None:
    """Raises UserError for values out of range."""
    if self.negatives < 1:
      raise UserError(f"loss.negatives={self.negatives} must be at least 1")
    if not (self.temperature > 0 and math.isfinite(self.temperature)):
      raise UserError(f"loss.temperature={self.temperature} must be positive")


def _training() -> TrainingConfig:
  return TrainingConfig(steps=1200, batch_size=64, weight_decay=0.0, beta2=0.98, warmup_steps=50, eval_every=200)


@dataclasses.dataclass
class NextItemConfig:
  """Everything that decides a run; saved as config.json and compared when the run resumes. A run has one device."""

  model: NextItemModelConfig = dataclasses.field(default_factory=NextItemModelConfig)
  precision: PrecisionConfig = dataclasses.field(default_factory=lambda: PrecisionConfig(recipe="fp32"))
  data: SequencesConfig = dataclasses.field(default_factory=SequencesConfig)
  loss: SampledSoftmaxConfig = dataclasses.field(default_factory=SampledSoftmaxConfig)
  training: TrainingConfig = dataclasses.field(default_factory=_training)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  seed: int = 0

  def validate(self) -> None:
    """Raises UserError, naming the field and both values, at the first thing that cannot work."""
    for section in (self.model, self.precision, self.data, self.loss, self.training, self.checkpoint):
      section.validate()
    if self.training.accumulation_steps != 1:
      raise UserError(
        f"training.accumulation_steps={self.training.accumulation_steps}, but a next-item model takes one step on the"
        " whole batch; set 1, and a training.batch_size that fits"
      )
    if self.checkpoint.restore_path is not None:
      raise UserError(
        "checkpoint.restore_path is for language models; a next-item model goes on from its own --workdir"
      )
    if not 0 <= self.seed < 2**32:
      raise UserError(f"seed={self.seed} must lie in [0, 2**32)")
