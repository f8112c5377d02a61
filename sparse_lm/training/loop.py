"""Training a language model: set-up, the loop, and what happens at its end, wanted or not.

Steps are dispatched ahead: the metrics of step n are read while step n + 1 runs, and the host is never more than
`_STEPS_IN_FLIGHT` steps ahead. Everything that decides the next step is in the checkpoint (state, data position) or in
the config, so the same command continues a run that was stopped, and reaches the same losses bit for bit on the same
mesh.

A run by twell has two compiled steps and takes the dense one until its gates are sparse. The device decides, every
`sparsity.DECISION_EVERY` steps, and the host reads its answer then and at the start, never between.
"""

import collections
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_lm import config_io, data
from sparse_lm.config import LmConfig
from sparse_lm.errors import NonFiniteError, Preempted, UserError
from sparse_lm.models.transformer import Transformer
from sparse_lm.parallel.mesh import make_mesh
from sparse_lm.parallel.sharding import RULES
from sparse_lm.training import checkpoint, losses, recorder, sparsity
from sparse_lm.training.meter import Meter
from sparse_lm.training.progress import Progress
from sparse_lm.training.state import COMPILER_OPTIONS, TrainState, make_init, make_train_step
from sparse_lm.training.stop import StopSignal

Json = dict[str, Any]
_STEPS_IN_FLIGHT = 2

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
  if config.training.tensorboard:
    recorder.require_tensorboard()
  progress = progress or Progress(config.training.steps)
  _refuse_corpus_around(workdir, config)
  with recorder.lock(workdir):
    _refuse_converted(workdir)
    _refuse_other_config(workdir, config)
    mesh = make_mesh(config)
    dataset = data.open_dataset(config, report=progress.line)
    with jax.set_mesh(mesh):
      return _Run(config, workdir, mesh, dataset, progress).run()


