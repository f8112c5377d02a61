"""Speed of TwELL feed-forward blocks: `python -m experiments.bench_ffn --what=inference --record=runs/ffn` on a GPU.

Each case draws inputs of a known density (`pallas_kernels/twell/shapes.py`), compares the sparse and the automatic
route with XLA's dense block on them, and only then takes times: of all three, of packing and of the gate product alone.
Only y is asked for there, so that the dense block is spared the sums that nothing but Stats needs.

Beside the times stands a floor of the sparse route: the gate product at the matmul rate of this run, then for each
token what is less, the rows of its non-zeros at the rate of L2 or the other products at the matmul rate; and no sooner
than memory delivers every weight that is used once, which is what counts in decoding.

Dimension key: M tokens, D model width, F hidden neurons, L layers, C chunks of tokens, R tokens of a chunk.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from pallas_kernels import bench, device, twell
from pallas_kernels.twell import reference, shapes
from pallas_kernels.twell.shapes import Activity, FfnShape, Weights
from sparse_lm.benchmark import RECORD, record_cases
from sparse_lm.errors import UserError
from sparse_lm.flags import run

_WHAT = flags.DEFINE_list("what", None, "what to measure: inference")
_CASES = flags.DEFINE_list("cases", [], "names of cases, or what names start with: density,pattern/trained; none: all")
_REPEATS = flags.DEFINE_integer("repeats", 9, "samples of a time, of which the median counts", lower_bound=1)

Json = dict[str, Any]
_ERROR_LIMIT = 1e-2  # of the whole result; rounding h to bfloat16 once or twice makes 3e-3
_COUNT_LIMIT = 1e-3  # of l0: sums in another order may move a value that is 0 but for rounding
_ROWS_OF_A_CHUNK = 8192  # of the comparison: bounds its temporaries
_DECODE_LAYERS = 8  # of weights, ten times what L2 holds, so that each is read from memory
# Measured on an H200, 8.3 to 9.0: three different gather kernels end there, which is taken for the rate of L2.
_L2_BYTES_PER_S = 8.8e12
_ROUTES = ("sparse", "auto")
_TIMED = ("dense", *_ROUTES, "pack", "gate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One row of the table."""

  shape: FfnShape
  activity: Activity
  sort: bool = False  # drop neurons that never fire, and bring those that fire most to the front
  layers: int = 1  # blocks in a row; times are those of one


