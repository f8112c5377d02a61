"""The typed config of a language-model run: one dataclass a concern, one home for every default, one validation.

The classes are not frozen because flags set their fields; `LmConfig.validate` runs once, after parsing. Annotations
stay plain (`int`, `str | None`, ...): `sparse_lm/flags.py` reads them.
"""

import dataclasses
import math
from collections.abc import Collection

from sparse_lm.errors import UserError

FFN_KINDS = ("gated_relu", "relu", "gated_silu", "none")
FFN_IMPLEMENTATIONS = ("dense", "twell")
ATTENTION_IMPLEMENTATIONS = ("auto", "xla", "cudnn")
REMAT_POLICIES = ("none", "full", "dots", "dots_and_attention")
RECIPES = ("bf16", "fp32")
L1_REDUCTIONS = ("sum", "mean")
DATA_SOURCES = ("sotu", "python", "text", "hub")
LOADERS = ("auto", "grain", "numpy")
_HUB_FIELDS = ("validation_documents", "hub_subset", "hub_split", "hub_revision")


@dataclasses.dataclass
class ModelConfig:
  """A Llama-like decoder."""

  vocab_size: int = 4096  # rows of the embedding; the tokenizer may use fewer, never more
  context_length: int = 128  # tokens a sequence
  num_layers: int = 4
  model_width: int = 128
  num_heads: int = 4
  num_kv_heads: int | None = None  # None: as many as num_heads (multi-head attention)
  ffn_width: int = 384
  ffn_kind: str = "gated_relu"
  ffn_implementation: str = "dense"  # twell computes only what ReLU lets through, by sparse kernels where they can run
  attention_implementation: str = "auto"  # cudnn on a GPU in bf16, xla elsewhere
  tie_embeddings: bool = True
  rope_theta: float = 10_000.0
  norm_epsilon: float = 1e-5
  init_std: float = 0.02
  remat: str = "none"  # what the backward pass recomputes instead of keeping

  @property
  def head_width(self) -> int:
    """Width of one head; queries of all heads together are as wide as the model."""
    return self.model_width // self.num_heads

  @property
  def kv_heads(self) -> int:
    """Number of key and value heads."""
    return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

  def validate(self) -> None:
    """Raises UserError for sizes that do not fit together."""
    sizes = ["vocab_size", "context_length", "num_layers", "model_width", "num_heads", "ffn_width"]
    _require_positive("model", self, sizes + (["num_kv_heads"] if self.num_kv_heads is not None else []))
    _require_positive("model", self, ["rope_theta", "norm_epsilon", "init_std"])
    _require_one_of("model.ffn_kind", self.ffn_kind, FFN_KINDS)
    _require_one_of("model.ffn_implementation", self.ffn_implementation, FFN_IMPLEMENTATIONS)
    if self.ffn_implementation == "twell" and self.ffn_kind not in ("gated_relu", "relu"):
      raise UserError(
        f"model.ffn_implementation='twell' skips neurons that ReLU switches off, but model.ffn_kind={self.ffn_kind!r}"
        " has none; use ffn_kind gated_relu or relu, or ffn_implementation dense"
      )
    _require_one_of("model.attention_implementation", self.attention_implementation, ATTENTION_IMPLEMENTATIONS)
    _require_one_of("model.remat", self.remat, REMAT_POLICIES)
    if self.model_width % self.num_heads:
      raise UserError(
        f"model.model_width={self.model_width} is not divisible by model.num_heads={self.num_heads};"
        f" the nearest widths that are: {_neighbours(self.model_width, self.num_heads)}"
      )
    if self.head_width % 2:
      raise UserError(
        f"model.model_width={self.model_width} / model.num_heads={self.num_heads} gives heads of odd width"
        f" {self.head_width}; rotary position embedding needs an even one"
      )
    if self.num_heads % self.kv_heads:
      raise UserError(
        f"model.num_heads={self.num_heads} is not divisible by model.num_kv_heads={self.kv_heads};"
        " each key-value head serves the same number of query heads"
      )


@dataclasses.dataclass
class PrecisionConfig:
  """Number formats of compute; weights and optimiser state are always float32."""

  recipe: str = "bf16"

  def validate(self) -> None:
    """Raises UserError for an unknown recipe."""
    _require_one_of("precision.recipe", self.recipe, RECIPES)


