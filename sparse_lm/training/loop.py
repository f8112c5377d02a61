"""The training loop, whatever is trained: what begins a run, its steps, and what happens at its end, wanted or not.

Steps are dispatched ahead: the metrics of step n are read while step n + 1 runs, and the host is never more than
`_STEPS_IN_FLIGHT` steps ahead. Everything that decides the next step is in the checkpoint (state, data position) or in
the config, so the same command continues a run that was stopped, and reaches the same losses bit for bit on the same
mesh.

A task may have several compiled steps. The device decides which comes next, and the host reads its answer at the start
and where the task says that it may have changed, never between.
"""

import collections
import dataclasses
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_lm import config_io
from sparse_lm.errors import NonFiniteError, Preempted, UserError
from sparse_lm.training import checkpoint, recorder
from sparse_lm.training.meter import Meter
from sparse_lm.training.progress import Progress
from sparse_lm.training.stop import StopSignal
from sparse_lm.training.task import RunConfig, Task, refuse_differences

Json = dict[str, Any]
_STEPS_IN_FLIGHT = 2


def train(
  config: RunConfig,
  workdir: Path,
  make_task: Callable[[Callable[[str], None]], Task],
  *,
  check: Callable[[Path], None],
  free_fields: tuple[str, ...],
  progress: Progress | None,
) -> Json:
  """Trains until `training.steps`, from the newest whole checkpoint in the work folder if there is one.

  Args:
    config: validated.
    workdir: receives config.json, env.json, metrics.jsonl and checkpoints/.
    make_task: opens the data and says what is trained; it gets what receives lines about slow work.
    check: refuses work folders that hold something else, before the data are opened.
    free_fields: how names of fields start that a resumed run may change.
    progress: where lines and the bar go; standard output unless given.

  Returns:
    The last object of metrics.jsonl, {} if a finished run has lost it.

  Raises:
    UserError: the data or the folder do not allow the run; nothing was changed.
    NonFiniteError: NaN or infinity; metrics are written and the last good checkpoint is kept.
    SaveError: a checkpoint could not be written.
    Preempted: a signal asked the run to stop; its state is saved.
  """
  if config.training.tensorboard:
    recorder.require_tensorboard()
  progress = progress or Progress(config.training.steps)
  with recorder.lock(workdir):
    check(workdir)
    _refuse_other_config(workdir, config, free_fields)
    task = make_task(progress.line)
    with jax.set_mesh(task.mesh):
      return _Run(task, workdir, progress).run()


