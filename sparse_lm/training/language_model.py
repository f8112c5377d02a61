"""Training of a language model, as the loop sees it.

A run by twell has two programs for a step and takes the dense one until its gates are sparse; the device decides, every
`sparsity.DECISION_EVERY` steps.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_lm import config_io, data
from sparse_lm.config import LmConfig
from sparse_lm.errors import UserError
from sparse_lm.models.transformer import Transformer
from sparse_lm.parallel.mesh import make_mesh
from sparse_lm.parallel.sharding import RULES
from sparse_lm.training import checkpoint, loop, losses, mfu, recorder, sparsity
from sparse_lm.training.progress import Progress
from sparse_lm.training.state import COMPILER_OPTIONS, TrainState, make_init, make_train_step
from sparse_lm.training.task import Task, refuse_differences

Json = dict[str, Any]

# Fields that a resumed run may change: they decide where and how often, not what is computed. What lies behind a path
# is compared by fingerprint.
_FREE_FIELDS = (
  "parallel.",
  "checkpoint.",
  "training.log_every",
  "training.eval_",
  "training.tensorboard",
  "data.path",
  "data.hub_revision",
  "data.tokenizer",
  "data.cache_dir",
  "data.loader",
)

# Fields of the model that another run's parameters do not depend on.
_FREE_MODEL_FIELDS = (
  "model.context_length",
  "model.init_std",
  "model.remat",
  "model.attention_implementation",
  "model.ffn_implementation",
)


def train(config: LmConfig, workdir: Path, *, progress: Progress | None = None) -> Json:
  """Trains until `training.steps`, from the newest whole checkpoint in the work folder if there is one.

  Args:
    config: validated here.
    workdir: a leading ~ is the home folder; receives config.json, env.json, metrics.jsonl and checkpoints/.
    progress: where lines and the bar go; standard output unless given.

  Returns:
    The last object of metrics.jsonl, {} if a finished run has lost it.

  Raises:
    UserError: the config, the data or the folder do not allow the run; nothing was changed.
    NonFiniteError: NaN or infinity; metrics are written and the last good checkpoint is kept.
    SaveError: a checkpoint could not be written.
    Preempted: a signal asked the run to stop; its state is saved.
  """
  config.validate()
  workdir = Path(os.path.expanduser(workdir))
  _refuse_corpus_around(workdir, config)
  make_task = lambda report: LanguageTask(config, report)
  return loop.train(config, workdir, make_task, check=_refuse_converted, free_fields=_FREE_FIELDS, progress=progress)


class LanguageTask(Task):
  """Next-token prediction on blocks of text."""

  unit = "token"
  remedy = "training.learning_rate or sparsity.l1_coefficient"

  def __init__(self, config: LmConfig, report: Callable[[str], None]):
    self.config: LmConfig = config
    self.mesh = make_mesh(config)
    self.dataset = data.open_dataset(config, report=report)
    self.by_twell = config.model.ffn_implementation == "twell"
    self.units_per_step = config.training.batch_size * config.model.context_length
    self.validates = self.dataset.validation is not None
    self.identity = {
      "tokenizer": self.dataset.tokenizer.fingerprint,
      "vocab_size": self.dataset.tokenizer.vocab_size,  # the rows of the vocabulary above it are padding
      "dataset": self.dataset.fingerprint,
    }

  def training_batches(self) -> data.BatchIterator:
    return self.dataset.training_batches(process_index=jax.process_index(), process_count=jax.process_count())

  def make_init(self) -> jax.stages.Wrapped:
    return make_init(self.config)

  def write_files(self, workdir: Path) -> None:
    recorder.write_text(workdir / "tokenizer.json", self.dataset.tokenizer.json_text)

  def utilisation(self, units_per_second: float) -> float | None:
    return mfu.training_mfu(self.config.model, units_per_second, list(self.mesh.devices.flat))

  def wanted_variant(self, state: TrainState) -> str:
    """What is to compute the feed-forward blocks; waits for the state, unless the run is dense throughout."""
    if not self.by_twell:
      return ""
    return "twell" if bool(state.is_sparse) else "dense"

  def may_change_after(self, steps: int) -> bool:
    return self.by_twell and steps % sparsity.DECISION_EVERY == 0

  def change_line(self, variant: str, metrics: Json) -> str:
    below, above = sparsity.l0_limits(self.config)
    to_sparse, to_dense = (f"every layer below {below:g}", "sparse"), (f"a layer above {above:g}", "dense")
    found, kind = to_sparse if variant == "twell" else to_dense
    largest = float(np.max(metrics["l0_per_layer"]))
    return f"{found} of {self.config.model.ffn_width} neurons (largest {largest:.1f}): {kind} from here on"

  def compile(self, state: TrainState, variant: str) -> jax.stages.Compiled:
    rows = self.config.training.batch_size // jax.process_count()
    batch = self.place(data.padding(rows, self.config.model.context_length))
    config = config_io.overlay(self.config, {"model.ffn_implementation": variant or "dense"})
    return make_train_step(config).lower(state, batch).compile()

  def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """[A, B/A, L] for A micro-batches."""
    return self._put(batch, self.config.training.accumulation_steps)

  def _put(self, batch: dict[str, np.ndarray], micro_batches: int | None = None) -> dict[str, jax.Array]:
    """This process's rows, onto the mesh: [B, L], or [A, B/A, L] for A micro-batches."""
    spec, split = RULES.activations(2), lambda x: x
    if micro_batches is not None:
      spec, split = P(None, *spec), lambda x: x.reshape(micro_batches, -1, x.shape[-1])
    sharding = NamedSharding(self.mesh, spec)
    return {name: jax.make_array_from_process_local_data(sharding, split(x)) for name, x in batch.items()}

  def entry(self, values: Json, variant: str) -> Json:
    return ({"ffn": variant} if variant else {}) | values | _over_layers(values, self.config)

  def highlights(self, entry: Json) -> list[str]:
    return [f"l0 {entry['l0']:.1f} of {self.config.model.ffn_width}"] if "l0" in entry else []

  def evaluate(self, state: TrainState, variant: str) -> Json:
    config, model, totals = self.config, state.model.with_ffn(variant or "dense"), None
    assert self.dataset.validation is not None
    batches = data.validation_batches(
      self.dataset.validation,
      batch_size=config.training.batch_size // config.training.accumulation_steps,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
    )
    for n, batch in enumerate(batches):
      if n == config.training.eval_batches:
        break
      part = _eval_step(model, self._put(batch), document_mask=config.data.document_mask)
      totals = part if totals is None else losses.add(totals, part)
    means = {name: np.asarray(x).tolist() for name, x in losses.summarize(*jax.device_get(totals)).items()}
    means |= _over_layers(means, config)
    means["loss"] = means.pop("cross_entropy")
    return {f"validation_{name}": value for name, value in means.items()}

  def foreign_parameters(self, given: str, path: Path, abstract: Transformer) -> Transformer:
    """Those of a run of the same model and tokenizer."""
    try:
      metadata = checkpoint.read_metadata(path)
      refuse_differences(given, metadata["config"], self.config, compared=("model.",), free=_FREE_MODEL_FIELDS)
      self._refuse_other_tokenizer(given, metadata)
      return checkpoint.load(path, {"model": abstract})["model"]
    except checkpoint.DamagedError as error:
      raise UserError(f"{given} cannot be used: {error}") from None

  def _refuse_other_tokenizer(self, where: str, metadata: Json) -> None:
    if metadata["tokenizer"] != self.identity["tokenizer"]:
      raise UserError(
        f"{where} was trained with another tokenizer (fingerprint {metadata['tokenizer'][:12]}, now"
        f" {self.identity['tokenizer'][:12]}); its vocabulary would be read wrongly. Without data.tokenizer a tokenizer"
        " is trained on the corpus; give that run's tokenizer.json, or other data, or another --workdir"
      )

  def refuse_other_run(self, directory: Path, metadata: Json) -> None:
    where = f"work folder {directory.parent}"
    if "tokenizer" not in metadata:
      raise UserError(f"{where} holds a run that is no language model; give another --workdir")
    self._refuse_other_tokenizer(where, metadata)
    refuse_differences(where, metadata["config"], self.config, free=_FREE_FIELDS)
    if metadata["dataset"] != self.identity["dataset"]:
      raise UserError(
        f"the checkpoints in {directory.parent} were trained on other data (fingerprint {metadata['dataset'][:12]},"
        f" now {self.identity['dataset'][:12]}); restore the files behind data.path (hub: give the commit that the run"
        " named at its start as data.hub_revision), or give another --workdir"
      )