@dataclasses.dataclass
class SparsityConfig:
  """What drives hidden activations to zero: objective = CE + coefficient * multiplier * mean over layers of L1."""

  l1_coefficient: float = 0.0  # with target_l0, where the controller starts
  l1_reduction: str = "sum"  # over hidden units: "sum" is the authors' code, "mean" the paper's equation 2
  l1_multiplier: float = (
    1.0  # the authors' trainer multiplies by batch / micro-batch of one device, 64 in the paper's runs
  )
  l1_warmup_start: int = 0  # step up to which the coefficient is 0
  l1_warmup_end: int = 0  # step from which it is whole; linear in between
  target_l0: float | None = None  # mean non-zeros a token and layer that the controller steers the coefficient to
  reinit_rate: float = 0.0  # share of a dead gate row that is redrawn after each step (paper: 0.1); 0 turns it off
  reinit_std: float = 0.02  # of the redrawn part
  sparse_below: float = 0.01  # share of neurons that fire, in every layer, below which twell takes over; 1: at once

  def validate(self, model: ModelConfig) -> None:
    """Raises UserError for fields that contradict each other or would have no effect."""
    _require_one_of("sparsity.l1_reduction", self.l1_reduction, L1_REDUCTIONS)
    _require_at_least("sparsity", self, ["l1_coefficient", "l1_warmup_start", "l1_warmup_end"], 0)
    _require_positive("sparsity", self, ["l1_multiplier", "reinit_std"])
    if not 0 <= self.reinit_rate <= 1:
      raise UserError(f"sparsity.reinit_rate={self.reinit_rate} must lie in [0, 1]")
    if not 0 < self.sparse_below <= 1:
      raise UserError(
        f"sparsity.sparse_below={self.sparse_below} must lie in (0, 1]; 1 trains by twell from the first step on"
      )
    if self.l1_warmup_end < self.l1_warmup_start:
      raise UserError(
        f"sparsity.l1_warmup_end={self.l1_warmup_end} lies before sparsity.l1_warmup_start={self.l1_warmup_start}"
      )
    sparse = self.l1_coefficient > 0 or self.target_l0 is not None or self.reinit_rate > 0
    if sparse and model.ffn_kind not in ("gated_relu", "relu"):
      raise UserError(
        f"model.ffn_kind={model.ffn_kind!r} has no neurons that ReLU can switch off, but sparsity is asked for"
        f" (l1_coefficient={self.l1_coefficient}, target_l0={self.target_l0}, reinit_rate={self.reinit_rate});"
        " use gated_relu or relu, or leave these at 0, None, 0"
      )
    if self.target_l0 is not None:
      if not 0 < self.target_l0 < model.ffn_width:
        raise UserError(
          f"sparsity.target_l0={self.target_l0} must lie between 0 and model.ffn_width={model.ffn_width}, both excluded"
        )
      if self.l1_coefficient == 0:
        raise UserError(
          f"sparsity.target_l0={self.target_l0} needs sparsity.l1_coefficient > 0 as the controller's start"
        )


@dataclasses.dataclass
class DataConfig:
  """Where text comes from and how it becomes blocks of tokens."""

  source: str = "sotu"  # "sotu": US presidents' messages; "python": .py files; "text": text files; "hub": streamed text
  path: str | None = None  # file, folder or glob, several with commas; hub: OWNER/NAME of a data set, or a folder
  tokenizer: str | None = None  # a tokenizer.json or OWNER/NAME on the hub; None trains a byte-level BPE on the corpus
  validation_fraction: float = 0.05  # share of the documents that is held out; 0: no validation
  validation_documents: int = 0  # hub: that many at the start of the stream are held out instead; 0: no validation
  hub_subset: str | None = None  # where a data set has several
  hub_split: str = "train"  # part of the data set that is trained on
  hub_revision: str | None = None  # branch, tag or commit; None: the newest commit, which may be another one tomorrow
  document_mask: bool = False  # True: attention and loss do not cross document borders inside a sequence
  loader: str = "auto"  # grain where it is installed, else numpy; both give the same batches
  cache_dir: str | None = None  # tokenizers and tokenised shards; None: $XDG_CACHE_HOME/sparse-lm or ~/.cache/sparse-lm

  def validate(self) -> None:
    """Raises UserError for a path that is missing, or a field that would be ignored."""
    _require_one_of("data.source", self.source, DATA_SOURCES)
    _require_one_of("data.loader", self.loader, LOADERS)
    if self.source == "sotu" and self.path is not None:
      raise UserError(
        f"data.path={self.path!r} is given but data.source='sotu' reads no path; did you mean data.source=text?"
      )
    if self.source != "sotu" and not self.path:
      allowed = "OWNER/NAME on the hub, or a local folder" if self.source == "hub" else "a file, a folder or a glob"
      raise UserError(f"data.source={self.source!r} needs data.path: {allowed}")
    if not 0 <= self.validation_fraction < 1:
      raise UserError(f"data.validation_fraction={self.validation_fraction} must lie in [0, 1)")
    _require_at_least("data", self, ["validation_documents"], 0)
    if self.source == "hub":
      self._validate_hub()
      return
    for field in dataclasses.fields(self):
      if field.name in _HUB_FIELDS and (value := getattr(self, field.name)) != field.default:
        raise UserError(
          f"data.{field.name}={value!r} is given but is for data.source=hub, and data.source={self.source!r};"
          f" leave it at {field.default!r}"
        )

  def _validate_hub(self) -> None:
    if self.tokenizer is None:
      raise UserError(
        "data.source='hub' needs data.tokenizer: a tokenizer.json, or OWNER/NAME on the hub; a stream is not there to"
        " train one on"
      )
    if self.validation_fraction != 0:
      raise UserError(
        f"data.validation_fraction={self.validation_fraction} is a share of a corpus, and data.source='hub' is a"
        " stream; set data.validation_fraction=0, and data.validation_documents to how many are held out"
      )
    if self.loader != "auto":
      raise UserError(f"data.loader={self.loader!r} is given but data.source='hub' has its own; leave it at 'auto'")