def main(argv: list[str]) -> None:
  """Runs on a Hopper GPU; on anything else a time would mean nothing, so there is none."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  if not _WHAT.value or not RECORD.value:
    raise UserError("--what=inference and --record=FOLDER are needed; name a new folder, such as --record=runs/ffn")
  if bad := [what for what in _WHAT.value if what not in _CASES_OF]:
    raise UserError(f"--what={bad[0]!r} is none of {', '.join(_CASES_OF)}")
  cases = choose({name: case for what in _WHAT.value for name, case in _CASES_OF[what]().items()}, _CASES.value)
  if (reason := device.missing_hopper()) is not None:
    raise UserError(f"bench_ffn measures kernels for sm_90: {reason}; no times were taken")
  asked = {"what": _WHAT.value, "repeats": _REPEATS.value, "cases": list(cases)}
  record_cases(RECORD.value, asked, measure(cases, samples=_REPEATS.value), table)


def inference_cases() -> dict[str, Case]:
  """Returns the cases by name."""
  paper = shapes.BENCHMARK["paper"]
  uniform = lambda shape, percent: Case(shape=shape, activity=Activity(density=percent / 100))
  with_pattern = lambda **pattern: Case(shape=paper, activity=Activity(density=0.005, **pattern))
  cases = {}
  for shape in (paper, shapes.BENCHMARK["paper_short"]):
    for percent in (0, 0.1, 0.5, 1, 2, 3, 5, 10, 50, 100):
      cases[f"density/M={shape.M} {percent}%"] = uniform(shape, percent)
  cases["pattern/misleading"] = with_pattern(pattern="misleading")
  to_sort = {"pattern/trained": with_pattern(pattern="trained")}
  to_sort |= {f"zipf/s={s}": with_pattern(pattern="zipf", exponent=s) for s in (1.0, 0.7)}
  for name, case in to_sort.items():
    cases |= {name: case, f"{name} sorted": dataclasses.replace(case, sort=True)}
  for size, percent in (("nongated", 0.5), ("wide", 0.5), ("wide", 1), ("narrow", 0.5), ("narrow", 1)):
    cases[f"shape/{size} {percent}%"] = uniform(shapes.BENCHMARK[size], percent)
  for size in ("decode_1", "decode_8", "decode_64"):
    shape = shapes.BENCHMARK[size]
    for percent in (0.5, 5, 50):
      cases[f"decode/M={shape.M} {percent}%"] = dataclasses.replace(uniform(shape, percent), layers=_DECODE_LAYERS)
  return cases


_CASES_OF = {"inference": inference_cases}


def choose(cases: dict[str, Case], wanted: list[str]) -> dict[str, Case]:
  """Returns the cases that have one of these names or, for what is no name, whose names start so; all for no names.

  Raises:
    UserError: nothing starts so.
  """
  chosen: set[str] = set()
  for start in wanted:
    found = [start] if start in cases else [name for name in cases if name.startswith(start)]
    if not found:
      raise UserError(f"--cases={start!r} starts no case's name; the cases are {', '.join(cases)}")
    chosen.update(found)
  return {name: case for name, case in cases.items() if not wanted or name in chosen}


def measure(cases: dict[str, Case], *, samples: int) -> Iterator[Json]:
  """Yields what was found of each case.

  Raises:
    AssertionError: a route is wrong; it gets no time.
  """
  limits = bench.ceilings() | {"l2_bytes_per_s": _L2_BYTES_PER_S}
  for name, case in cases.items():
    # The same inputs, whatever else is measured.
    problem = prepare(case, jax.random.key(zlib.crc32(name.encode())))
    seen = [_check_layer(name, problem, n, x_MD) for n, x_MD in enumerate(_layer_inputs(problem))]
    times = {what: _time(problem, what, samples) for what in _TIMED}
    floor_ms = float(np.mean([_floor_ms(problem, layer.used, limits) for layer in seen]))
    yield _described(name, case, problem) | _summed_up(seen) | {"ms": times, "floor_ms": floor_ms, **limits}


# Inputs.


class Problem(NamedTuple):
  """Inputs of a case, and the weights as they are served."""

  x_MD: jax.Array
  drawn: list[Weights]  # one a layer
  served: list[Weights]  # drawn, or pruned and sorted
  hot: int  # the first neurons of served, computed densely
  cold_F: jax.Array  # bool[F], neurons of drawn that are not hot


def prepare(case: Case, key: jax.Array) -> Problem:
  """Draws the inputs of a case."""
  sampled_S = None
  if case.activity.pattern == "misleading":
    from pallas_kernels.twell import routing

    sampled_S = np.asarray(routing.sample_rows(case.shape.M))
  inputs = [shapes.draw(k, case.shape, case.activity, sampled_S=sampled_S) for k in jax.random.split(key, case.layers)]
  x_MD, drawn = inputs[0].x_MD, [weights for _, weights in inputs]
  if case.sort:
    return _sorted(x_MD, drawn[0])
  return Problem(x_MD, drawn, drawn, 0, jnp.ones(case.shape.F, bool))


def _sorted(x_MD: jax.Array, drawn: Weights) -> Problem:
  """Counts on the very tokens that are timed: nothing that fires is dropped, and y has to be the same."""
  all_F = jnp.ones(drawn.firing_FD.shape[0], bool)
  counts_F = _count(x_MD, drawn.firing_FD, all_F).tokens_F
  kept = twell.prune_dead(*drawn, counts_F)
  weights = kept.w_gate_FD, kept.w_up_FD, kept.w_down_FD
  by_rate = twell.sort_neurons(*weights, kept.take(counts_F), x_MD.shape[0])
  served = Weights(by_rate.w_gate_FD, by_rate.w_up_FD, by_rate.w_down_FD)
  hot = kept.order[by_rate.order[: by_rate.hot]]
  return Problem(x_MD, [drawn], [served], by_rate.hot, all_F.at[hot[hot >= 0]].set(False))  # -1 is padding


def _layer_inputs(problem: Problem) -> Iterator[jax.Array]:
  """Yields x of each layer, after the dense block where one precedes."""
  x_MD = problem.x_MD
  for weights in problem.drawn[:-1]:
    yield x_MD
    x_MD = _next_input(jax.jit(_block("dense", 0))(x_MD, weights)[0], problem.x_MD)
  yield x_MD


@jax.jit
def _next_input(y_MD: jax.Array, x_MD: jax.Array) -> jax.Array:
  """y of unit size, with the constant feature of x: the next gate keeps its density."""
  y_MD = y_MD.astype(jnp.float32)
  scale_M1 = jax.lax.rsqrt(jnp.mean(y_MD**2, axis=1, keepdims=True) + 1e-12)
  return (y_MD * scale_M1).astype(x_MD.dtype).at[:, 0].set(x_MD[:, 0])


# What is run. A function is made once for all cases that share it, and so compiled once a shape.


@functools.cache
def _block(route: str, hot: int) -> Callable:
  """(x, weights) -> (y, Stats)."""

  def call(x_MD: jax.Array, weights: Weights):
    if weights.w_gate_FD is None:
      return twell.feedforward(x_MD, weights.w_up_FD, weights.w_down_FD, route=route, hot=hot)
    return twell.gated_feedforward(x_MD, *weights, route=route, hot=hot)

  return call


@functools.cache
def _timed(what: str, hot: int) -> Callable:
  """(x, weights of all layers) -> something of all layers."""

  def chain(x_MD: jax.Array, layers: list[Weights]) -> jax.Array:
    y_MD, _ = _block(what, hot)(x_MD, layers[0])
    for weights in layers[1:]:
      y_MD, _ = _block(what, hot)(_next_input(y_MD, x_MD), weights)
    return y_MD

  pack = lambda x_MD, layers: [twell.pack(x_MD, weights.firing_FD[hot:]) for weights in layers]
  gate = lambda x_MD, layers: [jnp.einsum("MD,FD->MF", x_MD, weights.firing_FD) for weights in layers]
  return {"pack": pack, "gate": gate}.get(what, chain)


def _time(problem: Problem, what: str, samples: int) -> bench.Timing:
  """Of one layer."""
  hot = problem.hot if what in (*_ROUTES, "pack") else 0
  timing = bench.device_time(_timed(what, hot), problem.x_MD, problem.served, samples=samples)
  return {name: ms / len(problem.served) for name, ms in timing.items()}


# Whether it is right.


class Counts(NamedTuple):
  """Of the dense gate."""

  nonzeros_M: jax.Array
  cold_M: jax.Array  # non-zeros of cold neurons alone
  tokens_F: jax.Array  # for which a neuron fires


class LayerSeen(NamedTuple):
  """What one layer of a case is found to do."""

  used: Counts
  stats: dict[str, twell.Stats]  # by route
  error: dict[str, float]


def _check_layer(name: str, problem: Problem, n: int, x_MD: jax.Array) -> LayerSeen:
  """Compares the n-th layer on an input of its own.

  Not the end of the chain: rounding moves what is near a threshold, and each further layer makes that larger.
  """
  drawn, served, stats, error = problem.drawn[n], problem.served[n], {}, {}
  used = jax.tree.map(np.asarray, _count(x_MD, drawn.firing_FD, problem.cold_F))
  for route in _ROUTES:
    y_MD, stats[route] = jax.jit(_block(route, problem.hot))(x_MD, served)
    error[route] = relative_error(x_MD, drawn, y_MD)
    if not error[route] <= _ERROR_LIMIT:  # also when it is NaN
      raise AssertionError(
        f"{name}, {route}: relative error {error[route]:.2e} against the dense block, {_ERROR_LIMIT:.0e} allowed"
      )
    l0, counted = float(stats[route].l0), float(used.nonzeros_M.mean())
    if not abs(l0 - counted) <= _COUNT_LIMIT * counted:
      raise AssertionError(f"{name}, {route}: l0={l0:.3f}, but the dense gate has {counted:.3f} non-zeros a token")
  return LayerSeen(used, jax.tree.map(np.asarray, stats), error)


def relative_error(x_MD: jax.Array, weights: Weights, y_MD: jax.Array) -> float:
  """||y - dense|| / ||dense|| in float32; 0 where both are 0."""
  squares = np.sum(np.asarray(_squares(x_MD, weights, y_MD), np.float64), axis=1)
  difference, expected = np.sqrt(squares)
  return float(difference / np.maximum(expected, np.finfo(np.float32).tiny))


@jax.jit
def _squares(x_MD: jax.Array, weights: Weights, y_MD: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Sums of squares of each chunk: of y - dense, and of dense."""

  def chunk(parts):
    x_RD, y_RD = parts
    dense_RD, _ = reference.feedforward(x_RD, *weights, spec=None, hot=0, with_active=False)
    dense_RD = dense_RD.astype(jnp.float32)
    return jnp.sum((y_RD.astype(jnp.float32) - dense_RD) ** 2), jnp.sum(dense_RD**2)

  return jax.lax.map(chunk, (_in_chunks(x_MD), _in_chunks(y_MD)))