class _Run:
  """One run, with all it holds open."""

  def __init__(self, task: Task, workdir: Path, progress: Progress):
    self.task, self.config, self.workdir, self.progress = task, task.config, workdir, progress
    self.identity: Json = {"config": config_io.to_dict(task.config)} | task.identity
    self.batches = task.training_batches()

  def run(self) -> Json:
    training = self.config.training
    state = self._first_state()
    done = int(state.step)
    if done == training.steps:
      self.progress.line(f"run {self.workdir} is finished: {done} of {training.steps} steps are done")
      return (recorder.read_metrics(self.workdir / "metrics.jsonl") or [{}])[-1]
    self.saver = checkpoint.Saver(self.workdir / "checkpoints", self.config.checkpoint.keep)
    recorder.write_json(self.workdir / "config.json", self.identity["config"])
    recorder.write_json(self.workdir / "env.json", recorder.environment() | {"mesh": dict(self.task.mesh.shape)})
    self.task.write_files(self.workdir)
    self.metrics = recorder.MetricsWriter(
      self.workdir, first_step=done, tensorboard=training.tensorboard, report=self.progress.line
    )
    self.meter = Meter(self.task)
    self.variant = self.task.wanted_variant(state)  # of the step, in validation too
    self.compiled = {self.variant: self._compile(state, self.variant)}  # the others when they are first needed
    with StopSignal() as stop:
      try:
        return self._loop(state, done, stop)
      finally:
        self.batches.close()
        self.metrics.close()
        self.progress.close()

  def _loop(self, state: Any, done: int, stop: StopSignal) -> Json:
    training = self.config.training
    metrics: Json = {}  # of the last step, on the device
    unread: tuple[int, Json] | None = None  # a step and its metrics, still on the device
    entry: Json = {}
    saved = done
    in_flight: collections.deque[jax.Array] = collections.deque()
    self.meter.start(done)
    while done < training.steps and not stop.requested:
      batch = self.task.place(next(self.batches))
      if self.task.may_change_after(done):
        if unread is not None:  # reading the decision waits for this step anyway, and its line names what computed it
          entry, unread = self._log(*unread), None
        self._choose_step(state, done, metrics)
      with jax.profiler.StepTraceAnnotation("train", step_num=done + 1):
        state, metrics = self.compiled[self.variant](state, batch)
      done += 1
      in_flight.append(metrics["loss"])
      if len(in_flight) > _STEPS_IN_FLIGHT:
        in_flight.popleft().block_until_ready()

      if unread is not None:
        entry, unread = self._log(*unread), None
      last = done == training.steps
      if self.task.validates and (last or done % training.eval_every == 0):
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

  def _first_state(self) -> Any:
    """From the newest whole checkpoint of this run, else from checkpoint.restore_path, else fresh."""
    directory = self.workdir / "checkpoints"
    init = self.task.make_init()
    spec = lambda x: x.sharding.spec if x.sharding is not None else P()  # a scalar has no sharding yet
    on_mesh = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.task.mesh, spec(x)))
    abstract = jax.tree.map(on_mesh, init.trace().out_info)
    check = lambda metadata: self.task.refuse_other_run(directory, metadata)
    loaded = checkpoint.load_latest(directory, abstract, check, self.progress.line)
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
      given = f"checkpoint.restore_path={str(path)!r}"
      if not (path.name.isdigit() and os.path.isdir(path)):
        raise UserError(f"{given} is no checkpoint; give WORKDIR/checkpoints/STEP of another run")
      state = dataclasses.replace(state, model=self.task.foreign_parameters(given, path, abstract.model))
      self.progress.line(f"parameters come from {path}")
    return state

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

  def _choose_step(self, state: Any, done: int, metrics: Json) -> None:
    """Goes over to another step if the last one, whose metrics these are, has decided so."""
    variant = self.task.wanted_variant(state)
    if variant == self.variant:
      return
    self.progress.line(f"step {done}: {self.task.change_line(variant, metrics)}")
    self.variant = variant
    if variant not in self.compiled:
      with self.meter.paused():  # nothing is in flight: the decision was of the last step that was dispatched
        self.compiled[variant] = self._compile(state, variant)

  def _compile(self, state: Any, variant: str) -> Callable:
    """Ahead of time, so that the first step is like every other and the memory it needs is known before it starts."""
    start = time.perf_counter()
    step = self.task.compile(state, variant)
    memory = step.memory_analysis()
    temporaries = f", {memory.temp_size_in_bytes / 2**20:,.0f} MiB of temporaries" if memory is not None else ""
    kind = f"{variant} " if variant else ""
    self.progress.line(f"compiled the {kind}training step in {time.perf_counter() - start:.1f} s{temporaries}")
    return step

  def _log(self, step: int, metrics: Json, state: Any = None) -> Json:
    """Reads and writes the metrics of a step, validation included if a state is given; stops on NaN."""
    values = jax.device_get(metrics)
    bad = int(values.pop("first_bad_step"))
    entry = {"step": step, "loss": float(values.pop("loss"))}
    entry |= self.task.entry({name: np.asarray(value).tolist() for name, value in values.items()}, self.variant)
    entry |= self.meter.read(step)
    if state is not None and bad < 0:
      with self.meter.paused():
        entry |= self.task.evaluate(state, self.variant)
    self.metrics.write(entry)
    self.progress.step(step, self._line(entry))
    if bad >= 0:
      self._stop_on_nonfinite(f"the loss or its gradient became NaN or infinite in step {bad}")
    if not math.isfinite(entry.get("validation_loss", 0.0)):
      self._stop_on_nonfinite(f"the validation loss is NaN or infinite after step {step}")
    self.saver.wait(timeout=0)  # a full disk is said now, not when the next checkpoint is due
    return entry

  def _line(self, entry: Json) -> str:
    parts = [f"loss {entry['loss']:.4f}"]
    if "validation_loss" in entry:
      parts.append(f"validation {entry['validation_loss']:.4f}")
    unit = self.task.unit
    parts += [*self.task.highlights(entry), f"{entry[f'{unit}s_per_second']:,.0f} {unit}s/s"]
    if entry["mfu"] is not None:
      parts.append(f"MFU {entry['mfu']:.1%}")
    left = (self.config.training.steps - entry["step"]) * entry["seconds_per_step"]
    return "  ".join([*parts, f"{int(left) // 60}:{int(left) % 60:02} left"])

  def _save(self, state: Any, step: int) -> None:
    with self.meter.paused():
      if (bad := int(state.first_bad_step)) >= 0:
        self._stop_on_nonfinite(f"the loss or its gradient became NaN or infinite in step {bad}")
      self.saver.save(step, state, self.identity | {"batches": self.batches.state(), "step": step})

  def _stop_on_nonfinite(self, what: str) -> None:
    self.saver.wait()
    kept = checkpoint.steps(self.workdir / "checkpoints")
    raise NonFiniteError(
      f"{what};"
      f" {f'the last good checkpoint is step {kept[-1]}' if kept else 'there is no checkpoint yet'}."
      f" Lower {self.task.remedy} and start with another --workdir"
    )


def _refuse_other_config(workdir: Path, config: RunConfig, free_fields: tuple[str, ...]) -> None:
  """A run that failed before its first step binds nobody."""
  path = workdir / "config.json"
  if path.exists() and (checkpoint.steps(workdir / "checkpoints") or recorder.read_metrics(workdir / "metrics.jsonl")):
    refuse_differences(f"work folder {workdir}", recorder.read_json(path), config, free=free_fields)