@dataclasses.dataclass
class TrainingConfig:
  """Optimisation and reporting; AdamW with a cosine schedule to zero after a linear warm-up."""

  steps: int = 300
  batch_size: int = 16  # sequences of the global batch
  accumulation_steps: int = 1  # micro-batches a step; the result is the large batch's
  learning_rate: float = 1e-3  # peak
  warmup_steps: int = 30
  beta1: float = 0.9
  beta2: float = 0.95
  epsilon: float = 1e-8
  weight_decay: float = 0.1  # on matrices, not on norm scales
  clip_norm: float = 1.0  # of the global gradient
  log_every: int = 10  # steps
  eval_every: int = 100  # steps; the last step is always evaluated
  eval_batches: int | None = None  # None: the whole validation set
  tensorboard: bool = False  # also write WORKDIR/tensorboard (needs tensorboardX)

  def validate(self) -> None:
    """Raises UserError for sizes out of range."""
    positive = [
      "steps",
      "batch_size",
      "accumulation_steps",
      "learning_rate",
      "epsilon",
      "clip_norm",
      "log_every",
      "eval_every",
    ]
    _require_positive("training", self, positive + (["eval_batches"] if self.eval_batches is not None else []))
    _require_at_least("training", self, ["warmup_steps", "weight_decay"], 0)
    if self.warmup_steps >= self.steps:
      raise UserError(
        f"training.warmup_steps={self.warmup_steps} must be less than training.steps={self.steps};"
        " the learning rate falls after the warm-up"
      )
    for name in ("beta1", "beta2"):
      if not 0 <= getattr(self, name) < 1:
        raise UserError(f"training.{name}={getattr(self, name)} must lie in [0, 1)")
    if self.batch_size % self.accumulation_steps:
      raise UserError(
        f"training.batch_size={self.batch_size} is not divisible by"
        f" training.accumulation_steps={self.accumulation_steps}"
      )


@dataclasses.dataclass
class CheckpointConfig:
  """What is kept of a run's state."""

  every: int = 100  # steps; the last step is always saved
  keep: int = 2  # newest checkpoints kept; a damaged newest one needs a second
  restore_path: str | None = None  # WORKDIR/checkpoints/STEP of another run, whose parameters a new run starts from

  def validate(self) -> None:
    """Raises UserError for sizes out of range."""
    _require_positive("checkpoint", self, ["every", "keep"])


@dataclasses.dataclass
class ParallelConfig:
  """Shape of the device mesh; data * fsdp devices hold the batch, fsdp devices share each weight."""

  data: int | None = None  # None: all devices that fsdp leaves over
  fsdp: int = 1

  def validate(self) -> None:
    """Raises UserError for sizes out of range."""
    _require_positive("parallel", self, ["fsdp"] + (["data"] if self.data is not None else []))


@dataclasses.dataclass
class LmConfig:
  """Everything that decides a run; saved as config.json and compared when the run resumes."""

  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
  sparsity: SparsityConfig = dataclasses.field(default_factory=SparsityConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
  seed: int = 0

  def validate(self) -> None:
    """Raises UserError, naming the field and both values, at the first thing that cannot work."""
    self.model.validate()
    self.precision.validate()
    self.sparsity.validate(self.model)
    self.data.validate()
    self.training.validate()
    self.checkpoint.validate()
    self.parallel.validate()
    if self.model.attention_implementation == "cudnn" and self.precision.recipe != "bf16":
      raise UserError(
        f"model.attention_implementation='cudnn' computes in 16 bits, but precision.recipe={self.precision.recipe!r};"
        " use precision.recipe=bf16 or model.attention_implementation=xla"
      )
    if not 0 <= self.seed < 2**32:
      raise UserError(f"seed={self.seed} must lie in [0, 2**32)")


def _require_positive(prefix: str, section: object, names: Collection[str]) -> None:
  for name in names:
    value = getattr(section, name)
    if not (value > 0 and math.isfinite(value)):
      raise UserError(f"{prefix}.{name}={value} must be positive")
    _require_32_bits(f"{prefix}.{name}", value)


def _require_at_least(prefix: str, section: object, names: Collection[str], low: float) -> None:
  for name in names:
    value = getattr(section, name)
    if not (value >= low and math.isfinite(value)):
      raise UserError(f"{prefix}.{name}={value} must be at least {low}")
    _require_32_bits(f"{prefix}.{name}", value)


def _require_32_bits(name: str, value: float) -> None:
  if isinstance(value, int) and value >= 2**31:
    raise UserError(f"{name}={value} must be less than 2**31; steps and sizes are counted in 32 bits")


def _require_one_of(name: str, value: str, allowed: Collection[str]) -> None:
  if value not in allowed:
    raise UserError(f"{name}={value!r} is unknown; allowed: {', '.join(allowed)}")


def _neighbours(width: int, heads: int) -> str:
  below = width // heads * heads
  return " and ".join(str(w) for w in (below, below + heads) if w > 0)
