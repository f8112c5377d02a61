"""Training of a feed-forward block under the clock: y, and the gradients of y and of the L1 term, by each route.

Dense is what a model without sparse kernels does: the products of `reference.feedforward` and JAX's derivative of them,
which keeps what it needs of the forward pass. The routes are compared with it before anything is timed.

Dimension key: M tokens, D model width, F hidden neurons.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments import ffn_measurement as measurement
from experiments.ffn_measurement import ROUTES, Json, Problem
from pallas_kernels import bench, twell
from pallas_kernels.twell import reference
from pallas_kernels.twell.shapes import Weights

_D_L1 = 1e-3  # cotangent of the mean over tokens of sum |h|: of any size, but not 0


def measured(name: str, problem: Problem, rates: dict[str, float], *, samples: int) -> Json:
  """Returns what was found of a case.

  Raises:
    AssertionError: a result or a gradient of a route is wrong; it gets no time.
  """
  (weights,) = problem.layers
  d_y_MD = jax.random.normal(jax.random.key(1), problem.x_MD.shape, problem.x_MD.dtype)
  used = measurement.count(problem.x_MD, weights.firing_FD, problem.cold_F)
  errors, stats = _check(name, problem.x_MD, weights, d_y_MD)
  functions = {what: _without_stats(what) for what in ("dense", *ROUTES)}
  arguments = problem.x_MD, weights, d_y_MD
  return measurement.described(name, problem) | {
    "nonzeros_mean": float(used.nonzeros_M.mean()),
    "nonzeros_max": int(used.nonzeros_M.max()),
    "overflow_rows": int(stats["sparse"].overflow_rows),
    "auto_took": "dense" if stats["auto"].route == twell.DENSE else "sparse",
    "gradient_error": errors,
    "kept_bytes": {"dense": _least_kept(problem.x_MD, weights), "sparse": kept_bytes(problem.x_MD, weights)},
    "temporary_bytes": {what: _temporary_bytes(f, *arguments) for what, f in functions.items()},
    "samples": samples,
    "ms": bench.device_times(functions, *arguments, samples=samples),
    **rates,
  }


@functools.cache
def step(what: str) -> Callable:
  """(x, weights, cotangent of y) -> (y, stats or None, gradients of x and the weights)."""

  def run(x_MD: jax.Array, weights: Weights, d_y_MD: jax.Array):
    (y_MD, l1), pull, stats = jax.vjp(functools.partial(_forward, what), x_MD, weights, has_aux=True)
    return y_MD, stats, pull((d_y_MD, jnp.full_like(l1, _D_L1)))

  return run


@functools.cache
def _without_stats(what: str) -> Callable:
  """What is timed: dense blocks would have to compute the statistics."""
  return lambda *arguments: step(what)(*arguments)[::2]


def _forward(what: str, x_MD: jax.Array, weights: Weights):
  if what != "dense":
    y_MD, stats = measurement.block(what, 0)(x_MD, weights)
    return (y_MD, stats.l1), stats
  y_MD, sums = reference.feedforward(x_MD, *weights, spec=None, hot=0, with_active=False)
  return (y_MD, sums.l1 / len(x_MD)), None


def _least_kept(x_MD: jax.Array, weights: Weights) -> int:
  """What products of the dense backward pass read, beside arguments: relu(g), u and h; without a gate h alone."""
  arrays = 1 if weights.w_gate_FD is None else 3
  return arrays * len(x_MD) * len(weights.w_down_FD) * x_MD.dtype.itemsize


def kept_bytes(x_MD: jax.Array, weights: Weights) -> int:
  """What the sparse route keeps for the gradients, beside its arguments."""

  def kept(x_MD, weights):
    _, pull, _ = jax.vjp(functools.partial(_forward, "sparse"), x_MD, weights, has_aux=True)
    arguments = {id(a) for a in jax.tree.leaves((x_MD, weights))}
    return list({id(a): a for a in jax.tree.leaves(pull) if id(a) not in arguments}.values())

  return sum(a.size * a.dtype.itemsize for a in jax.eval_shape(kept, x_MD, weights))


def _check(name: str, x_MD, weights: Weights, d_y_MD) -> tuple[dict[str, float], dict[str, twell.Stats]]:
  """(largest relative error of y and the gradients, what the call saw) of each route."""
  expected_MD, _, expected = jax.jit(step("dense"))(x_MD, weights, d_y_MD)
  errors, stats = {}, {}
  for route in ROUTES:
    y_MD, stats[route], found = jax.jit(step(route))(x_MD, weights, d_y_MD)
    pairs = zip(jax.tree.leaves((y_MD, found)), jax.tree.leaves((expected_MD, expected)), strict=True)
    errors[route] = max(float(_relative_error(a, b)) for a, b in pairs)
    if not errors[route] <= measurement.ERROR_LIMIT:  # also when it is NaN
      raise AssertionError(
        f"{name}, {route}: relative error {errors[route]:.2e} against the dense block,"
        f" {measurement.ERROR_LIMIT:.0e} allowed"
      )
  return errors, jax.tree.map(np.asarray, stats)


@jax.jit
def _relative_error(found: jax.Array, expected: jax.Array) -> jax.Array:
  found, expected = (a.astype(jnp.float32) for a in (found, expected))
  size = jnp.linalg.norm(expected)
  return jnp.linalg.norm(found - expected) / jnp.maximum(size, jnp.finfo(jnp.float32).tiny)


def _temporary_bytes(function: Callable, *arguments) -> int:
  return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def table(cases: list[Json]) -> str:
  """Returns Markdown of a record's training cases."""
  header = ["case", "M, D x F", "non-zeros, mean (max)", "overflow rows", "auto took"]
  header += ["dense ms", "sparse ms", "auto ms", "sparse over dense", "auto over dense"]
  header += ["kept for gradients", "temporaries", "error"]
  rows = []
  for case in cases:
    shape, ms = case["shape"], {what: timing["ms"] for what, timing in case["ms"].items()}
    rows.append(
      [
        case["name"],
        f"{shape['M']}, {shape['D']} x {shape['F']}",
        f"{case['nonzeros_mean']:.1f} ({case['nonzeros_max']})",
        f"{case['overflow_rows']}",
        case["auto_took"],
        *(f"{ms[what]:.3f}" for what in ("dense", *ROUTES)),
        *(f"{ms['dense'] / ms[route]:.2f}x" for route in ROUTES),
        _share(case["kept_bytes"]),
        _share(case["temporary_bytes"]),
        f"{max(case['gradient_error'].values()):.0e}",
      ]
    )
  notes = (
    "Forward and backward of one block, L1 term included. Dense is JAX's derivative of the plain block, which keeps"
    f" what it needs. Medians of {cases[0]['samples']} queues of calls, which take turns.\n"
  )
  return f"{bench.markdown_table(header, rows)}\n{notes}"


def _share(of: dict[str, int]) -> str:
  """What sparse needs, and as a share of dense."""
  return f"{of['sparse'] / 2**20:,.0f} MiB ({of['sparse'] / max(of['dense'], 1):.1%})"
