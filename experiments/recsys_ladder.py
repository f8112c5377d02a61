"""The training step of the GEM-style model, made faster one step at a time: of `bench_recsys`.

Dimension key: B samples, N tiles.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments import padded_attention
from experiments.recsys_problem import TableSizes, facts, problem
from pallas_kernels import bench
from pallas_kernels.jagged import schedule
from sparse_lm import config_io
from sparse_lm.data.samples import Batch
from sparse_lm.errors import first_line
from sparse_lm.recsys_config import RecsysConfig
from sparse_lm.training.recommender import make_train_step
from sparse_lm.training.recommender_state import RecsysState, make_init

Json = dict[str, Any]
_PADDED_BATCH = 96  # samples whose padded scores fit into memory
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

  with mock.patch.object(schedule, "make", make_in_order):
    yield


def time_ladder(
  config: RecsysConfig, sizes: TableSizes, chosen: list[str], *, calls: int, repeats: int
) -> Iterator[Json]:
  """Yields what was found of each rung; one that does not fit into memory says so instead of a time."""
  traced = {name: _trace(config, sizes, rungs()[name]) for name in chosen}
  with futures.ThreadPoolExecutor() as pool:  # compiling takes a minute each, on few cores; no step runs meanwhile
    compiling = {name: pool.submit(of.lowered.compile) for name, of in traced.items()}
  for name, of in traced.items():
    case = {"what": "ladder", "name": name, "changes": rungs()[name].changes, "flops": of.flops} | facts(of.lengths_B)
    try:
      state = make_init(of.config, sizes)()
      case |= _time_steps(compiling[name].result(), state, of.batch, calls, repeats)
    except jax.errors.JaxRuntimeError as error:
      case["error"] = first_line(error)
    yield case


class _Traced(NamedTuple):
  """The training step of a rung, before it is compiled."""

  config: RecsysConfig
  lengths_B: np.ndarray
  batch: Batch
  flops: int
  lowered: jax.stages.Lowered


def _trace(config: RecsysConfig, sizes: TableSizes, rung: Rung) -> _Traced:
  own = config_io.overlay(config, rung.changes)
  own.validate()
  lengths_B, batch = problem(own, sizes, rung.batch_size or own.training.batch_size)
  state = jax.eval_shape(make_init(own, sizes))
  with rung.stand_in(own):
    lowered = make_train_step(own).lower(state, batch)
  return _Traced(own, lengths_B, batch, state.model.flops([lengths_B.tolist()]), lowered)


def _time_steps(compiled: jax.stages.Compiled, state: RecsysState, batch: Batch, calls: int, repeats: int) -> Json:
  seconds = []
  for n in range(repeats + 1):
    start = time.perf_counter()
    for _ in range(calls):
      state, metrics = compiled(state, batch)
    loss = float(metrics["loss"])
    if n > 0:
      seconds.append((time.perf_counter() - start) / calls)
  if not np.isfinite(loss):
    raise AssertionError(f"the loss is {loss} after {calls * (repeats + 1)} steps; no time was taken")
  memory = compiled.memory_analysis()
  return {"seconds": statistics.median(seconds), "loss": loss, "temporary_bytes": memory.temp_size_in_bytes}


def table(found: list[Json]) -> str:
  """Returns Markdown of a record's cases."""
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