@jax.jit
def _count(x_MD: jax.Array, w_FD: jax.Array, cold_F: jax.Array) -> Counts:
  def chunk(x_RD):
    fires_RF = reference.gate(x_RD, w_FD) != 0
    return Counts(jnp.sum(fires_RF, axis=1), jnp.sum(fires_RF & cold_F[None], axis=1), jnp.sum(fires_RF, axis=0))

  of_chunks = jax.lax.map(chunk, _in_chunks(x_MD))
  return Counts(of_chunks.nonzeros_M.ravel(), of_chunks.cold_M.ravel(), jnp.sum(of_chunks.tokens_F, axis=0))


def _in_chunks(a_MD: jax.Array) -> jax.Array:
  """[C, R, D]; one chunk of what does not divide, as few tokens do not."""
  rows = a_MD.shape[0] if a_MD.shape[0] % _ROWS_OF_A_CHUNK else _ROWS_OF_A_CHUNK
  return a_MD.reshape(-1, rows, a_MD.shape[1])


# What is said about it.


def _floor_ms(problem: Problem, used: Counts, limits: dict[str, float]) -> float:
  """No sparse route that gathers rows from L2 can be faster."""
  (num_tokens, width), itemsize = problem.x_MD.shape, problem.x_MD.dtype.itemsize
  weights, hot = problem.served[0], problem.hot
  num_neurons = weights.firing_FD.shape[0]
  others = 1 if weights.w_gate_FD is None else 2  # projections beside the one that decides what fires
  row_bytes, row_flops = others * width * itemsize, others * 2 * width  # of a neuron, for one token
  flop_per_s, copy_bytes_per_s = limits["matmul_flop_per_s"], limits["copy_bytes_per_s"]
  gate_s = max(2 * num_tokens * width * num_neurons / flop_per_s, num_neurons * width * itemsize / copy_bytes_per_s)
  hot_s = num_tokens * hot * row_flops / flop_per_s
  dense_s = (num_neurons - hot) * row_flops / flop_per_s  # a token
  tokens_s = np.minimum(used.cold_M * (row_bytes / limits["l2_bytes_per_s"]), dense_s).sum()
  distinct = np.count_nonzero(used.tokens_F * np.asarray(problem.cold_F))
  return 1e3 * (gate_s + hot_s + max(tokens_s, distinct * row_bytes / copy_bytes_per_s))


