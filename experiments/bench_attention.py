"""Speed of the jagged attention family on a GPU, beside cuDNN in three forms and plain XLA; a record and a table.

python -m experiments.bench_attention --record=runs/attention
python -m experiments.bench_attention --cases=gdpa,flash --record=runs/attention

TFLOP/s count visible pairs alone: 4 H K each forward, 2.5 times that backward. The backward pass is what forward and
backward take together less the forward pass. cuDNN gets the same rows padded to the longest, with their lengths; packed
several to a sequence of that length, where they are unequal; and equal rows of as many tokens (what no jagged data can
beat). XLA runs its own attention on the padded rows, where it fits.

Dimension key: T tokens, B rows, L longest row, H heads, K head width.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import cudnn_packed
from experiments.attention_tables import table
from pallas_kernels import bench, device, jagged
from pallas_kernels.jagged import shapes
from pallas_kernels.jagged.shapes import JaggedShape
from sparse_lm.benchmark import RECORD, cases_flag, choose, record_cases
from sparse_lm.errors import UserError, first_line
from sparse_lm.flags import run

flags.declare_key_flag("record")
_CASES = cases_flag()

Json = dict[str, Any]
_SAMPLES = 7  # of a time, of which the median counts
_ERROR_LIMIT = 1.5e-2  # of bf16 results and gradients; rounding p once makes 3e-3
_XLA_PAIRS = 1 << 31  # scores of all heads: what fits into memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One row of the table."""

  shape: JaggedShape
  options: dict  # of jagged.attention
  with_bias: bool = False
  baselines: tuple[str, ...] = ()  # cudnn_padded, cudnn_packed, cudnn_equal, xla


def cases() -> dict[str, Case]:
  """Returns the cases by name."""
  cudnn = ("cudnn_padded", "cudnn_equal")
  found = {}
  for name, shape in shapes.BENCHMARK.items():
    if name.startswith("L=") and shape.keys is None and shape.queries is None:
      packed = ("cudnn_packed",) if shape.fill < 1 else ()  # equal rows are packed as they are
      found[f"flash {name}"] = Case(shape=shape, options={}, baselines=(*cudnn, *packed, "xla"))
      for activation in ("fast_gelu", "gelu_polynomial", "silu"):
        found[f"gdpa_{activation} {name}"] = Case(shape=shape, options=dict(activation=activation, pre_scale=0.088))
    if shape.keys is not None:
      options = dict(activation="fast_gelu", pre_scale=0.088)
      found[f"gdpa_cross {name}"] = Case(shape=shape, options=options)
  found["pooling 64 seeds, L=2048 fill=0.5"] = Case(
    shape=shapes.BENCHMARK["L=2048 seeds=64 fill=0.5"], options=dict(broadcast_q=True), baselines=("cudnn_padded",)
  )
  blocks = shapes.BENCHMARK["blocks L=2000 fill=0.75"]
  found["block 64, L=2000 fill=0.75"] = Case(shape=blocks, options=dict(block=64))
  hstu = shapes.BENCHMARK["hstu L=2048"]
  found["window 100, L=2048 fill=0.5"] = Case(shape=shapes.BENCHMARK["L=2048 fill=0.5"], options=dict(window=100))
  found["hstu causal, L=2048"] = Case(
    shape=hstu,
    options=dict(activation="silu", causal=True, pre_scale=0.088, post_scale=1 / 2048),
  )
  found["hstu causal with bias, L=2048"] = dataclasses.replace(found["hstu causal, L=2048"], with_bias=True)
  found["flash causal, L=2048"] = Case(shape=hstu, options=dict(causal=True), baselines=cudnn)
  return found