class _Run:
  """One run, with all it holds open."""

  def __init__(self, config: LmConfig, workdir: Path, mesh: Mesh, dataset: data.Dataset, progress: Progress):
    self.config, self.workdir, self.dataset, self.progress = config, workdir, dataset, progress
    self.mesh = mesh
    self.by_twell = config.model.ffn_implementation == "twell"
    self.identity: Json = {
      "config": config_io.to_dict(config),
      "tokenizer": dataset.tokenizer.fingerprint,
      "vocab_size": dataset.tokenizer.vocab_size,  # the rows of the vocabulary above it are padding
      "dataset": dataset.fingerprint,
    }
    self.batches = dataset.training_batches(process_index=jax.process_index(), process_count=jax.process_count())

  def run(self) -> Json:
    config, training = self.config, self.config.training
    state = self._first_state()
    done = int(state.step)
    if done == training.steps:
      self.progress.line(f"run {self.workdir} is finished: {done} of {training.steps} steps are done")
      return (recorder.read_metrics(self.workdir / "metrics.jsonl") or [{}])[-1]
    self.saver = checkpoint.Saver(self.workdir / "checkpoints", config.checkpoint.keep)
    recorder.write_json(self.workdir / "config.json", self.identity["config"])
    recorder.write_json(self.workdir / "env.json", recorder.environment() | {"mesh": dict(self.mesh.shape)})
    recorder.write_text(self.workdir / "tokenizer.json", self.dataset.tokenizer.json_text)
    self.metrics = recorder.MetricsWriter(
      self.workdir, first_step=done, tensorboard=training.tensorboard, report=self.progress.line
    )
    self.meter = Meter(config, list(self.mesh.devices.flat))
    self.ffn = self._wanted_ffn(state)  # what computes the feed-forward blocks, in validation too
    self.compiled = {self.ffn: self._compile(state, self.ffn)}  # steps; the other one when it is first needed
    with StopSignal() as stop:
      try:
        return self._loop(state, done, stop)
      finally:
        self.batches.close()
        self.metrics.close()
        self.progress.close()

  def _loop(self, state: TrainState, done: int, stop: StopSignal) -> Json:
    training = self.config.training
    metrics: Json = {}  # of the last step, on the device
    unread: tuple[int, Json] | None = None  # a step and its metrics, still on the device
    entry: Json = {}
    saved = done
    in_flight: collections.deque[jax.Array] = collections.deque()
    self.meter.start(done)
    while done < training.steps and not stop.requested:
      batch = self._put(next(self.batches), micro_batches=training.accumulation_steps)
      if self.by_twell and done % sparsity.DECISION_EVERY == 0:
        if unread is not None:  # reading the decision waits for this step anyway, and its line names what computed it
          entry, unread = self._log(*unread), None
        self._choose_step(state, done, metrics)
      with jax.profiler.StepTraceAnnotation("train", step_num=done + 1):
        state, metrics = self.compiled[self.ffn](state, batch)
      done += 1
      in_flight.append(metrics["loss"])
      if len(in_flight) > _STEPS_IN_FLIGHT:
        in_flight.popleft().block_until_ready()

      if unread is not None:
        entry, unread = self._log(*unread), None
      last = done == training.steps
      if self.dataset.validation is not None and (last or done % training.eval_every == 0):
        entry = self._log(done, metrics, state)
      elif last or done % training.log_every == 0:
        unread = done, metrics
      if last or done % self.config.checkpoint.every == 0:
        if unread is not None:  # saving waits for this step anyway, and its metrics are to be written even if it is bad
          entry, unread = self._log(*unread), None
        self._save(state, done)
        saved = done
    if unread is not None:
      entry = self._log(*unread)
    if done < training.steps:
      if saved < done:
        self._save(state, done)
      self.saver.wait()
      raise Preempted(f"stopped by {stop.requested} after step {done} of {training.steps}; the same command goes on")
    self.saver.wait()
    return entry

  def _first_state(self) -> TrainState:
    """From the newest whole checkpoint of this run, else from checkpoint.restore_path, else fresh."""
    directory = self.workdir / "checkpoints"
    init = make_init(self.config)
    spec = lambda x: x.sharding.spec if x.sharding is not None else P()  # a scalar has no sharding yet
    on_mesh = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec(x)))
    abstract = jax.tree.map(on_mesh, init.trace().out_info)
    loaded = checkpoint.load_latest(directory, abstract, self._refuse_other_run, self.progress.line)
    if loaded is not None:
      state, metadata = loaded
      self.batches.restore(metadata["batches"])
      unused = "" if self.config.checkpoint.restore_path is None else ", and not from checkpoint.restore_path"
      self.progress.line(f"resuming at step {int(state.step)} from {directory}{unused}")
      return state
    self._refuse_lost_checkpoints()
    self.progress.line(f"no checkpoint in {directory}: starting at step 0")
    state = init()
    if self.config.checkpoint.restore_path is not None:
      path = Path(os.path.expanduser(self.config.checkpoint.restore_path))
      state = dataclasses.replace(state, model=self._foreign_parameters(path, abstract.model))
      self.progress.line(f"parameters come from {path}")
    return state

  def _foreign_parameters(self, path: Path, abstract: Transformer) -> Transformer:
    """Those of another run's checkpoint, which has to be one of the same model and tokenizer."""
    given = f"checkpoint.restore_path={str(path)!r}"
    if not (path.name.isdigit() and os.path.isdir(path)):
      raise UserError(f"{given} is no checkpoint; give WORKDIR/checkpoints/STEP of another run")
    try:
      metadata = checkpoint.read_metadata(path)
      _refuse_differences(given, metadata["config"], self.config, compared=("model.",), free=_FREE_MODEL_FIELDS)
      self._refuse_other_tokenizer(given, metadata)
      return checkpoint.load(path, {"model": abstract})["model"]
    except checkpoint.DamagedError as error:
      raise UserError(f"{given} cannot be used: {error}") from None

  def _refuse_lost_checkpoints(self) -> None:
    """Starting again would drop the metrics of what was trained."""
    metrics = recorder.read_metrics(self.workdir / "metrics.jsonl")
    path = self.workdir / "config.json"
    # A run that was killed before its first checkpoint has none either; before its second, the first is on disk.
    if metrics and path.exists() and metrics[-1]["step"] >= 2 * recorder.read_json(path)["checkpoint"]["every"]:
      raise UserError(
        f"work folder {self.workdir} has metrics up to step {metrics[-1]['step']} but no checkpoint; restore its"
        " checkpoints, or give another --workdir to train again"
      )

  def _refuse_other_tokenizer(self, where: str, metadata: Json) -> None:
    if metadata["tokenizer"] != self.identity["tokenizer"]:
      raise UserError(
        f"{where} was trained with another tokenizer (fingerprint {metadata['tokenizer'][:12]}, now"
        f" {self.identity['tokenizer'][:12]}); its vocabulary would be read wrongly. Without data.tokenizer a tokenizer"
        " is trained on the corpus; give that run's tokenizer.json, or other data, or another --workdir"
      )

  def _refuse_other_run(self, metadata: Json) -> None:
    where = f"work folder {self.workdir}"
    self._refuse_other_tokenizer(where, metadata)
    _refuse_differences(where, metadata["config"], self.config)
    if metadata["dataset"] != self.identity["dataset"]:
      raise UserError(
        f"the checkpoints in {self.workdir} were trained on other data (fingerprint {metadata['dataset'][:12]},"
        f" now {self.identity['dataset'][:12]}); restore the files behind data.path (hub: give the commit that the run"
        " named at its start as data.hub_revision), or give another --workdir"
      )

  def _wanted_ffn(self, state: TrainState) -> str:
    """What is to compute the next step; waits for the state, unless the run is dense throughout."""
    return "twell" if self.by_twell and bool(state.is_sparse) else "dense"

  def _choose_step(self, state: TrainState, done: int, metrics: Json) -> None:
    """Goes over to the other step if the last one, whose metrics these are, has decided so."""
    ffn = self._wanted_ffn(state)
    if ffn == self.ffn:
      return
    below, above = sparsity.l0_limits(self.config)
    to_sparse, to_dense = (f"every layer below {below:g}", "sparse"), (f"a layer above {above:g}", "dense")
    found, kind = to_sparse if ffn == "twell" else to_dense
    largest = float(np.max(metrics["l0_per_layer"]))
    self.progress.line(
      f"step {done}: {found} of {self.config.model.ffn_width} neurons (largest {largest:.1f}): {kind} from here on"
    )
    self.ffn = ffn
    if ffn not in self.compiled:
      with self.meter.paused():  # nothing is in flight: the decision was of the last step that was dispatched
        self.compiled[ffn] = self._compile(state, ffn)

  def _compile(self, state: TrainState, ffn: str) -> Callable:
    """Ahead of time, so that the first step is like every other and the memory it needs is known before it starts."""
    start, training = time.perf_counter(), self.config.training
    rows = data.padding(training.batch_size // jax.process_count(), self.config.model.context_length)
    batch = self._put(rows, training.accumulation_steps)
    config = config_io.overlay(self.config, {"model.ffn_implementation": ffn})
    step = make_train_step(config).lower(state, batch).compile()
    memory = step.memory_analysis()
    temporaries = f", {memory.temp_size_in_bytes / 2**20:,.0f} MiB of temporaries" if memory is not None else ""
    kind = f"{ffn} " if self.by_twell else ""
    self.progress.line(f"compiled the {kind}training step in {time.perf_counter() - start:.1f} s{temporaries}")
    return step

  def _put(self, batch: dict[str, np.ndarray], micro_batches: int | None = None) -> dict[str, jax.Array]:
    """This process's rows, onto the mesh: [B, L], or [A, B/A, L] for A micro-batches."""
    spec, split = RULES.activations(2), lambda x: x
    if micro_batches is not None:
      spec, split = P(None, *spec), lambda x: x.reshape(micro_batches, -1, x.shape[-1])
    sharding = NamedSharding(self.mesh, spec)
    return {name: jax.make_array_from_process_local_data(sharding, split(x)) for name, x in batch.items()}

  def _log(self, step: int, metrics: Json, state: TrainState | None = None) -> Json:
    """Reads and writes the metrics of a step, validation included if a state is given; stops on NaN."""
    values = jax.device_get(metrics)
    bad = int(values.pop("first_bad_step"))
    entry = {"step": step, "loss": float(values.pop("loss"))} | ({"ffn": self.ffn} if self.by_twell else {})
    entry |= {name: np.asarray(value).tolist() for name, value in values.items()}
    entry |= _over_layers(entry, self.config)
    entry |= self.meter.read(step)
    if state is not None and bad < 0:
      with self.meter.paused():
        entry |= self._evaluate(state)
    self.metrics.write(entry)
    self.progress.step(step, _line(entry, self.config))
    if bad >= 0:
      self._stop_on_nonfinite(bad)
    self.saver.wait(timeout=0)  # a full disk is said now, not when the next checkpoint is due
    return entry

  def _evaluate(self, state: TrainState) -> Json:
    config, model, totals = self.config, state.model.with_ffn(self.ffn), None
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

  def _save(self, state: TrainState, step: int) -> None:
    with self.meter.paused():
      if (bad := int(state.first_bad_step)) >= 0:
        self._stop_on_nonfinite(bad)
      self.saver.save(step, state, self.identity | {"batches": self.batches.state(), "step": step})

  def _stop_on_nonfinite(self, bad: int) -> None:
    self.saver.wait()
    kept = checkpoint.steps(self.workdir / "checkpoints")
    raise NonFiniteError(
      f"the loss or its gradient became NaN or infinite in step {bad};"
      f" {f'the last good checkpoint is step {kept[-1]}' if kept else 'there is no checkpoint yet'}."
      " Lower training.learning_rate or sparsity.l1_coefficient and start with another --workdir"
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


def _line(entry: Json, config: LmConfig) -> str:
  parts = [f"loss {entry['loss']:.4f}"]
  if "validation_loss" in entry:
    parts.append(f"validation {entry['validation_loss']:.4f}")
  if "l0" in entry:
    parts.append(f"l0 {entry['l0']:.1f} of {config.model.ffn_width}")
  parts.append(f"{entry['tokens_per_second']:,.0f} tokens/s")
  if entry["mfu"] is not None:
    parts.append(f"MFU {entry['mfu']:.1%}")
  left = (config.training.steps - entry["step"]) * entry["seconds_per_step"]
  return "  ".join([*parts, f"{int(left) // 60}:{int(left) % 60:02} left"])


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


def _refuse_other_config(workdir: Path, config: LmConfig) -> None:
  """A run that failed before its first step binds nobody."""
  path = workdir / "config.json"
  if path.exists() and (checkpoint.steps(workdir / "checkpoints") or recorder.read_metrics(workdir / "metrics.jsonl")):
    _refuse_differences(f"work folder {workdir}", recorder.read_json(path), config)


def _refuse_differences(
  where: str, old: Json, config: LmConfig, *, compared: tuple[str, ...] = ("",), free: tuple[str, ...] = _FREE_FIELDS
) -> None:
  changed = [
    f"{name}: {before!r} -> {now!r}"
    for name, before, now in config_io.differences(old, config_io.to_dict(config))
    if name.startswith(compared) and not name.startswith(free)
  ]
  if changed:
    raise UserError(
      f"{where} holds a run with another config ({'; '.join(changed)});"
      " change the fields back to go on from it, or give another one"
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
