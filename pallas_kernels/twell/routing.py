"""Which route pays, decided on the device; and the dense computation of those rows that do not fit the packed form.

All branches are straight-line code: XLA then keeps a whole call in one CUDA graph, whose conditional nodes read their
predicate on the device. A loop of unknown length would send its predicate to the host, and wait for the answer.

Dimension key: M tokens, D model width, F hidden neurons.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.twell import gradients, reference
from pallas_kernels.twell.gradients import Weights
from pallas_kernels.twell.reference import Sums

DENSE, SPARSE = 0, 1  # what Stats.route says
FEW_TOKENS = 64  # at most so many are served by kernels of their own, which pack nothing
_SAMPLED_SHARE = 128  # one row of so many is looked at,
_SAMPLE = 64, 256  # no fewer and no more
# Where the rows of all active neurons cost as much as the products that they replace: L2 at 8.7 TB/s against tensor
# cores at 700 TFLOP/s, whatever D and F are. Measured on an H200: 1.25 % at 16384 tokens, 1.4 % at 131072.
_PAYS_BELOW = 0.0125
_PAYS_BELOW_BEYOND_L2 = 0.008  # rows then often come from memory
_L2_BYTES = 48 << 20
_CHUNK = 32768  # rows computed densely at a time, which bounds the temporaries
# Numbers of rows that have a program of their own, where they are less than a quarter of all; for more, all rows are
# computed. A branch of a CUDA graph costs 9 us whether it is taken or not, so calls of few tokens have few.
_RUNGS = (512, 4096, 24576)


def sample_rows(num_tokens: int) -> np.ndarray:
  """i32[S]: rows whose gate speaks for all; one from each of S equal parts, at places without a period."""
  size = min(num_tokens, int(np.clip(num_tokens // _SAMPLED_SHARE, *_SAMPLE)))
  golden = (np.arange(size) * 0.6180339887498949) % 1.0
  return np.minimum((np.arange(size) + golden) * num_tokens / size, num_tokens - 1).astype(np.int32)


def sample_density(x_MD: jax.Array, w_FD: jax.Array, hot: int) -> jax.Array:
  """f32[], share of the neurons from `hot` on that fire, from a sample of rows; w_FD decides which do."""
  gate_SF = reference.gate(x_MD[sample_rows(x_MD.shape[0])], w_FD)
  return jnp.mean(gate_SF[:, hot:] != 0, dtype=jnp.float32)


def pays_below(weights: tuple[jax.Array, ...]) -> float:
  """Density below which the sparse route is the faster one; `weights` are those whose rows it gathers."""
  beyond = sum(w.size * w.dtype.itemsize for w in weights) > _L2_BYTES
  return _PAYS_BELOW_BEYOND_L2 if beyond else _PAYS_BELOW


def compute_misfits(
  x_MD: jax.Array,
  weights: tuple[jax.Array | None, jax.Array, jax.Array],
  misfit_M: jax.Array,
  y_MD: jax.Array,
  sums: Sums,
) -> tuple[jax.Array, Sums]:
  """Replaces the rows of y where misfit_M holds, sums.overflow_rows of them, by the dense block's; adds their sums.

  The number of such rows picks one of a few programs, each for up to so many; none computes more than `_CHUNK` rows at
  once. The others keep their bits.
  """
  number = sums.overflow_rows

  def some(rung: int) -> Callable:
    def run(y_MD, sums):
      for rows, x_RD in _rows_where(misfit_M, number, rung, x_MD):
        y_RD, more = _dense(x_RD, weights, sums)
        y_MD = y_MD.at[rows].set(y_RD, mode="drop", unique_indices=True)
        sums = _add(sums, more)
      return y_MD, sums

    return run

  def all_rows(y_MD, sums):
    chunks = [x_MD[first : first + _CHUNK] for first in range(0, len(x_MD), _CHUNK)]
    parts, sums_of_parts = zip(*[_dense(x_RD, weights, sums) for x_RD in chunks])
    # One select at the end: XLA would copy all of y for each chunk written into it.
    y_MD = jnp.where(misfit_M[:, None], jnp.concatenate(parts), y_MD)
    # Of rows that fit too, so these take the place of what the kernels counted.
    return y_MD, functools.reduce(_add, sums_of_parts)._replace(overflow_rows=number)

  return _by_number(number, len(x_MD), some, all_rows, y_MD, sums)


def add_misfit_gradients(
  x_MD, weights: Weights, misfit_M, d_y_MD, d_l1, d_x_MD, d_weights
) -> tuple[jax.Array, Weights]:
  """(d_x_MD, d_weights), and what the rows where misfit_M holds add to the dense block's; others keep their bits."""
  number = jnp.sum(misfit_M, dtype=jnp.int32)

  def some(rung: int) -> Callable:
    def run(d_x_MD, d_weights):
      for rows, x_RD, d_y_RD in _rows_where(misfit_M, number, rung, x_MD, d_y_MD):
        d_x_RD, d_weights = gradients.dense(x_RD, weights, d_y_RD, d_l1, start=d_weights)
        d_x_MD = d_x_MD.at[rows].set(d_x_RD, mode="drop", unique_indices=True)
      return d_x_MD, d_weights

    return run

  def all_rows(d_x_MD, d_weights):
    # A token of zeros fires for nothing, and adds nothing.
    own = lambda a_MD: jnp.where(misfit_M[:, None], a_MD, 0)
    found_MD, d_weights = gradients.dense(own(x_MD), weights, own(d_y_MD), d_l1, start=d_weights)
    return jnp.where(misfit_M[:, None], found_MD, d_x_MD), d_weights

  return _by_number(number, len(x_MD), some, all_rows, d_x_MD, d_weights)


def _by_number(number, num_tokens: int, some: Callable, all_rows: Callable, *results):
  """The results as they are for no row; else by the first program that is for so many: some(at most), or all_rows."""
  rungs = [rung for rung in _RUNGS if rung < num_tokens // 4]
  # 0: nothing to do; n: the first rung that holds them all
  branch = jnp.where(number == 0, 0, 1 + jnp.sum(number > jnp.asarray(rungs, jnp.int32), dtype=jnp.int32))
  return jax.lax.switch(branch, [lambda *results: results, *map(some, rungs), all_rows], *results)


def _rows_where(misfit_M, number, rung: int, *arrays: jax.Array) -> Iterator[tuple[jax.Array, ...]]:
  """Numbers and contents of the rows where misfit_M holds, at most `_CHUNK` at a time; zeros behind the last."""
  num_tokens = len(misfit_M)
  upto_M = jnp.cumsum(misfit_M.astype(jnp.int32))
  for first in range(0, rung, _CHUNK):
    wanted = first + jnp.arange(min(_CHUNK, rung - first), dtype=jnp.int32)
    # The row at which the count passes `wanted`; past the last row, each at a place of its own, if there is none.
    found = jnp.searchsorted(upto_M, wanted, side="right", method="scan_unrolled")
    rows = jnp.where(wanted < number, found, num_tokens + wanted)
    yield rows, *(a.at[rows].get(mode="fill", fill_value=0) for a in arrays)


def _dense(x_RD, weights, sums: Sums) -> tuple[jax.Array, Sums]:
  return reference.feedforward(x_RD, *weights, spec=None, hot=0, with_active=sums.active_F is not None)


def _add(a: Sums, b: Sums) -> Sums:
  active_F = None if a.active_F is None or b.active_F is None else a.active_F | b.active_F
  return Sums(a.l1 + b.l1, a.l0 + b.l0, a.overflow_rows, active_F)
