"""Speed of language models: `python -m experiments.bench_lm --what=dense`, `sparse`, `training` (on a GPU) or `loop`.

dense: forward (backbone, no head), forward + backward, and the whole AdamW step of the paper's shapes, through the
model code that training uses; float32 master weights, random tokens. sparse: the forward pass with dense and with TwELL
feed-forward blocks, of the same random weights with --non_zeros of their neurons firing, and by how much the results
differ. training: the whole AdamW step likewise, L1 term included, of --train_batch sequences. loop: what the training
loop costs beside the bare jitted step on the demo config, and the time to the first step. Each writes a record and
prints it as a table.
"""

import dataclasses
import functools
import io
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import bench, device
from sparse_lm import config_io, data
from sparse_lm import flags as config_flags
from sparse_lm.benchmark import RECORD, record_cases, require_neurons
from sparse_lm.config import FFN_IMPLEMENTATIONS, LmConfig
from sparse_lm.errors import UserError, first_line
from sparse_lm.models.sparsified import sparsified
from sparse_lm.models.transformer import Transformer
from sparse_lm.parallel.mesh import make_mesh
from sparse_lm.parallel.sharding import RULES
from sparse_lm.tables import sparse_table
from sparse_lm.training import mfu, recorder
from sparse_lm.training.energy import energy_counter
from sparse_lm.training.language_model import train
from sparse_lm.training.losses import objective, totals
from sparse_lm.training.progress import Progress
from sparse_lm.training.state import COMPILER_OPTIONS, make_init, make_train_step

flags.declare_key_flag("record")
_WHAT = flags.DEFINE_enum("what", None, ["dense", "sparse", "training", "loop"], "what to measure")
_MODELS = flags.DEFINE_list(
  "models", ["paper_0_5b", "paper_1b", "paper_1_5b", "paper_2b"], "files of configs/lm; not of loop"
)
_REMAT = flags.DEFINE_list(
  "remat", ["dots_and_attention"], "dense, training: rematerialisation policies of training steps"
)
_count = functools.partial(flags.DEFINE_integer, lower_bound=1)
_FORWARD_BATCH = _count("forward_batch", 64, "dense, sparse: sequences of the forward pass")
_TRAIN_BATCH = flags.DEFINE_list("train_batch", ["8"], "dense, training: sequences of a training step, one case each")
_NON_ZEROS = flags.DEFINE_list(
  "non_zeros", ["29"], "sparse, training: means over tokens of the neurons that fire in a layer"
)
_CALLS = _count("calls", 5, "calls in a queue, not of loop; a time is that of a queue divided by its calls")
_REPEATS = _count("repeats", 5, "queues, of which the median counts; loop: pairs of runs")
_STEPS = flags.DEFINE_integer("steps", 100, "loop: steps of a run", lower_bound=40)  # two log entries past the warm-up

Json = dict[str, Any]
_CALIBRATION = 4  # sequences on which the number of non-zeros is met
_ERROR_LIMIT = {"forward": 3e-2, "AdamW step": 1e-2}  # of hidden states, of the gradient's norm; bf16 rounds otherwise


