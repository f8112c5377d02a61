"""Speed of the GEM-style model: `python -m experiments.bench_recsys --what=modules` or `ladder`, on a GPU.

modules: each module of a block alone, forward and with gradients, and the share of the peak that it reaches (its local
MFU); the model's is their mean, weighted by operations. ladder: samples a second of the whole training step (lookups,
model, AdamW, update of the tables), from attention on padded rows to everything that makes it faster, one step at a
time. Operations are those that are of use: visible pairs, events that exist, nothing that is computed again; the
backward pass counts twice the forward. Writes a record and prints it as a table.

Dimension key: B samples, N interaction tokens, C pooled tokens, D width, T packed events.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from experiments import padded_attention
from experiments.recsys_problem import TableSizes, draw_batch, draw_lengths
from pallas_kernels import bench, device
from pallas_kernels.jagged import schedule
from sparse_lm import config_io
from sparse_lm.benchmark import RECORD, cases_flag, choose, record_cases
from sparse_lm.data.samples import Batch
from sparse_lm.errors import UserError, first_line
from sparse_lm.flags import load_config, run
from sparse_lm.models.features import Inputs, front_end, zero_sinks
from sparse_lm.models.gem import GemRecommender
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.recsys_config import RecsysConfig
from sparse_lm.training import mfu
from sparse_lm.training.recommender import make_train_step
from sparse_lm.training.recommender_state import make_init

flags.declare_key_flag("record")
_WHAT = flags.DEFINE_enum("what", None, ["modules", "ladder"], "what to measure")
_CASES = cases_flag()
_CALLS = flags.DEFINE_integer("calls", 5, "ladder: steps of a queue, waited for once", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "ladder: queues, of which the median counts", lower_bound=1)

Json = dict[str, Any]
_CONFIG = "configs/recsys/bench.py"
_PADDED_BATCH = 96  # samples whose padded scores fit into memory
_SAMPLES = 7  # of a module's time
_WINDOW, _BLOCK = {"model.stream.window": 128}, {"model.stream.block": 64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
  """A step of the ladder: changes of the config, and what stands in for our code while it is traced."""

  changes: Json
  batch_size: int | None = None  # None: the config's
  stand_in: Callable[[RecsysConfig], contextlib.AbstractContextManager] = lambda config: contextlib.nullcontext()


def rungs() -> dict[str, Rung]:
  """Returns the ladder by name, from its foot up."""
  padded = lambda config: padded_attention.installed(config.data.longest)
  return {
    "padded XLA attention": Rung(changes={"model.recompute": True}, batch_size=_PADDED_BATCH, stand_in=padded),
    "jagged kernels in the order of rows": Rung(changes={}, stand_in=lambda config: unbalanced()),
    "balanced schedule": Rung(changes={}),
    "window of 128": Rung(changes=_WINDOW),
    "blocks of 64": Rung(changes=_BLOCK),
    "CompSkip with a window of 128": Rung(changes=_WINDOW | {"model.comp_skip": True}),
    "CompSkip with blocks of 64": Rung(changes=_BLOCK | {"model.comp_skip": True}),
  }


@contextlib.contextmanager
def unbalanced() -> Iterator[None]:
  """Inside, schedules go through the tiles in the order of their tokens."""
  make = schedule.make

  def in_order(tiles: schedule.TileList | None) -> schedule.TileList | None:
    if tiles is None:
      return None
    exists_N = jnp.arange(len(tiles.tiles_NF)) < tiles.counts[0]
    key_N = jnp.where(exists_N, tiles.tiles_NF[:, schedule.Field.TOKEN], jnp.iinfo(jnp.int32).max)
    return schedule.TileList(tiles.tiles_NF[jnp.argsort(key_N, stable=True)], tiles.counts)

  def make_in_order(*args, **options):
    made = make(*args, **options)
    lists = {name: in_order(getattr(made, name)) for name in ("forward", "query_gradient", "key_gradients", "blocks")}
    return dataclasses.replace(made, **lists)

  schedule.make = make_in_order
  try:
    yield
  finally:
    schedule.make = make


def main(argv: list[str]) -> None:
  """Measures, records, prints."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  if _WHAT.value is None or RECORD.value is None:
    raise UserError(
      "--what=modules|ladder and --record=FOLDER are needed; for example --what=ladder --record=runs/bench_recsys"
    )
  config = load_config(_CONFIG, RecsysConfig)
  measure, names = {"modules": (time_modules, {name: name for name in _PARTS}), "ladder": (time_ladder, rungs())}[
    _WHAT.value
  ]
  chosen = choose(names, _CASES.value)
  if (reason := device.missing_hopper()) is not None:
    raise UserError(f"bench_recsys measures kernels for sm_90: {reason}; no times were taken")
  asked = {"what": _WHAT.value, "cases": list(chosen), "calls": _CALLS.value, "repeats": _REPEATS.value}
  record_cases(RECORD.value, asked, measure(config, TableSizes.of(), list(chosen)), table)


