"""Feed-forward blocks under the clock: whether each route is right, how long it takes, how long it has to.

A route is compared with the dense block before anything is timed. Only y is asked for under the clock, so that the
dense block is spared the sums that nothing but Stats needs.

Blocks of a few tokens are shorter than their dispatch and so many of them make one call, one after another on the same
tokens. Whatever is compared takes turns, a queue of calls each.

Beside the times stands a floor of the sparse route: the gate product at the matmul rate of this run, then for each
token what is less, the rows of its non-zeros at the rate of L2 or the other products at the matmul rate; and no sooner
than memory delivers every weight that is used once, which is what counts in decoding.

Dimension key: M tokens, D model width, F hidden neurons, C chunks of tokens, R tokens of a chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench, twell
from pallas_kernels.twell import reference
from pallas_kernels.twell.shapes import Weights

Json = dict[str, Any]
ROUTES = ("sparse", "auto")
TIMED = ("dense", *ROUTES, "pack", "gate")
DENSE_APART = "dense_apart"  # timed where a call has many blocks
ERROR_LIMIT = 1e-2  # of the whole result; rounding h to bfloat16 once or twice makes 3e-3
_COUNT_LIMIT = 1e-3  # of l0: sums in another order may move a value that is 0 but for rounding,
_COUNT_SLACK = 2  # which of a single token may be a neuron or two, more than that share
_ROWS_OF_A_CHUNK = 8192  # of the comparison: bounds its temporaries
# Measured on an H200, 8.3 to 9.0: three different gather kernels end there, which is taken for the rate of L2.
_L2_BYTES_PER_S = 8.8e12


class Problem(NamedTuple):
  """Inputs of a case."""

  x_MD: jax.Array
  layers: list[Weights]
  hot: int = 0  # the first neurons, computed densely on the sparse routes
  rounds: int = 1  # how often a call runs all layers

  @property
  def blocks(self) -> int:
    """Of a timed call, one after another."""
    return len(self.layers) * self.rounds

  @property
  def cold_F(self) -> jax.Array:
    """Neurons that are not hot."""
    return jnp.arange(self.layers[0].firing_FD.shape[0]) >= self.hot


def limits() -> dict[str, float]:
  """Rates of this device, today."""
  return bench.ceilings() | {"l2_bytes_per_s": _L2_BYTES_PER_S}


def measured(name: str, problem: Problem, rates: dict[str, float], *, samples: int) -> Json:
  """Returns what was found of a case.

  Raises:
    AssertionError: a route is wrong; it gets no time.
  """
  seen = [_check_layer(name, problem, weights) for weights in problem.layers]
  times = _times(problem, samples)
  floor_ms = float(np.mean([floor(problem, of_layer.used, rates) for of_layer in seen]))
  found = described(name, problem) | _summed_up(seen)
  return found | {"samples": samples, "ms": times, "floor_ms": floor_ms, **rates}


def described(name: str, problem: Problem) -> Json:
  """What a case asks for."""
  weights, (num_tokens, width) = problem.layers[0], problem.x_MD.shape
  shape = {"M": num_tokens, "D": width, "F": weights.firing_FD.shape[0], "gated": weights.w_gate_FD is not None}
  shape["dtype"] = problem.x_MD.dtype.name
  calls = {"layers": len(problem.layers), "blocks_of_a_call": problem.blocks}
  return {"name": name, "shape": shape, "hot": problem.hot} | calls


# Without dead neurons, and sorted.


def pruned_and_sorted(x_MD: jax.Array, weights: Weights, counts_F: np.ndarray, num_tokens: int) -> Problem:
  """Leaves out neurons that fired for none of `num_tokens` tokens, and brings those that fired most to the front."""
  kept = twell.prune_dead(*weights, counts_F)
  left = kept.w_gate_FD, kept.w_up_FD, kept.w_down_FD
  by_rate = twell.sort_neurons(*left, kept.take(counts_F), num_tokens)
  return Problem(x_MD, [Weights(by_rate.w_gate_FD, by_rate.w_up_FD, by_rate.w_down_FD)], by_rate.hot)


def pruning(name: str, problem: Problem, weights: Weights, counts_F: np.ndarray, num_tokens: int) -> Json:
  """What such a problem leaves out of `weights`, and what that costs.

  Raises:
    AssertionError: no neuron that was left out fires, and y is another one all the same.
  """
  x_MD, (served,) = problem.x_MD, problem.layers
  of_pruned = count(x_MD, weights.firing_FD, jnp.asarray(counts_F == 0)).cold_M
  left = count(x_MD, served.firing_FD, problem.cold_F)
  y_MD, _ = jax.jit(block("sparse", problem.hot))(x_MD, served)
  error, firing = relative_error(x_MD, weights, y_MD), int(np.count_nonzero(of_pruned))
  if not firing and not error <= ERROR_LIMIT:
    raise AssertionError(f"{name}: relative error {error:.2e} by pruning and sorting, though no pruned neuron fires")
  return {
    "tokens_counted": num_tokens,
    "neurons_before": len(counts_F),
    "neurons_pruned": int(np.count_nonzero(counts_F == 0)),
    "tokens_firing_pruned": firing,
    "relative_error_to_unpruned": error,
    "hot_share": float(1 - left.cold_M.sum() / max(left.nonzeros_M.sum(), 1)),  # of the non-zeros
  }


# What is run. A function is made once for all cases that share it, and so compiled once a shape.


@functools.cache
def block(route: str, hot: int) -> Callable:
  """(x, weights) -> (y, Stats, or None for DENSE_APART)."""

  def call(x_MD: jax.Array, weights: Weights):
    if weights.w_gate_FD is None:
      return twell.feedforward(x_MD, weights.w_up_FD, weights.w_down_FD, route=route, hot=hot)
    return twell.gated_feedforward(x_MD, *weights, route=route, hot=hot)

  return _dense_apart if route == DENSE_APART else call


def _dense_apart(x_MD: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
  """The dense block with its products kept apart.

  XLA may join two small ones that share x, for which it copies Wg and Wu into one matrix in each call.
  """
  h_MF = reference.gate(x_MD, weights.firing_FD)
  if weights.w_gate_FD is not None:
    x_MD, h_MF = jax.lax.optimization_barrier((x_MD, h_MF))
    h_MF = h_MF * jnp.einsum("MD,FD->MF", x_MD, weights.w_up_FD)
  return jnp.einsum("MF,FD->MD", h_MF, weights.w_down_FD), None


@functools.cache
def timed(what: str, hot: int, rounds: int) -> Callable:
  """(x, weights of all layers) -> what each block gives, y or what "pack" or "gate" makes, on a new axis if many."""

  def of_block(x_MD: jax.Array, weights: Weights):
    if what == "pack":
      return twell.pack(x_MD, weights.firing_FD[hot:])
    if what == "gate":
      return jnp.einsum("MD,FD->MF", x_MD, weights.firing_FD)
    return block(what, hot)(x_MD, weights)[0]

  def run(x_MD: jax.Array, layers: list[Weights]):
    found = []
    for weights in layers * rounds:
      # One after another: XLA would compute equal blocks once, and join products that share x.
      x_MD, result = jax.lax.optimization_barrier((x_MD, of_block(x_MD, weights)))
      found.append(result)
    if len(found) == 1:
      return found[0]
    # One array, so that a call finds its results where the last one left them.
    return jax.tree.map(lambda *of_blocks: jnp.stack(of_blocks), *found)

  return run


def _times(problem: Problem, samples: int) -> dict[str, bench.Timing]:
  """Of one block."""
  whats = TIMED if problem.blocks == 1 else (*TIMED, DENSE_APART)
  hot_of = {what: problem.hot if what in (*ROUTES, "pack") else 0 for what in whats}
  functions = {what: timed(what, hot, problem.rounds) for what, hot in hot_of.items()}
  timings = bench.device_times(functions, problem.x_MD, problem.layers, samples=samples)
  return {what: {name: ms / problem.blocks for name, ms in timing.items()} for what, timing in timings.items()}


# Whether it is right.


class Counts(NamedTuple):
  """Of the dense gate."""

  nonzeros_M: np.ndarray
  cold_M: np.ndarray  # non-zeros of cold neurons alone
  tokens_F: np.ndarray  # for which a neuron fires


class LayerSeen(NamedTuple):
  """What one layer of a case is found to do."""

  used: Counts
  stats: dict[str, twell.Stats]  # by route
  error: dict[str, float]


def _check_layer(name: str, problem: Problem, weights: Weights) -> LayerSeen:
  """Compares the routes with the dense block."""
  x_MD, stats, error = problem.x_MD, {}, {}
  used = count(x_MD, weights.firing_FD, problem.cold_F)
  for route in ROUTES:
    y_MD, stats[route] = jax.jit(block(route, problem.hot))(x_MD, weights)
    error[route] = relative_error(x_MD, weights, y_MD)
    if not error[route] <= ERROR_LIMIT:  # also when it is NaN
      raise AssertionError(
        f"{name}, {route}: relative error {error[route]:.2e} against the dense block, {ERROR_LIMIT:.0e} allowed"
      )
    l0, counted = float(stats[route].l0), float(used.nonzeros_M.mean())
    if not abs(l0 - counted) <= _COUNT_LIMIT * counted + _COUNT_SLACK / len(x_MD):
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


def count(x_MD: jax.Array, w_FD: jax.Array, cold_F: jax.Array) -> Counts:
  """Of relu(x w^T)."""
  return jax.tree.map(np.asarray, _count(x_MD, w_FD, cold_F))


@jax.jit
def _count(x_MD: jax.Array, w_FD: jax.Array, cold_F: jax.Array) -> Counts:
  def chunk(x_RD):
    fires_RF = reference.gate(x_RD, w_FD) != 0
    return Counts(jnp.sum(fires_RF, axis=1), jnp.sum(fires_RF & cold_F[None], axis=1), jnp.sum(fires_RF, axis=0))

  of_chunks = jax.lax.map(chunk, _in_chunks(x_MD))
  return Counts(of_chunks.nonzeros_M.ravel(), of_chunks.cold_M.ravel(), jnp.sum(of_chunks.tokens_F, axis=0))


def _in_chunks(a_MD: jax.Array) -> jax.Array:
  """[C, R, D], with the largest R that divides M and is not above the limit."""
  num_tokens, width = a_MD.shape
  rows = max(rows for rows in range(1, _ROWS_OF_A_CHUNK + 1) if num_tokens % rows == 0)
  return a_MD.reshape(-1, rows, width)


# What is said about it.


def floor(problem: Problem, used: Counts, rates: dict[str, float]) -> float:
  """Milliseconds; no sparse route that gathers rows from L2 can be faster."""
  (num_tokens, width), itemsize = problem.x_MD.shape, problem.x_MD.dtype.itemsize
  weights, hot = problem.layers[0], problem.hot
  num_neurons = weights.firing_FD.shape[0]
  others = 1 if weights.w_gate_FD is None else 2  # projections beside the one that decides what fires
  row_bytes, row_flops = others * width * itemsize, others * 2 * width  # of a neuron, for one token
  flop_per_s, copy_bytes_per_s = rates["matmul_flop_per_s"], rates["copy_bytes_per_s"]
  gate_s = max(2 * num_tokens * width * num_neurons / flop_per_s, num_neurons * width * itemsize / copy_bytes_per_s)
  hot_s = num_tokens * hot * row_flops / flop_per_s
  dense_s = (num_neurons - hot) * row_flops / flop_per_s  # a token
  tokens_s = np.minimum(used.cold_M * (row_bytes / rates["l2_bytes_per_s"]), dense_s).sum()
  distinct = np.count_nonzero(used.tokens_F * np.asarray(problem.cold_F))
  return 1e3 * (gate_s + hot_s + max(tokens_s, distinct * row_bytes / copy_bytes_per_s))


def _summed_up(seen: list[LayerSeen]) -> Json:
  """Means over the layers, maxima of maxima and of errors."""
  nonzeros = np.stack([of_layer.used.nonzeros_M for of_layer in seen])
  taken = {"dense" if of_layer.stats["auto"].route == twell.DENSE else "sparse" for of_layer in seen}
  return {
    "nonzeros_mean": float(nonzeros.mean()),
    "nonzeros_max": int(nonzeros.max()),
    "overflow_rows": float(np.mean([of_layer.stats["sparse"].overflow_rows for of_layer in seen])),
    "auto_took": " and ".join(sorted(taken)),
    "relative_error": {route: max(of_layer.error[route] for of_layer in seen) for route in ROUTES},
  }