def main(argv: list[str]) -> None:
  """Measures, records, prints."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  if bad := [size for size in _TRAIN_BATCH.value if not size.isdigit() or int(size) == 0]:
    raise UserError(f"--train_batch={bad[0]!r} must be positive integers, separated by commas")
  if bad := [x for x in _NON_ZEROS.value if not re.fullmatch(r"\d*\.?\d+", x) or float(x) == 0]:
    raise UserError(f"--non_zeros={bad[0]!r} must be positive numbers, separated by commas")
  if _WHAT.value is None or RECORD.value is None:
    raise UserError(
      "--what=dense|sparse|training|loop and --record=FOLDER are needed; for example --what=loop"
      " --record=runs/bench_loop"
    )
  if _WHAT.value in ("sparse", "training") and (reason := device.missing_hopper()) is not None:
    raise UserError(f"--what={_WHAT.value} compares with kernels for sm_90: {reason}; no times were taken")
  asked = {name: flags.FLAGS[name].value for name in ("what", "models", "remat", "forward_batch", "train_batch")}
  asked |= {name: flags.FLAGS[name].value for name in ("non_zeros", "calls", "repeats", "steps")}
  cases, table = {
    "dense": (dense_cases, dense_table),
    "sparse": (sparse_cases, sparse_table),
    "training": (training_cases, sparse_table),
    "loop": (loop_cases, loop_table),
  }[_WHAT.value]
  record_cases(RECORD.value, asked, cases(), table)


def dense_cases():
  """Yields all measurements; a case that does not fit into memory says so instead of a time."""
  for name in _MODELS.value:
    cases = [("forward", _FORWARD_BATCH.value, "none")]
    for remat in _REMAT.value:
      for sequences in map(int, _TRAIN_BATCH.value):
        cases += [("forward + backward", sequences, remat), ("AdamW step", sequences, remat)]
    for what, sequences, remat in cases:
      config = _config(name, sequences, remat)
      case: Json = {"model": name, "what": what, "sequences": sequences, "remat": remat}
      mesh = make_mesh(config)
      with jax.set_mesh(mesh):
        try:
          case |= _time_dense(what, config, mesh)
        except jax.errors.JaxRuntimeError as error:
          case["error"] = first_line(error)
      jax.clear_caches()
      yield case


def _config(name: str, sequences: int, remat: str) -> LmConfig:
  changes = {"model.remat": remat, "training.batch_size": sequences, "training.accumulation_steps": 1}
  base = config_flags.load_config(f"configs/lm/{name}.py", LmConfig)
  config = config_io.overlay(base, changes | {"sparsity.l1_coefficient": 0.0, "parallel.data": 1})
  config.model.validate()
  return config


def _time_dense(what: str, config: LmConfig, mesh: Mesh) -> Json:
  batch = _random_batch(config, mesh)
  micro = jax.tree.map(lambda x: x[0], batch)
  state = make_init(config)()
  if what == "AdamW step":
    compiled = make_train_step(config).lower(state, batch).compile()
    timing = _time(lambda state: compiled(state, batch)[0], state)
  else:
    model = state.model
    del state  # the optimiser's two copies of the weights

    def gradient(model, micro):
      return jax.grad(objective, has_aux=True)(model, micro, totals(micro), jnp.float32(0), config)[0]

    forward = lambda model, micro: model(micro["inputs_BL"])[0]
    jitted = jax.jit(forward if what == "forward" else gradient, compiler_options=COMPILER_OPTIONS)
    compiled = jitted.lower(model, micro).compile()
    timing = _time(lambda _: compiled(model, micro), None)
  return _with_rates(timing, what, config, compiled)


def _with_rates(timing: Json, what: str, config: LmConfig, compiled) -> Json:
  tokens = config.training.batch_size * config.model.context_length
  flops = mfu.forward_flops_per_token(config.model, with_head=what != "forward") * (1 if what == "forward" else 3)
  peak = mfu.peak_flops(jax.devices()[:1])
  return timing | {
    "tokens_per_ms": tokens / timing["seconds"] / 1000,
    "mfu": flops * tokens / timing["seconds"] / peak if peak else None,
    "millijoules_per_token": 1000 * timing["joules"] / tokens if "joules" in timing else None,
    "peak_bytes": _peak_bytes(compiled),
  }


def _random_batch(config: LmConfig, mesh: Mesh) -> dict[str, jax.Array]:
  """[1, B, L], uniform over the vocabulary; no padding."""
  shape = (1, config.training.batch_size, config.model.context_length)
  tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).astype(np.int32)
  batch = {
    "inputs_BL": tokens,
    "targets_BL": np.roll(tokens, -1, axis=-1),
    "segments_BL": np.ones_like(tokens),
    "weights_BL": np.ones(shape, np.float32),
  }
  return _place(batch, mesh)


def _place(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
  """Arrays [1, B, L] as the training step takes them."""
  sharding = NamedSharding(mesh, P(None, *RULES.activations(2)))
  return {name: jax.device_put(x, sharding) for name, x in batch.items()}


def _time(call: Callable[[Any], Any], state: Any) -> Json:
  """Seconds and joules of `state = call(state)`: queues of calls, each waited for once, after one that is not counted.

  A training step consumes its state, so calls are chained; `bench.device_time` repeats one call on the same arguments.
  """
  joules = energy_counter()
  seconds, energies = [], []
  for n in range(_REPEATS.value + 1):
    used, start = joules() if joules else 0.0, time.perf_counter()
    for _ in range(_CALLS.value):
      state = call(state)
    jax.block_until_ready(state)
    if n > 0:
      seconds.append((time.perf_counter() - start) / _CALLS.value)
      energies.append(((joules() if joules else 0.0) - used) / _CALLS.value)
  timing = {"seconds": statistics.median(seconds), "seconds_min": min(seconds), "seconds_max": max(seconds)}
  return timing | ({"joules": statistics.median(energies)} if joules else {})


def _peak_bytes(compiled) -> int:
  """What a call needs: arguments, results that share no memory with them, temporaries."""
  m = compiled.memory_analysis()
  return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def dense_table(cases: list[Json]) -> str:
  """Markdown of a record."""
  header = ["model", "what", "sequences", "remat", "tokens/ms", "MFU", "peak GiB", "mJ/token", "ms (min to max)"]
  rows = []
  for c in cases:
    row = [c["model"], c["what"], str(c["sequences"]), c["remat"]]
    if "error" in c:
      rows.append([*row, c["error"], "", "", "", ""])
      continue
    row += [
      f"{c['tokens_per_ms']:.1f}",
      "-" if c["mfu"] is None else f"{c['mfu']:.1%}",
      f"{c['peak_bytes'] / 2**30:.1f}",
    ]
    row.append("-" if c["millijoules_per_token"] is None else f"{c['millijoules_per_token']:.2f}")
    rows.append([*row, f"{1e3 * c['seconds']:.1f} ({1e3 * c['seconds_min']:.1f} to {1e3 * c['seconds_max']:.1f})"])
  return bench.markdown_table(header, rows)


def sparse_cases():
  """Yields the forward pass of models, with dense blocks and with twell's, on the same weights and tokens."""
  for name in _MODELS.value:
    config = _config(name, _FORWARD_BATCH.value, "none")
    for non_zeros in map(float, _NON_ZEROS.value):
      require_neurons(name, config.model, non_zeros)
      case = {"model": name, "what": "forward", "sequences": _FORWARD_BATCH.value, "non_zeros": non_zeros}
      mesh = make_mesh(config)
      with jax.set_mesh(mesh):
        tokens_BL = _random_batch(config, mesh)["inputs_BL"][0]
        model = _sparsified_model(config, tokens_BL, non_zeros)
        for result in _dense_and_twell(config, model, tokens_BL):
          yield case | result
      jax.clear_caches()