def _described(name: str, case: Case, problem: Problem) -> Json:
  shape = dataclasses.asdict(case.shape) | {"dtype": jnp.dtype(case.shape.dtype).name}
  served = {"neurons": problem.served[0].firing_FD.shape[0], "hot": problem.hot, "layers": case.layers}
  return {"name": name, "shape": shape, "activity": dataclasses.asdict(case.activity), **served}


def _summed_up(seen: list[LayerSeen]) -> Json:
  """Means over the layers, maxima of maxima and of errors."""
  nonzeros_LM = np.stack([layer.used.nonzeros_M for layer in seen])
  taken = {"dense" if layer.stats["auto"].route == twell.DENSE else "sparse" for layer in seen}
  return {
    "nonzeros_mean": float(nonzeros_LM.mean()),
    "nonzeros_max": int(nonzeros_LM.max()),
    "overflow_rows": float(np.mean([layer.stats["sparse"].overflow_rows for layer in seen])),
    "auto_took": " and ".join(sorted(taken)),
    "relative_error": {route: max(layer.error[route] for layer in seen) for route in _ROUTES},
  }


def table(cases: list[Json]) -> str:
  """Returns the Markdown table of a record's cases."""
  header = ["case", "M, D x F", "density asked", "non-zeros, mean (max)", "overflow rows", "auto took"]
  header += [f"{what} ms (p10 - p90)" for what in _TIMED]
  header += ["sparse over dense", "auto over dense", "error", "floor of sparse"]
  rows = []
  for c in cases:
    shape, ms = c["shape"], {what: c["ms"][what]["ms"] for what in _TIMED}
    rows.append(
      [
        c["name"],
        f"{shape['M']}, {shape['D']} x {c['neurons']}" + (f" ({c['hot']} hot)" if c["hot"] else ""),
        f"{100 * c['activity']['density']:g} %",
        f"{c['nonzeros_mean']:.1f} ({c['nonzeros_max']})",
        f"{c['overflow_rows']:g}",
        c["auto_took"],
        *(_milliseconds(c["ms"][what]) for what in _TIMED),
        *(f"{ms['dense'] / ms[route]:.2f}x" for route in _ROUTES),
        f"{max(c['relative_error'].values()):.1e}",
        f"{c['floor_ms']:.3g} ms ({100 * c['floor_ms'] / ms['sparse']:.0f} %)",
      ]
    )
  tera = {name: 1e-12 * cases[0][name] for name in ("matmul_flop_per_s", "copy_bytes_per_s", "l2_bytes_per_s")}
  notes = (
    f"Ceilings in this run: bf16 matmul {tera['matmul_flop_per_s']:.0f} TFLOP/s, copy"
    f" {tera['copy_bytes_per_s']:.2f} TB/s (read + write); L2 is taken to give {tera['l2_bytes_per_s']:.1f} TB/s."
    " Times are of one block. The weights of a sorted case are pruned for its dense block too.\n"
  )
  return f"{bench.markdown_table(header, rows)}\n{notes}"


def _milliseconds(timing: bench.Timing) -> str:
  digits = 4 if timing["ms"] < 0.1 else 3 if timing["ms"] < 10 else 2
  return f"{timing['ms']:.{digits}f} ({timing['ms_p10']:.{digits}f} - {timing['ms_p90']:.{digits}f})"


if __name__ == "__main__":
  run(main)