# Modules --------------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
  """A module of the model, what it is called with, and how often the model has it."""

  call: Callable[..., Any]  # (module, inputs, constants)
  module: nnx.Module
  inputs: tuple
  constants: tuple
  flops: int
  number: int

  def with_gradients(self, module, inputs, constants):
    """What it returns, and gradients of its weights and inputs, the result itself being the cotangent."""
    out, pull = jax.vjp(lambda module, inputs: self.call(module, inputs, constants), module, inputs)
    return out, pull(out)


def parts(model: GemRecommender, inputs: Inputs, lengths: list[int]) -> dict[str, Part]:
  """Those of the second block, which has as many tokens as all after it, and what comes before and after blocks."""
  (stream,), (meeting,) = inputs.streams, model.meetings
  x_BND, (s_TD, interest_BE), contexts = (
    model.tokens(inputs),
    meeting(stream, inputs.item_BD),
    model.contexts(inputs.streams),
  )
  first_BND, (first, block) = x_BND, model.blocks[:2]
  x_BND, (s_TD,), (h_BCD,) = first(x_BND, [s_TD], [None], contexts)
  (own,), (context,), layers, samples = block.streams, contexts, len(model.blocks), len(lengths)
  flat_BD = jnp.concatenate([*(x.reshape(samples, -1) for x in (x_BND, first_BND)), interest_BE], axis=1)
  of_events = lambda module, inputs, constants: module(*inputs, *constants[:-1], schedule=constants[-1])
  plain = lambda module, inputs, constants: module(*inputs)
  meet = lambda module, inputs, constants: module(constants[0]._replace(events_TD=inputs[0]), inputs[1])
  bare = stream._replace(events_TD=None)
  both_BND = jnp.concatenate([x_BND, h_BCD], axis=1)
  summary_BMD, offsets = block.summary(x_BND), stream.offsets
  feedforward, attention, pooling = own.feedforward, own.attention, own.pooling
  return {
    "meeting": Part(meet, meeting, (stream.events_TD, inputs.item_BD), (bare,), meeting.flops(lengths), 1),
    "feedforward": Part(
      of_events, feedforward, (s_TD, summary_BMD), (offsets, context.feedforward), feedforward.flops(lengths), layers
    ),
    "attention": Part(
      of_events, attention, (s_TD,), (offsets, context.rotary, context.attention), attention.flops(lengths), layers
    ),
    "pooling": Part(of_events, pooling, (s_TD,), (offsets, context.pooling), pooling.flops(lengths), layers),
    "interaction": Part(plain, block.interact, (both_BND,), (), samples * block.interact.flops(), layers),
    "head": Part(plain, model.head, (flat_BD,), (), samples * model.head.flops(), 1),
  }


_PARTS = ("meeting", "feedforward", "attention", "pooling", "interaction", "head")


def time_modules(config: RecsysConfig, sizes: TableSizes, chosen: list[str]) -> Iterator[Json]:
  """Yields what was found of each module."""
  lengths_B, batch = _batch(config, sizes, config.training.batch_size)
  state, recipe = make_init(config, sizes)(), RECIPES[config.precision.recipe]
  inputs = jax.jit(lambda tables: front_end(tables, zero_sinks(batch, config.model.table_width), batch, recipe))(
    state.tables
  )
  model = state.model
  del state  # the tables
  arguments, static = _prepared(model, inputs, lengths_B.tolist())
  for name in chosen:
    part = static[name]
    functions = {"forward": part.call, "with_gradients": part.with_gradients}
    times = bench.device_times(functions, *arguments[name], samples=_SAMPLES)
    yield {"what": "module", "name": name, "number": part.number, "flops": part.flops, "ms": times} | _facts(lengths_B)
    jax.clear_caches()


def _prepared(model: GemRecommender, inputs: Inputs, lengths: list[int]) -> tuple[dict[str, tuple], dict[str, Part]]:
  """What each part is called with, by one program instead of one for each operation; and the parts without it."""
  static: dict[str, Part] = {}

  def prepare(model, inputs):
    found = parts(model, inputs, lengths)
    static.update({name: part._replace(module=None, inputs=(), constants=()) for name, part in found.items()})
    return {name: (part.module, part.inputs, part.constants) for name, part in found.items()}

  return jax.jit(prepare)(model, inputs), static


# The ladder -----------------------------------------------------------------------------------------------------------