def training_cases():
  """Yields the AdamW step of models, with dense blocks and with twell's, from the same weights on the same tokens."""
  names = [(name, remat, size) for name in _MODELS.value for remat in _REMAT.value for size in _TRAIN_BATCH.value]
  for name, remat, sequences in names:
    # Steps that change nothing, so that the number of non-zeros stays.
    changes = {"training.learning_rate": 1e-12, "sparsity.l1_coefficient": 1e-6}
    config = config_io.overlay(_config(name, int(sequences), remat), changes)
    for non_zeros in map(float, _NON_ZEROS.value):
      require_neurons(name, config.model, non_zeros)
      case = {"model": name, "what": "AdamW step", "sequences": int(sequences), "remat": remat, "non_zeros": non_zeros}
      mesh = make_mesh(config)
      with jax.set_mesh(mesh):
        for result in _dense_and_twell_steps(config, mesh, non_zeros):
          yield case | result
      jax.clear_caches()


def _dense_and_twell_steps(config: LmConfig, mesh: Mesh, non_zeros: float) -> Iterator[Json]:
  batch, grad_norms = _random_batch(config, mesh), {}
  for ffn in FFN_IMPLEMENTATIONS:
    try:
      model = _sparsified_model(config, batch["inputs_BL"][0], non_zeros)
      state = dataclasses.replace(make_init(config)(), model=model)
      ffn_config = config_io.overlay(config, {"model.ffn_implementation": ffn})
      compiled = make_train_step(ffn_config).lower(state, batch).compile()
      state, metrics = compiled(state, batch)
      timing = _time(lambda state, step=compiled: step(state, batch)[0], state)
    except jax.errors.JaxRuntimeError as error:
      yield {"ffn": ffn, "error": first_line(error)}
      continue
    finally:
      state = model = None  # before the next one's
    grad_norms[ffn] = float(metrics["grad_norm"])
    difference = abs(grad_norms[ffn] / grad_norms["dense"] - 1) if ffn != "dense" and "dense" in grad_norms else None
    _require_equal("AdamW step", difference)
    rates = _with_rates(timing, "AdamW step", config, compiled)
    if ffn == "twell":
      rates["mfu"] = None  # it is there to do fewer operations
    rates["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    yield {"ffn": ffn, "l0": float(jnp.mean(metrics["l0_per_layer"])), "relative_error": difference} | rates


def _sparsified_model(config: LmConfig, tokens_BL: jax.Array, non_zeros: float) -> Transformer:
  sparsify = jax.jit(lambda model, tokens_BL: sparsified(model, config.model, tokens_BL, non_zeros), donate_argnums=0)
  return sparsify(make_init(config)().model, tokens_BL[:_CALIBRATION])


def _dense_and_twell(config: LmConfig, model: Transformer, tokens_BL: jax.Array) -> Iterator[Json]:
  states = {}
  for ffn in FFN_IMPLEMENTATIONS:
    try:
      times, x_BLD = _time_sparse(config, model.with_ffn(ffn), tokens_BL)
    except jax.errors.JaxRuntimeError as error:
      yield {"ffn": ffn, "error": first_line(error)}
      continue
    states[ffn] = x_BLD
    difference = float(_distance(x_BLD, states["dense"])) if ffn != "dense" and "dense" in states else None
    _require_equal("forward", difference)
    yield {"ffn": ffn} | times | {"relative_error": difference}


def _require_equal(what: str, difference: float | None) -> None:
  """Raises AssertionError for blocks that compute something else; they get no time."""
  if difference is not None and not difference <= _ERROR_LIMIT[what]:  # also when it is NaN
    raise AssertionError(f"{what}: twell is off dense by {difference:.1e}, {_ERROR_LIMIT[what]:.0e} allowed")


def _time_sparse(config: LmConfig, model: Transformer, tokens_BL: jax.Array) -> tuple[Json, jax.Array]:
  """Times, non-zeros a token (mean over layers), and the hidden states."""
  jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
  # Statistics apart: dense blocks would have to compute them.
  compiled = jit(lambda model, tokens_BL: model(tokens_BL)[0]).lower(model, tokens_BL).compile()
  timing = _time(lambda _: compiled(model, tokens_BL), None)
  x_BLD, stats = jit(lambda model, tokens_BL: model(tokens_BL))(model, tokens_BL)
  case = _with_rates(timing, "forward", config, compiled) | {"l0": float(jnp.mean(stats.l0)) / tokens_BL.size}
  if model.blocks.feedforward.implementation == "twell":
    case["mfu"] = None  # it is there to do fewer operations
  return case, x_BLD


@jax.jit
def _distance(x_BLD: jax.Array, wanted_BLD: jax.Array) -> jax.Array:
  x_BLD, wanted_BLD = x_BLD.astype(jnp.float32), wanted_BLD.astype(jnp.float32)
  return jnp.linalg.norm(x_BLD - wanted_BLD) / jnp.linalg.norm(wanted_BLD)


def loop_cases():
  """Yields runs of the loop and of the bare step, in turns so that a busy machine slows both, then start-ups."""
  config = config_flags.load_config("configs/lm/tiny.py", LmConfig)
  # Logging, data and dispatch are the loop's; validation and saving are work that a user asks for.
  changes = {"training.steps": _STEPS.value, "training.eval_every": _STEPS.value, "training.eval_batches": 1}
  config = config_io.overlay(config, changes | {"checkpoint.every": _STEPS.value, "parallel.data": 1})
  mesh = make_mesh(config)
  training = config.training
  dataset = data.open_dataset(config, report=lambda line: None)
  with jax.set_mesh(mesh):
    loaded = dataset.training_batches()  # as the loop gets them
    batches = [_place({name: x[None] for name, x in next(loaded).items()}, mesh) for _ in range(training.steps)]
    loaded.close()
    compiled = make_train_step(config).lower(make_init(config)(), batches[0]).compile()
  for _ in range(_REPEATS.value):
    with tempfile.TemporaryDirectory() as folder:
      train(config, Path(folder), progress=Progress(training.steps, io.StringIO()))
      entries = recorder.read_metrics(Path(folder) / "metrics.jsonl")
    every = training.log_every
    with jax.set_mesh(mesh):
      state = make_init(config)()
      bare = []
      for first in range(0, training.steps, every):
        start = time.perf_counter()
        for batch in batches[first : first + every]:
          state, _ = compiled(state, batch)
        jax.block_until_ready(state)
        bare.append((time.perf_counter() - start) / every)
    # One value for each interval of the log; the first warms up.
    yield {"what": "step", "loop_seconds": [e["seconds_per_step"] for e in entries[1:]], "bare_seconds": bare[1:]}
  for cache in ("built", "found"):
    yield {"what": "first step", "cache": cache, "seconds": _time_to_first_step(fresh=cache == "built")}


def _time_to_first_step(*, fresh: bool) -> float:
  """From the start of the process to the first line of metrics, with the token cache to be built or already there."""
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "experiments.train_lm", "--config=configs/lm/tiny.py", f"--workdir={folder}/run"]
    command += ["--config.training.log_every=1", "--config.training.steps=31"]
    if fresh:
      command.append(f"--config.data.cache_dir={folder}/cache")
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not recorder.read_metrics(Path(folder) / "run" / "metrics.jsonl"):
      time.sleep(0.01)
    seconds = time.perf_counter() - start
    process.kill()
    process.wait()
  return seconds


def loop_table(cases: list[Json]) -> str:
  """Markdown of a record."""
  seconds = lambda name: np.concatenate([c[name] for c in cases if c["what"] == "step"])
  bare, loop = seconds("bare_seconds"), seconds("loop_seconds")
  rows = []
  # Neighbours on a shared machine only ever slow an interval, so its quiet moments compare best.
  for name, q in (("fastest tenth", 0.1), ("median", 0.5)):
    a, b = np.quantile(bare, q), np.quantile(loop, q)
    rows.append([f"{name} of {len(bare)} intervals", f"{1e3 * a:.1f} ms", f"{1e3 * b:.1f} ms", f"{b / a - 1:+.1%}"])
  for c in cases:
    if c["what"] == "first step":
      rows.append(
        [f"start of the process to the first step, token cache {c['cache']}", "-", f"{c['seconds']:.1f} s", "-"]
      )
  return bench.markdown_table(["demo config", "bare jitted step", "step in the training loop", "loop over bare"], rows)


if __name__ == "__main__":
  config_flags.run(main)