def main(argv: list[str]) -> None:
  """Runs on a Hopper GPU; on anything else a time would mean nothing, so there is none."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  if not RECORD.value:
    raise UserError("--record=FOLDER is needed; name a new folder, such as --record=runs/attention")
  chosen = choose(cases(), _CASES.value)
  if (reason := device.missing_hopper()) is not None:
    raise UserError(f"bench_attention measures kernels for sm_90: {reason}; no times were taken")
  record_cases(RECORD.value, {"cases": list(chosen)}, measure(chosen, _SAMPLES, "hopper"), table)


def measure(chosen: dict[str, Case], samples: int, implementation: str) -> Iterator[Json]:
  """Yields what was found of each case.

  Raises:
    AssertionError: a result is wrong; it gets no time.
  """
  ceilings = bench.ceilings()
  for name, case in chosen.items():
    problem = Problem(case, np.random.default_rng(zlib.crc32(name.encode())), implementation)
    error = problem.check(name)
    times = problem.times(samples)
    shape = {field: value for field, value in dataclasses.asdict(case.shape).items() if field != "dtype"}
    facts = {
      "name": name,
      "shape": shape,
      "options": case.options,
      "bias": case.with_bias,
      "pairs": problem.pairs,
      "tokens": problem.tokens,
    }
    yield facts | {"relative_error": error, "samples": samples, "ms": times, "imbalance": problem.imbalance, **ceilings}
    jax.clear_caches()


class Problem:
  """Inputs of a case, and the functions that are timed."""

  def __init__(self, case: Case, rng: np.random.Generator, implementation: str):
    self.case, self.implementation, shape = case, implementation, case.shape
    self.lengths = shape.draw_lengths(rng)
    offsets = lambda lengths: np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    q_lengths = np.full(shape.B, shape.queries) if shape.queries else self.lengths
    k_lengths = np.full(shape.B, shape.keys) if shape.keys else self.lengths
    self.q_offsets, self.k_offsets = offsets(q_lengths), offsets(k_lengths)
    self.tokens = int(self.q_offsets[-1])
    num_q, num_k = (-(-int(o[-1]) // 8) * 8 for o in (self.q_offsets, self.k_offsets))
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 4)
    normal = lambda key, tokens: jax.random.normal(key, (tokens, shape.H, shape.K), shape.dtype)
    self.q = normal(keys[0], shape.queries or num_q)
    self.k, self.v = normal(keys[1], num_k), normal(keys[2], num_k)
    self.d_o = normal(keys[3], shape.B * shape.queries if shape.queries else num_q)
    self.masks = {name: case.options[name] for name in ("causal", "window", "block") if name in case.options}
    self.pairs = visible_pairs(q_lengths, k_lengths, **self.masks)
    self.schedule = self._make_schedule(self.q_offsets, self.k_offsets)
    sms = device.num_sms() if implementation == "hopper" else 132
    self.imbalance = float(self.schedule.imbalance(shape.H, sms))

  def _call(self, q, k, v, *tables, q_offsets, k_offsets, implementation, schedule=None):
    offsets = (None if self.case.shape.queries else q_offsets), (None if self._is_self else k_offsets)
    options = self.case.options | dict(implementation=implementation, schedule=schedule)
    if tables:
      # A token of each row every minute; its own row alone says when, so that rows need no order.
      options["bias"] = jagged.RelativeBias(*tables, 60 * jnp.arange(len(q), dtype=jnp.int32))
    return jagged.attention(q, k, v, *offsets, **options)

  @property
  def _tables(self) -> tuple[jax.Array, ...]:
    """Those of a bias, of small numbers; none without one."""
    table = lambda size, place: 0.02 * jax.random.normal(jax.random.key(place), (size,), jnp.float32)
    return (table(2 * self.case.shape.L - 1, 0), table(129, 1)) if self.case.with_bias else ()

  def ours(self, q, k, v, d_o, schedule):
    """o."""
    del d_o
    offsets = dict(q_offsets=self.q_offsets, k_offsets=self.k_offsets)
    return self._call(q, k, v, *self._tables, **offsets, implementation=self.implementation, schedule=schedule)

  def ours_with_gradients(self, q, k, v, d_o, schedule):
    """o and the gradients of q, k, v and the tables of a bias."""
    call = functools.partial(self._call, q_offsets=self.q_offsets, k_offsets=self.k_offsets)
    call = functools.partial(call, implementation=self.implementation, schedule=schedule)
    return with_gradients(call, d_o, q, k, v, *self._tables)

  def check(self, name: str) -> float:
    """Largest relative error of o and the gradients of a few rows, against the plain reference in float32.

    Rows do not see each other, so the first, one in the middle and the last alone have to give the same.
    """
    rows = sorted({0, self.case.shape.B // 2, self.case.shape.B - 1})
    q_tokens, k_tokens = (_tokens(offsets, rows) for offsets in (self.q_offsets, self.k_offsets))
    q_offsets, k_offsets = (_few(offsets, rows) for offsets in (self.q_offsets, self.k_offsets))
    wide = lambda a: a.astype(jnp.float32)
    few = functools.partial(self._call, q_offsets=q_offsets, k_offsets=k_offsets, implementation="reference")
    q = self.q if self.case.shape.queries else self.q[q_tokens]
    arguments = q, self.k[k_tokens], self.v[k_tokens], *self._tables
    # Tuned for a minute, for one call: not needed.
    jit = functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})
    expected = jit(functools.partial(with_gradients, few))(wide(self.d_o[q_tokens]), *map(wide, arguments))
    # Seeds and tables are the same for all rows: with the cotangent of these rows alone, so is their gradient.
    d_o = jnp.zeros_like(self.d_o).at[q_tokens].set(self.d_o[q_tokens])
    o, d_q, d_k, d_v, *d_tables = jax.jit(self.ours_with_gradients)(self.q, self.k, self.v, d_o, self.schedule)
    found = o[q_tokens], d_q if self.case.shape.queries else d_q[q_tokens], d_k[k_tokens], d_v[k_tokens], *d_tables
    worst = 0.0
    for which, a, b in zip(("o", "dq", "dk", "dv", "d_position", "d_time")[: len(found)], found, expected, strict=True):
      a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
      error = np.linalg.norm(a - b) / np.linalg.norm(b)
      if not error <= _ERROR_LIMIT:
        raise AssertionError(f"{name}: {which} is off by {error:.2e} of the reference, {_ERROR_LIMIT:.1e} allowed")
      worst = max(worst, float(error))
    return worst

  def times(self, samples: int) -> dict[str, bench.Timing | str]:
    """Milliseconds by name, forward and with gradients, all in turns; what does not run says why."""
    own = self.q, self.k, self.v, self.d_o, self.schedule
    found = bench.device_times({"ours": self.ours, "ours+grad": self.ours_with_gradients}, *own, samples=samples)
    found["schedule"] = bench.device_time(self._make_schedule, *map(jnp.asarray, (self.q_offsets, self.k_offsets)))
    for name in self.case.baselines:
      try:
        function, arguments = self._baseline(name)
        both = {name: function, f"{name}+grad": functools.partial(_gradients_last, function)}
        found |= bench.device_times(both, *arguments, samples=samples)
      except (RuntimeError, ValueError) as error:  # no cuDNN, no memory, or shapes that it does not take
        found[name] = first_line(error)
    return found

  def _make_schedule(self, q_offsets, k_offsets):
    tokens = dict(num_queries=len(self.d_o), num_keys=len(self.k))
    return jagged.make_schedule(q_offsets, None if self._is_self else k_offsets, **tokens, **self.masks)

  @property
  def _is_self(self) -> bool:
    """Whether queries and keys are the same tokens."""
    return self.case.shape.keys is None and self.case.shape.queries is None

  def _baseline(self, name: str) -> tuple[Callable, tuple]:
    """(function of q, k, v and the cotangent, its arguments)."""
    shape = self.case.shape
    longest = shape.L if name != "cudnn_equal" else max(8, round(self.lengths.mean() / 8) * 8)
    if name == "xla" and shape.B * shape.H * longest**2 > _XLA_PAIRS:
      raise ValueError("scores do not fit into memory")
    packing = cudnn_packed.pack(self.lengths, longest)
    sequences = len(packing.lengths_NM) if name == "cudnn_packed" else shape.B
    keys = jax.random.split(jax.random.key(0), 4)
    normal = lambda key, tokens: jax.random.normal(key, (sequences, tokens, shape.H, shape.K), shape.dtype)
    lengths = {}
    if name == "cudnn_padded":
      k_lengths = jnp.asarray(self.lengths, jnp.int32)
      q_lengths = jnp.full_like(k_lengths, shape.queries) if shape.queries else k_lengths
      lengths = dict(query_seq_lengths=q_lengths, key_value_seq_lengths=k_lengths)
    causal = bool(self.case.options.get("causal"))
    if name == "cudnn_packed":
      function = functools.partial(cudnn_packed.attention, packing=packing, causal=causal)
    else:
      implementation = "xla" if name == "xla" else "cudnn"
      function = functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, implementation=implementation, **lengths
      )
    q, k, v, d_o = (normal(key, longest) for key in keys)
    if shape.queries:
      q, d_o = (a[:, : shape.queries] for a in (q, d_o))
    return lambda q, k, v, d_o: function(q, k, v), (q, k, v, d_o)


def _tokens(offsets: np.ndarray, rows: list[int]) -> np.ndarray:
  """All tokens of these rows."""
  return np.concatenate([np.arange(offsets[b], offsets[b + 1]) for b in rows])


def _few(offsets: np.ndarray, rows: list[int]) -> np.ndarray:
  """Offsets of these rows alone."""
  return np.cumsum([0, *(offsets[b + 1] - offsets[b] for b in rows)]).astype(np.int32)


def visible_pairs(q_lengths, k_lengths, *, causal=False, window=None, block=None) -> int:
  """Of all rows."""
  total = 0
  for num_q, num_k in zip(q_lengths.tolist(), k_lengths.tolist(), strict=True):
    i = np.arange(num_q)
    begin, end = np.zeros(num_q, np.int64), np.full(num_q, num_k, np.int64)
    if window is not None:
      begin, end = np.maximum(begin, i - window), np.minimum(end, i + window + 1)
    if causal:
      end = np.minimum(end, i + 1)
    if block is not None:
      begin, end = np.maximum(begin, i // block * block), np.minimum(end, (i // block + 1) * block)
    total += int(np.maximum(end - begin, 0).sum())
  return total


def with_gradients(function: Callable, d_o: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """o, and the gradients of the arrays."""
  o, pull = jax.vjp(function, *arrays)
  return o, *pull(d_o.astype(o.dtype))


def _gradients_last(function: Callable, q, k, v, d_o):
  return with_gradients(lambda q, k, v: function(q, k, v, d_o), d_o, q, k, v)


if __name__ == "__main__":
  run(main)