@jax.jit(static_argnames="document_mask", compiler_options=COMPILER_OPTIONS)
def _eval_step(model, batch: dict[str, jax.Array], *, document_mask: bool) -> tuple[losses.Sums, losses.Totals]:
  return losses.forward(model, batch, document_mask=document_mask), losses.totals(batch)


def _over_layers(entry: Json, config: LmConfig) -> Json:
  """Means over layers, and shares of the hidden units; nothing where the model has no hidden units."""
  if config.model.ffn_kind == "none":
    return {}
  l0 = float(np.mean(entry["l0_per_layer"]))
  return {
    "l1": float(np.mean(entry["l1_per_layer"])),
    "l0": l0,
    "zeros": 1 - l0 / config.model.ffn_width,
    "dead": float(np.mean(entry["dead_per_layer"])) / config.model.ffn_width,
  }


def _refuse_converted(workdir: Path) -> None:
  """A converted checkpoint holds parameters and nothing that a run could go on from."""
  for step in checkpoint.steps(workdir / "checkpoints")[-1:]:
    path, metadata = workdir / "checkpoints" / str(step), {}
    with contextlib.suppress(checkpoint.DamagedError):  # said when it is loaded
      metadata = checkpoint.read_metadata(path)
    if metadata.get("dataset", "unknown") is None:
      raise UserError(
        f"work folder {workdir} holds the parameters of a converted checkpoint, and no run; to train them give another"
        f" --workdir and --config.checkpoint.restore_path={path}"
      )


def _refuse_corpus_around(workdir: Path, config: LmConfig) -> None:
  """The run's own metrics.jsonl would become text of the corpus."""
  for entry in (config.data.path or "").split(",") if config.data.source in ("text", "hub") else []:
    folder = Path(os.path.expanduser(entry.strip())).absolute()
    if folder.is_dir() and workdir.absolute().is_relative_to(folder):
      raise UserError(
        f"work folder {workdir} lies inside the corpus data.path={entry!r} and would become part of it;"
        " give a --workdir outside"
      )