def time_ladder(config: RecsysConfig, sizes: TableSizes, chosen: list[str]) -> Iterator[Json]:
  """Yields what was found of each rung; one that does not fit into memory says so instead of a time."""
  for name in chosen:
    rung = rungs()[name]
    own = config_io.overlay(config, rung.changes)
    own.validate()
    lengths_B, batch = _batch(own, sizes, rung.batch_size or own.training.batch_size)
    case = {"what": "ladder", "name": name, "changes": rung.changes} | _facts(lengths_B)
    try:
      case |= _time_steps(own, sizes, batch, rung.stand_in(own))
    except jax.errors.JaxRuntimeError as error:
      case["error"] = first_line(error)
    model = jax.eval_shape(make_init(own, sizes)).model
    yield case | {"flops": model.flops([lengths_B.tolist()])}
    jax.clear_caches()


def _time_steps(config: RecsysConfig, sizes: TableSizes, batch: Batch, stand_in) -> Json:
  state = make_init(config, sizes)()
  with stand_in:
    compiled = make_train_step(config).lower(state, batch).compile()
  seconds = []
  for n in range(_REPEATS.value + 1):
    start = time.perf_counter()
    for _ in range(_CALLS.value):
      state, metrics = compiled(state, batch)
    loss = float(metrics["loss"])
    if n > 0:
      seconds.append((time.perf_counter() - start) / _CALLS.value)
  if not np.isfinite(loss):
    raise AssertionError(f"the loss is {loss} after {_CALLS.value * (_REPEATS.value + 1)} steps; no time was taken")
  memory = compiled.memory_analysis()
  return {"seconds": statistics.median(seconds), "loss": loss, "temporary_bytes": memory.temp_size_in_bytes}


def _batch(config: RecsysConfig, sizes: TableSizes, batch_size: int) -> tuple[np.ndarray, Batch]:
  lengths_B = draw_lengths(batch_size, config.data.longest, seed=0)
  return lengths_B, draw_batch(sizes, lengths_B, seed=1)


def _facts(lengths_B: np.ndarray) -> Json:
  return {"samples": len(lengths_B), "events": int(lengths_B.sum()), "peak_flops": mfu.peak_flops(jax.devices()[:1])}


# Tables ---------------------------------------------------------------------------------------------------------------


def table(found: list[Json]) -> str:
  """Returns Markdown of a record's cases, which are all of one kind."""
  return {"module": _modules_table, "ladder": _ladder_table}[found[0]["what"]](found)


def _modules_table(found: list[Json]) -> str:
  header = ["module", "in the model", "forward ms", "and backward ms", "TFLOP forward", "forward MFU", "MFU"]
  rows, flops, seconds = [], 0.0, 0.0
  for case in found:
    forward, both = (1e-3 * case["ms"][name]["ms"] for name in ("forward", "with_gradients"))
    share = lambda flop, time, peak=case["peak_flops"]: f"{flop / time / peak:.1%}" if peak else "-"
    rows.append(
      [case["name"], str(case["number"]), f"{1e3 * forward:.2f}", f"{1e3 * both:.2f}", f"{1e-12 * case['flops']:.3f}"]
    )
    rows[-1] += [share(case["flops"], forward), share(3 * case["flops"], both)]
    flops, seconds = flops + 3 * case["number"] * case["flops"], seconds + case["number"] * both
  first = found[0]
  peak = first["peak_flops"]
  local = f" Local MFU of all, weighted by operations: {flops / seconds / peak:.1%}." if peak else ""
  notes = f"{first['samples']} samples, {first['events']} events; each module alone.{local}"
  return f"{bench.markdown_table(header, rows)}\n{notes}\n"


def _ladder_table(found: list[Json]) -> str:
  header = ["step", "samples", "ms", "samples/s", "over the first", "TFLOP forward", "MFU", "temporaries GiB"]
  rates = [case["samples"] / case["seconds"] if "seconds" in case else None for case in found]
  rows = []
  for case, rate in zip(found, rates, strict=True):
    if rate is None:
      rows.append([case["name"], str(case["samples"]), case["error"], *["-"] * 5])
      continue
    peak = case["peak_flops"]
    share = f"{3 * case['flops'] / case['seconds'] / peak:.1%}" if peak else "-"
    times = f"{rate / rates[0]:.2f} x" if rates[0] else "-"
    rows.append([case["name"], str(case["samples"]), f"{1e3 * case['seconds']:.1f}", f"{rate:.0f}", times])
    rows[-1] += [f"{1e-12 * case['flops']:.2f}", share, f"{case['temporary_bytes'] / 2**30:.1f}"]
  return bench.markdown_table(header, rows)


if __name__ == "__main__":
  run(main)
