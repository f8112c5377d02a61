"""Modules of the GEM-style model, each timed alone: of `bench_recsys`.

Dimension key: B samples, N interaction tokens, C pooled tokens, D width, T packed events.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.recsys_problem import TableSizes, facts, problem
from pallas_kernels import bench
from sparse_lm.models.features import Inputs, front_end, zero_sinks
from sparse_lm.models.gem import GemRecommender
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.recsys_config import RecsysConfig
from sparse_lm.training.recommender_state import make_init

Json = dict[str, Any]
_SAMPLES = 7  # of a time


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
  (first, block), contexts = model.blocks[:2], model.contexts(inputs.streams)
  first_BND = model.tokens(inputs)
  s_TD, interest_BE = meeting(stream, inputs.item_BD)
  x_BND, (s_TD,), (h_BCD,) = first(first_BND, [s_TD], [None], contexts)
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


PARTS = ("meeting", "feedforward", "attention", "pooling", "interaction", "head")


def time_modules(config: RecsysConfig, sizes: TableSizes, chosen: list[str]) -> Iterator[Json]:
  """Yields what was found of each module."""
  lengths_B, batch = problem(config, sizes, config.training.batch_size)
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
    yield {"what": "module", "name": name, "number": part.number, "flops": part.flops, "ms": times} | facts(lengths_B)
    jax.clear_caches()


def _prepared(model: GemRecommender, inputs: Inputs, lengths: list[int]) -> tuple[dict[str, tuple], dict[str, Part]]:
  """What each part is called with, by one program instead of one for each operation; and the parts without it."""
  static: dict[str, Part] = {}

  def prepare(model, inputs):
    found = parts(model, inputs, lengths)
    static.update({name: part._replace(module=None, inputs=(), constants=()) for name, part in found.items()})
    return {name: (part.module, part.inputs, part.constants) for name, part in found.items()}

  return jax.jit(prepare)(model, inputs), static


def table(found: list[Json]) -> str:
  """Returns Markdown of a record's cases."""
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
