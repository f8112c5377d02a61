"""twell.pack and the feed-forward blocks, every implementation against float64; odd rows and neurons first.

Gates are sums of small integers: exact in float32 in any order, so that which neuron fires is not a matter of rounding
and counts have to agree to the last one. Three features steer them: x[:, 0] = 8 is constant and meets a bias of each
neuron, x[:, 1] lifts the neurons of one tile, x[:, 2] lifts or sinks all neurons of a row.

Dimension key: M tokens, D model width, F hidden neurons.
"""

import dataclasses
import functools
import re
import statistics

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import twell_oracle

from pallas_kernels import device, twell
from pallas_kernels.twell import api, gradients, kept, routing

# The interpreter takes seconds for a call: it runs one case of each kind, the other tests leave it out.
without_interpreter = pytest.mark.parametrize(
  "implementation", ["reference", pytest.param("hopper", marks=pytest.mark.gpu)], indirect=True
)
# Half a minute each, of combinations whose parts other tests interpret.
interpreter_is_slow = pytest.mark.parametrize(
  "implementation",
  ["reference", pytest.param("interpret", marks=pytest.mark.slow), pytest.param("hopper", marks=pytest.mark.gpu)],
  indirect=True,
)
gated_or_not = pytest.mark.parametrize("gated", [True, False], ids=["gated", "non_gated"])
TILE, CAPACITY, ROW_CAPACITY = 256, 31, 256  # of the default Spec, and of any row
LARGEST_DECODE = 64  # tokens; for so few, the kernels pack nothing and nothing overflows

# The hidden value passes three roundings and the output one, each 2^-9 at most in bfloat16: 4 * 2^-9 = 0.8 % for a row
# with a single neuron, and less than half of it over rows, where errors are independent. float16 has three bits more.
TOLERANCES = {jnp.dtype(jnp.bfloat16): (5e-3, 1e-2), jnp.dtype(jnp.float16): (6e-4, 1.25e-3)} | {
  jnp.dtype(jnp.float32): (1e-6, 2e-6)
}


@dataclasses.dataclass(frozen=True)
class Problem:
  x_MD: np.ndarray
  w_gate_FD: np.ndarray | None
  w_up_FD: np.ndarray
  w_down_FD: np.ndarray

  @property
  def operation(self):
    return twell.feedforward if self.w_gate_FD is None else twell.gated_feedforward

  @property
  def arrays(self):
    return tuple(a for a in dataclasses.astuple(self) if a is not None)

  @functools.cached_property
  def expected(self):
    return twell_oracle.feedforward(*dataclasses.astuple(self))

  def with_rows(self, *, full=(), empty=(), full_tile=(), **values):
    """Another problem that differs in these rows: all neurons fire, none, those of the last tile; or it holds inf."""
    x_MD = self.x_MD.copy()
    x_MD[list(full), 2], x_MD[list(empty), 2], x_MD[list(full_tile), 1] = 256, -1024, 256
    for value, rows in values.items():
      x_MD[list(rows), 3] = float(value)
    return dataclasses.replace(self, x_MD=x_MD)


def draw(seed, tokens, width, neurons, *, gated=True, dtype=jnp.bfloat16, density=0.03):
  """Neurons fire for a share `density` of the tokens, one number or one a neuron; 0 and 1 are never and always."""
  rng = np.random.default_rng(seed)
  x_MD = rng.integers(-2, 3, (tokens, width)).astype(np.float64)
  x_MD[:, :3] = 8, 0, 0
  w_gate_FD = rng.integers(-2, 3, (neurons, width)).astype(np.float64)
  deviation = 2 * np.sqrt(width - 3)  # of a sum of products of such integers
  for n, share in enumerate(np.broadcast_to(density, neurons)):
    # Never: also not in a full row. Always: but for an empty one.
    shift = {0: -1024, 1: 240}.get(share) or deviation * statistics.NormalDist().inv_cdf(share)
    w_gate_FD[n, :3] = np.round(shift / 2) / 4, n // TILE == (neurons - 1) // TILE, 1
  w_up_FD = rng.normal(size=(neurons, width)) / np.sqrt(width)
  w_up_FD[:, 1:3] = 0
  w_down_FD = rng.normal(size=(neurons, width)) / np.sqrt(neurons)
  arrays = [a.astype(dtype) for a in (x_MD, w_gate_FD, w_up_FD, w_down_FD)]
  return Problem(*arrays) if gated else Problem(arrays[0], None, arrays[1], arrays[3])


@functools.cache
def jitted(operation, **options):
  return jax.jit(functools.partial(operation, **options))


def call(run, problem, **options):
  return run(jitted(problem.operation, with_active=True, **options), *map(jnp.asarray, problem.arrays))


def relative_error(actual, expected, axis=None):
  difference, size = (np.linalg.norm(np.asarray(a, np.float64), axis=axis) for a in (actual - expected, expected))
  return np.where(difference == 0, 0, difference / np.where(size == 0, 1e-300, size))


def assert_equals_oracle(problem, result, *, hot=0):
  """Output, and all that is said about the call but the route, which implementations choose."""
  (y_MD, stats), (expected_MD, h_MF, fires_MF) = result, problem.expected
  assert y_MD.dtype == problem.x_MD.dtype
  assert y_MD.shape == problem.x_MD.shape
  y_MD = y_MD.astype(np.float64)
  finite = np.isfinite(expected_MD)
  np.testing.assert_array_equal(y_MD[~finite], expected_MD[~finite])  # NaN equals NaN here
  total, per_row = TOLERANCES[jnp.dtype(problem.x_MD.dtype)]
  rows = finite.all(axis=1)
  assert np.isfinite(y_MD[rows]).all()
  assert relative_error(y_MD[rows], expected_MD[rows]) <= total
  assert np.max(relative_error(y_MD[rows], expected_MD[rows], axis=1), initial=0) <= per_row
  tokens = max(len(y_MD), 1)
  np.testing.assert_allclose(stats.l0, fires_MF.sum() / tokens, rtol=1e-6)
  with np.errstate(invalid="ignore"):
    np.testing.assert_allclose(stats.l1, np.abs(h_MF).sum() / tokens, rtol=total)
  np.testing.assert_array_equal(stats.active, fires_MF.any(axis=0))
  # In a gated block a token that is not finite gives NaN whatever fires; in the other one only what fires matters.
  checked_MD = None if problem.w_gate_FD is None else problem.x_MD
  overflow_rows = len(twell_oracle.overflow_rows(checked_MD, fires_MF[:, hot:], TILE, CAPACITY, ROW_CAPACITY))
  if len(y_MD) <= LARGEST_DECODE:
    assert stats.overflow_rows in (0, overflow_rows)
  else:
    assert stats.overflow_rows == overflow_rows


def assert_same_bits(y_MD, other_MD, rows):
  assert len(rows) > 0
  assert y_MD[rows].tobytes() == other_MD[rows].tobytes()


class TestPack:
  def assert_packs(self, run, implementation, problem, spec=None, poisoned=()):
    packed = run(jitted(twell.pack, implementation=implementation, spec=spec), problem.x_MD, problem.w_gate_FD)
    spec = spec or twell.Spec(value_dtype=np.float16 if problem.x_MD.dtype == np.float16 else jnp.bfloat16)
    assert packed.spec == spec
    gate_MF = problem.x_MD.astype(np.float64) @ problem.w_gate_FD.astype(np.float64).T
    expected = twell_oracle.pack(np.maximum(gate_MF, 0).astype(spec.value_dtype), spec.tile, spec.words)
    assert packed.words.shape == (len(gate_MF), -(-gate_MF.shape[1] // spec.tile), spec.words)
    for m in set(range(len(gate_MF))) - set(poisoned):
      for t, tile in enumerate(expected[m]):
        assert packed.words[m, t, : len(tile)].tolist() == tile
    return packed

  def test_equals_the_loops(self, run, implementation):
    density = np.full(384, 0.05)
    density[[0, 255, 256, 383]] = 1, 1, 0, 1
    problem = draw(0, 70, 128, 384, density=density).with_rows(full=[3], empty=[0, 69], full_tile=[64], nan=[7])
    packed = self.assert_packs(run, implementation, problem, poisoned=[7])
    counts = packed.words[:, :, 0]
    assert counts[[0, 3, 69]].tolist() == [[0, 0], [256, 127], [0, 0]]
    assert np.flatnonzero((counts > CAPACITY).any(axis=1)).tolist() == [3, 7, 64]  # a NaN must not pack as nothing

  @without_interpreter
  @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
  @pytest.mark.parametrize("shape", [(0, 128, 256), (1, 128, 128), (65, 256, 640), (130, 384, 256)], ids=str)
  def test_shapes(self, run, implementation, shape, dtype):
    self.assert_packs(run, implementation, draw(1, *shape, dtype=dtype))

  @pytest.mark.parametrize("spec", [twell.Spec(compression=2), twell.Spec(tile=64, compression=2)], ids=str)
  def test_other_layouts_of_the_reference(self, run, spec):
    self.assert_packs(run, "reference", draw(2, 9, 128, 320, density=0.3), spec)

  def test_float32_of_the_reference(self, run):
    self.assert_packs(run, None, draw(3, 9, 40, 300, dtype=jnp.float32))


SHAPES = {
  "no_tokens": (0, 128, 256, jnp.bfloat16, True),
  "one_token_and_half_a_tile": (1, 128, 128, jnp.bfloat16, True),
  "few_tokens": (7, 256, 384, jnp.bfloat16, True),
  "few_tokens_of_float16": (7, 384, 256, jnp.float16, True),
  "last_that_decodes": (64, 384, 256, jnp.bfloat16, True),
  "first_that_packs": (65, 128, 512, jnp.bfloat16, True),
  "half_a_tile": (65, 128, 128, jnp.float16, True),
  "no_tile_divides": (130, 256, 640, jnp.bfloat16, True),
  "odd_width": (130, 384, 384, jnp.float16, True),
  "no_tokens_non_gated": (0, 128, 256, jnp.bfloat16, False),
  "few_tokens_non_gated": (7, 384, 256, jnp.float16, False),
  "first_that_packs_non_gated": (65, 128, 128, jnp.bfloat16, False),
  "odd_width_non_gated": (130, 384, 640, jnp.float16, False),
}


@without_interpreter
@pytest.mark.parametrize(("tokens", "width", "neurons", "dtype", "gated"), SHAPES.values(), ids=SHAPES)
def test_shapes_equal_float64(run, implementation, tokens, width, neurons, dtype, gated):
  problem = draw(tokens, tokens, width, neurons, gated=gated, dtype=dtype)
  assert_equals_oracle(problem, call(run, problem, implementation=implementation, route="sparse"))


@gated_or_not
def test_float32_and_widths_that_no_kernel_takes_are_served_by_the_reference(run, gated):
  problem = draw(0, 9, 40, 300, gated=gated, dtype=jnp.float32)
  assert_equals_oracle(problem, call(run, problem))


class TestOddRowsAndNeurons:
  """All in one call, since they must not disturb each other."""

  tokens, width, neurons = 70, 128, 512

  def problem(self, gated):
    density = np.full(self.neurons, 0.02)
    density[[5, 300]] = 1
    density[[6, 255, 256, 511]] = 0
    problem = draw(11, self.tokens, self.width, self.neurons, gated=gated, density=density)
    # +inf at feature 3 sinks every gate to -inf: the hidden value of a gated block is 0 * inf.
    weights = "w_gate_FD" if gated else "w_up_FD"
    sunk_FD = getattr(problem, weights).copy()
    sunk_FD[:, 3] = -1
    return dataclasses.replace(problem, **{weights: sunk_FD})

  @interpreter_is_slow
  @gated_or_not
  def test_equal_float64(self, run, implementation, gated):
    special = dict(empty=[0, 33], full=[1, 69], full_tile=[64], nan=[3], inf=[4])
    problem = self.problem(gated).with_rows(**special)
    y_MD, stats = result = call(run, problem, implementation=implementation, route="sparse")
    assert_equals_oracle(problem, result)
    assert stats.overflow_rows == (5 if gated else 4)
    assert stats.route == (twell.DENSE if implementation == "reference" else twell.SPARSE)
    assert np.flatnonzero(np.isnan(y_MD.astype(np.float32)).all(axis=1)).tolist() == ([3, 4] if gated else [3])
    assert not y_MD[[0, 33]].any()
    # They are nobody's business but their own.
    plain_MD, plain_stats = call(run, self.problem(gated), implementation=implementation, route="sparse")
    assert plain_stats.overflow_rows == 0
    assert np.flatnonzero(~plain_stats.active[[5, 6, 255, 256, 300, 511]]).tolist() == [1, 2, 3, 5]
    changed = set().union(*special.values())
    assert_same_bits(y_MD, plain_MD, sorted(set(range(self.tokens)) - changed))

  @without_interpreter
  @gated_or_not
  @pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
  @pytest.mark.parametrize("tokens", [1, 7, 64, 70])
  def test_what_is_not_finite_stays_in_its_row(self, run, implementation, gated, value, tokens):
    problem = draw(12, tokens, self.width, self.neurons, gated=gated)
    poisoned = problem.with_rows(**{value: [tokens // 2]})
    y_MD, _ = result = call(run, poisoned, implementation=implementation, route="sparse")
    assert_equals_oracle(poisoned, result)
    assert not np.isfinite(y_MD[tokens // 2].astype(np.float32)).any()
    if tokens > 1:
      plain_MD, _ = call(run, problem, implementation=implementation, route="sparse")
      assert_same_bits(y_MD, plain_MD, sorted(set(range(tokens)) - {tokens // 2}))

  @without_interpreter
  @gated_or_not
  @pytest.mark.parametrize("share", [0, 1], ids=["nothing_fires", "everything_fires"])
  def test_extremes(self, run, implementation, gated, share):
    problem = draw(13, self.tokens, self.width, self.neurons, gated=gated, density=share)
    y_MD, stats = result = call(run, problem, implementation=implementation, route="sparse")
    assert_equals_oracle(problem, result)
    assert (stats.l0, stats.overflow_rows) == ((0, 0) if share == 0 else (self.neurons, self.tokens))
    assert y_MD.any() == bool(share)

  @without_interpreter
  @gated_or_not
  def test_skew(self, run, implementation, gated):
    """Rates fall as 1 / rank: most non-zeros lie in few columns, and rows differ widely."""
    density = np.minimum(0.9, 8 / np.arange(1, self.neurons + 1))
    problem = draw(14, self.tokens, self.width, self.neurons, gated=gated, density=density)
    assert_equals_oracle(problem, call(run, problem, implementation=implementation, route="sparse"))


OVERFLOWS = {
  "one_tile_of_one_row": dict(full_tile=[40]),
  "one_row": dict(full=[40]),
  "half_of_the_rows": dict(full=range(0, 70, 2)),
  "all_rows": dict(full=range(70)),
}


@without_interpreter
@gated_or_not
@pytest.mark.parametrize("rows", OVERFLOWS.values(), ids=OVERFLOWS)
def test_rows_that_overflow_are_exact_and_leave_others_alone(run, implementation, rows, gated):
  plain = draw(21, 70, 128, 512, gated=gated)
  problem = plain.with_rows(**rows)
  y_MD, stats = result = call(run, problem, implementation=implementation, route="sparse")
  assert_equals_oracle(problem, result)
  (changed,) = rows.values()
  assert stats.overflow_rows == len(changed)
  if others := sorted(set(range(70)) - set(changed)):
    plain_MD, plain_stats = call(run, plain, implementation=implementation, route="sparse")
    assert plain_stats.overflow_rows == 0
    assert_same_bits(y_MD, plain_MD, others)


@without_interpreter
@gated_or_not
@pytest.mark.parametrize(("number", "overflow_rows"), [(256, 0), (257, 1)])
def test_a_row_that_fits_every_tile_can_be_too_long(run, implementation, gated, number, overflow_rows):
  density = np.zeros(2560)
  density[(np.arange(number) * 2560) // number] = 1e-9  # these fire in a full row alone, 26 of a tile at most
  problem = draw(25, 70, 128, 2560, gated=gated, density=density).with_rows(full=[40])
  _, stats = result = call(run, problem, implementation=implementation, route="sparse")
  assert_equals_oracle(problem, result)
  assert problem.expected[2][40].sum() == number
  assert stats.overflow_rows == overflow_rows


@interpreter_is_slow
def test_a_chunk_of_overflowing_rows_that_is_not_full(run, implementation, monkeypatch):
  """Seven rows, in float16, where up to eight have a program of their own that takes four at a time."""
  monkeypatch.setattr(routing, "_RUNGS", (2, 8))
  monkeypatch.setattr(routing, "_CHUNK", 4)
  problem = draw(22, 70, 128, 256, dtype=jnp.float16).with_rows(full=[0, 1, 30, 31, 44, 68, 69])
  options = dict(implementation=implementation, route="sparse", with_active=True)
  uncached = jax.jit(functools.partial(problem.operation, **options))
  assert_equals_oracle(problem, run(uncached, *map(jnp.asarray, problem.arrays)))


@without_interpreter
@pytest.mark.parametrize("number", [511, 512, 513])
def test_many_rows_that_overflow(run, implementation, number):
  """One row more takes another program."""
  problem = draw(23, 2500, 128, 256)
  problem = problem.with_rows(full=np.random.default_rng(number).permutation(2500)[:number])
  assert_equals_oracle(problem, call(run, problem, implementation=implementation, route="sparse"))


@without_interpreter
def test_more_rows_that_overflow_than_are_computed_at_a_time(run, implementation):
  problem = draw(24, 70000, 128, 128).with_rows(full=range(0, 70000, 2))
  assert_equals_oracle(problem, call(run, problem, implementation=implementation, route="sparse"))


class TestFewTokens:
  """At most 64: one kernel without a packed format."""

  def test_gated(self, run, implementation):
    problem = draw(31, 7, 128, 384, density=0.1).with_rows(empty=[0], full=[3], nan=[5])
    assert_equals_oracle(problem, call(run, problem, implementation=implementation, route="sparse"))

  def test_one_token_of_the_non_gated_block(self, run, implementation):
    problem = draw(32, 1, 128, 256, gated=False, density=0.1)
    assert_equals_oracle(problem, call(run, problem, implementation=implementation, route="sparse"))

  @without_interpreter
  @gated_or_not
  @pytest.mark.parametrize("tokens", [1, 8, 17, 33, 64])
  @pytest.mark.parametrize("density", [0.01, 0.1])
  def test_numbers_of_tokens(self, run, implementation, tokens, density, gated):
    problem = draw(35, tokens, 256, 512, gated=gated, density=density)
    assert_equals_oracle(problem, call(run, problem, implementation=implementation, route="sparse"))

  @without_interpreter
  @gated_or_not
  @pytest.mark.parametrize("tokens", [1, 64])
  def test_full_rows_are_exact(self, run, implementation, tokens, gated):
    problem = draw(33, tokens, 128, 512, gated=gated).with_rows(full=range(tokens))
    assert_equals_oracle(problem, call(run, problem, implementation=implementation, route="sparse"))


class TestHot:
  @without_interpreter
  @gated_or_not
  @pytest.mark.parametrize(("tokens", "hot"), [(7, 128), (70, 128), (70, 256), (70, 512)])
  def test_neurons_computed_densely_change_no_result(self, run, implementation, tokens, hot, gated):
    problem = draw(41, tokens, 128, 512, gated=gated, density=np.repeat([0.5, 0.02], [128, 384]))
    problem = problem.with_rows(full_tile=[2])
    result = call(run, problem, implementation=implementation, route="sparse", hot=hot)
    assert_equals_oracle(problem, result, hot=hot)

  @without_interpreter
  def test_they_do_not_overflow(self, run, implementation):
    problem = draw(42, 70, 128, 512, density=np.repeat([1, 0.02], [128, 384]))
    options = dict(implementation=implementation, route="sparse")
    assert call(run, problem, **options)[1].overflow_rows == 70
    assert call(run, problem, hot=128, **options)[1].overflow_rows == 0


class TestRoute:
  problem = draw(51, 70, 128, 256)

  @interpreter_is_slow
  def test_a_traced_hint_decides_on_the_device(self, run, implementation):
    """One program for both routes."""
    function = jax.jit(
      lambda hint, *arrays: twell.gated_feedforward(
        *arrays, density_hint=hint, with_active=True, implementation=implementation
      )
    )
    taken = []
    for hint in (0.001, 0.999):
      result = run(function, jnp.float32(hint), *map(jnp.asarray, self.problem.arrays))
      assert_equals_oracle(self.problem, result)
      taken.append(int(result[1].route))
    assert taken == [twell.DENSE if implementation == "reference" else twell.SPARSE, twell.DENSE]

  @without_interpreter
  @pytest.mark.parametrize(("tokens", "gated"), [(7, False), (70, True)], ids=["7_non_gated", "70_gated"])
  def test_all_routes_agree(self, run, implementation, tokens, gated):
    problem = draw(52, tokens, 128, 512, gated=gated).with_rows(full=[2])
    results = {}
    for options in (
      {"route": "sparse"},
      {"route": "dense"},
      {},
      {"density_hint": 0.5},
      {"density_hint": np.float32(0)},
    ):
      y_MD, stats = call(run, problem, implementation=implementation, **options)
      expected_MD, h_MF, fires_MF = problem.expected
      assert relative_error(y_MD.astype(np.float64), expected_MD) <= 5e-3
      np.testing.assert_allclose(stats.l0, fires_MF.sum() / tokens, rtol=1e-6)
      np.testing.assert_allclose(stats.l1, np.abs(h_MF).sum() / tokens, rtol=5e-3)
      results[options.get("route")] = int(stats.route)
    assert results["dense"] == twell.DENSE
    assert results["sparse"] == (twell.DENSE if implementation == "reference" else twell.SPARSE)

  def test_the_dense_route_packs_nothing_and_counts_no_overflow(self, run):
    _, stats = call(run, self.problem.with_rows(full=[2]), route="dense", implementation="interpret")
    assert (stats.overflow_rows, stats.route) == (0, twell.DENSE)

  def test_more_neurons_than_the_format_can_name_take_the_dense_route(self, run):
    problem = draw(53, 2, 8, 65537)
    y_MD, stats = call(run, problem)
    assert relative_error(y_MD.astype(np.float64), problem.expected[0]) <= 5e-3
    assert stats.route == twell.DENSE

  @pytest.mark.parametrize("trace", [lambda f: f, jax.jit], ids=["eager", "jit"])
  def test_a_number_as_hint_is_known_while_tracing(self, trace, monkeypatch):
    """Through jit and the custom rule of derivatives it would arrive as a tracer."""
    seen = []

    class Kernels:
      unsupported = staticmethod(lambda *args: None)

      @staticmethod
      def feedforward(x_MD, *weights, density_hint, spec, hot, with_active, **options):
        seen.append(density_hint)
        results = api.reference.feedforward(x_MD, *weights, spec=spec, hot=hot, with_active=with_active)
        return *results, jnp.int32(1), None

    monkeypatch.setattr(api, "_kernels", lambda: Kernels)
    options = dict(density_hint=0.25, implementation="interpret")
    loss = lambda *arrays: jnp.sum(twell.gated_feedforward(*arrays, **options)[0].astype(jnp.float32))
    trace(jax.grad(loss))(*map(jnp.asarray, self.problem.arrays))
    assert [(type(hint), hint) for hint in seen] == [(float, 0.25)]


class TestTransformations:
  @interpreter_is_slow
  @pytest.mark.parametrize("tokens", [5, 70])
  def test_vmap_equals_a_loop(self, run, implementation, tokens):
    problem = draw(61, 2 * tokens, 128, 256).with_rows(full=[2], empty=[tokens])
    x_BMD, *weights = problem.x_MD.reshape(2, tokens, 128), *problem.arrays[1:]
    block = functools.partial(twell.gated_feedforward, implementation=implementation, route="sparse", with_active=True)
    y_BMD, stats = run(jax.jit(jax.vmap(block, (0, None, None, None))), x_BMD, *weights)
    for x_MD, *result in zip(x_BMD, y_BMD, map(twell.Stats, *stats)):
      assert_equals_oracle(dataclasses.replace(problem, x_MD=x_MD), result)

  @without_interpreter
  def test_a_donated_token_array_may_be_overwritten(self, run, implementation):
    problem = draw(62, 70, 128, 512)
    block = functools.partial(twell.gated_feedforward, implementation=implementation, with_active=True)
    assert_equals_oracle(problem, run(jax.jit(block, donate_argnums=0), *map(jnp.array, problem.arrays)))

  @without_interpreter
  def test_the_same_call_gives_the_same_bits(self, run, implementation):
    problem = draw(63, 70, 128, 512).with_rows(full=[2])
    once, again = (call(run, problem, implementation=implementation, route="sparse") for _ in range(2))
    assert [a.tobytes() for a in jax.tree.leaves(once)] == [a.tobytes() for a in jax.tree.leaves(again)]

  def test_active_is_only_computed_when_asked_for(self):
    assert twell.gated_feedforward(*TestRoute.problem.arrays, implementation="reference")[1].active is None


class TestDerivatives:
  def gradients(self, run, problem, d_y_MD, d_l1, **options):
    """Returns them for every array, and the result of the call."""

    def loss(*arrays):
      y_MD, stats = result = problem.operation(*arrays, with_active=True, **options)
      # A loss without one of the terms has to be differentiable too.
      terms = [jnp.sum(y_MD.astype(jnp.float32) * d_y_MD)] if d_y_MD is not None else []
      return sum(terms + ([d_l1 * stats.l1] if d_l1 else [])), result

    arrays = tuple(map(jnp.asarray, problem.arrays))
    return run(jax.jit(jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)), *arrays)

  def assert_gradients(self, run, problem, of="both", tolerance=1e-2, hot=0, **options):
    d_y_MD = np.random.default_rng(7).normal(size=problem.x_MD.shape).astype(problem.x_MD.dtype)
    # So large that either term alone is far above the tolerance in the sum of both.
    d_y_MD, d_l1 = None if of == "l1" else d_y_MD, 0.0 if of == "y" else 20.0
    actual, result = self.gradients(run, problem, d_y_MD, d_l1, hot=hot, **options)
    assert_equals_oracle(problem, result, hot=hot)
    d_y_MD = np.zeros(problem.x_MD.shape) if d_y_MD is None else d_y_MD
    expected = twell_oracle.gradients(*dataclasses.astuple(problem), d_y_MD, d_l1)
    for d, wanted, of_array in zip(actual, [e for e in expected if e is not None], problem.arrays, strict=True):
      assert d.dtype == of_array.dtype
      assert d.shape == wanted.shape
      assert relative_error(d.astype(np.float64), wanted) <= tolerance

  @gated_or_not
  @pytest.mark.parametrize("of", ["y", "l1", "both"])
  def test_float32_equals_float64(self, run, gated, of):
    problem = draw(71, 9, 40, 300, gated=gated, dtype=jnp.float32, density=0.1).with_rows(full=[3], empty=[0])
    self.assert_gradients(run, problem, of, tolerance=1e-5)

  @without_interpreter
  @gated_or_not
  def test_bfloat16_equals_float64(self, run, implementation, gated):
    """Two more factors than the output, each rounded once more: twice its tolerance."""
    problem = draw(72, 70, 128, 512, gated=gated).with_rows(full=[3], empty=[0])
    self.assert_gradients(run, problem, implementation=implementation, route="sparse")

  @interpreter_is_slow
  @gated_or_not
  def test_rows_that_fit_and_rows_that_do_not(self, run, implementation, gated, monkeypatch):
    """A full row overflows, one neuron fires for every token and so has many segments, some neurons fire for none."""
    from pallas_kernels.twell import gradient_hopper  # needs Mosaic

    monkeypatch.setattr(gradient_hopper, "_SEGMENT", 16)
    density = np.r_[1.0, np.zeros(27), np.full(100, 0.05)]
    problem = draw(79, 70, 128, 128, gated=gated, density=density).with_rows(full=[3, 69], empty=[0])
    self.assert_gradients(run, problem, implementation=implementation, route="sparse")

  @interpreter_is_slow
  @pytest.mark.parametrize("missing", [0, 1, 200])
  def test_entries_for_which_there_is_no_room(self, run, implementation, missing, monkeypatch):
    """The tokens behind the last that finds room are computed densely, and counted."""
    problem = draw(80, 130, 128, 128, density=np.full(128, 0.02)).with_rows(empty=[0, 129])
    upto_M = np.cumsum(problem.expected[2].sum(axis=1))
    room = int(upto_M[-1]) - missing
    monkeypatch.setattr(kept, "room", lambda num_tokens, num_neurons: room)
    d_y_MD = np.random.default_rng(7).normal(size=problem.x_MD.shape).astype(problem.x_MD.dtype)
    found, (_, stats) = self.gradients(run, problem, d_y_MD, 20.0, implementation=implementation, route="sparse")
    for d, wanted in zip(found, twell_oracle.gradients(*dataclasses.astuple(problem), d_y_MD, 20.0), strict=True):
      assert relative_error(d.astype(np.float64), wanted) <= 1e-2
    if implementation != "reference":
      assert stats.overflow_rows == (upto_M > room).sum()
      assert (stats.overflow_rows == 0) == (missing == 0)

  @interpreter_is_slow
  @gated_or_not
  @pytest.mark.parametrize("width", [2176, 4224])
  def test_tokens_that_warps_share(self, run, implementation, width, gated):
    problem = draw(82, 66, width, 128, gated=gated).with_rows(full=[3], empty=[65])
    self.assert_gradients(run, problem, implementation=implementation, route="sparse")

  @interpreter_is_slow
  @pytest.mark.parametrize("spoilt", ["x", "d_y"])
  def test_a_row_that_is_not_finite_spoils_no_other(self, run, implementation, spoilt):
    """Neither its entries nor its place among them: the weights' gradients are NaN, as those of the dense block."""
    problem, d_y_MD = draw(83, 70, 128, 128), np.ones((70, 128), np.float32)
    expected = twell_oracle.gradients(*dataclasses.astuple(problem), d_y_MD, 1.0)[0]
    if spoilt == "x":
      problem = problem.with_rows(inf=[4])
    d_y_MD[4, 7] = np.nan if spoilt == "d_y" else 1
    (d_x_MD, *d_weights), _ = self.gradients(run, problem, d_y_MD, 1.0, implementation=implementation, route="sparse")
    others = np.arange(70) != 4
    assert relative_error(d_x_MD[others].astype(np.float64), expected[others]) <= 1e-2
    assert not np.isfinite(d_x_MD[4].astype(np.float64)).all()
    assert not np.isfinite(d_weights[2].astype(np.float64)).all()

  @pytest.mark.parametrize(
    ("policy", "packs"),
    [
      (jax.checkpoint_policies.nothing_saveable, 2),
      (jax.checkpoint_policies.dots_saveable, 2),
      (jax.checkpoint_policies.save_only_these_names(twell.KEPT), 1),
    ],
  )
  @pytest.mark.parametrize("route", ["sparse", "auto"])
  def test_what_is_kept_is_not_computed_again(self, policy, packs, route, monkeypatch):
    """As the program says that a GPU would run."""
    monkeypatch.setattr(device, "missing_hopper", lambda: None)
    monkeypatch.setattr(device, "num_sms", lambda: 132)
    arrays = tuple(jnp.asarray(a) for a in draw(84, 70, 128, 128).arrays)

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(*arrays):
      y_MD, stats = twell.gated_feedforward(*arrays, route=route, implementation="hopper")
      return jnp.sum(y_MD, dtype=jnp.float32) + stats.l1

    lowered = jax.jit(jax.value_and_grad(loss, argnums=range(4))).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert len(re.findall(r"call @pack(_\d+)?\(", lowered.as_text())) == packs

  @interpreter_is_slow
  @pytest.mark.parametrize("hint", [0.001, 0.9])
  def test_the_route_that_was_taken_is_the_one_that_goes_back(self, run, implementation, hint):
    problem = draw(81, 70, 128, 128, density=np.full(128, 0.03))
    arrays, d_y_MD = tuple(map(jnp.asarray, problem.arrays)), np.ones((70, 128), np.float32)

    def loss(hint, *arrays):
      y_MD, stats = problem.operation(*arrays, implementation=implementation, density_hint=hint)
      return jnp.sum(y_MD.astype(jnp.float32) * d_y_MD) + stats.l1, stats.route

    found, route = run(jax.jit(jax.grad(loss, argnums=range(1, 5), has_aux=True)), jnp.float32(hint), *arrays)
    sparse = hint < 0.01 and implementation != "reference"
    assert route == (routing.SPARSE if sparse else routing.DENSE)
    for d, wanted in zip(found, twell_oracle.gradients(*dataclasses.astuple(problem), d_y_MD, 1.0), strict=True):
      assert relative_error(d.astype(np.float64), wanted) <= 1e-2

  @interpreter_is_slow
  def test_every_implementation_with_hot_neurons(self, run, implementation):
    problem = draw(73, 70, 128, 384, density=np.repeat([0.5, 0.02], [128, 256])).with_rows(full=[3], empty=[0])
    self.assert_gradients(run, problem, implementation=implementation, route="sparse", hot=128)

  @gated_or_not
  def test_chunks_of_rows_add_up(self, run, gated, monkeypatch):
    """The last one is not whole."""
    monkeypatch.setattr(gradients, "_ROWS_OF_A_CHUNK", 32)
    problem = draw(74, 70, 40, 300, gated=gated, dtype=jnp.float32).with_rows(full=[3, 69])
    self.assert_gradients(run, problem, tolerance=1e-5)

  @without_interpreter
  @gated_or_not
  def test_no_tokens_give_zeros(self, run, implementation, gated):
    problem = draw(75, 0, 128, 256, gated=gated)
    d_y_MD = np.zeros((0, 128), np.float32)
    d_arrays, _ = self.gradients(run, problem, d_y_MD, 1.0, implementation=implementation)
    for d, of_array in zip(d_arrays, problem.arrays, strict=True):
      assert (d.shape, d.dtype) == (of_array.shape, of_array.dtype)
      assert not d.any()

  def test_counts_and_the_hint_have_none(self, run):
    arrays = tuple(map(jnp.asarray, draw(76, 9, 128, 256).arrays))

    def loss(hint, *arrays):
      y_MD, stats = twell.gated_feedforward(*arrays, density_hint=hint)
      return stats.l0 + 0 * jnp.sum(y_MD.astype(jnp.float32))

    for d in run(jax.jit(jax.grad(loss, argnums=range(5))), jnp.float32(0.1), *arrays):
      assert not d.any()

  def test_a_token_that_is_not_finite_spoils_no_other_tokens_gradient(self, run):
    problem = draw(77, 9, 128, 256).with_rows(nan=[4])
    (d_x_MD, *_), _ = self.gradients(run, problem, np.ones((9, 128), np.float32), 1.0)
    assert np.flatnonzero(~np.isfinite(d_x_MD.astype(np.float32)).all(axis=1)).tolist() == [4]

  def test_scanned_and_rematerialized_layers(self, run):
    problem = draw(78, 9, 40, 300, dtype=jnp.float32)
    stacked = tuple(jnp.stack([jnp.asarray(w), w[::-1] * 0.5]) for w in problem.arrays[1:])

    def layer(x_MD, weights):
      y_MD, stats = twell.gated_feedforward(x_MD, *weights)
      return x_MD + 0.1 * y_MD, stats.l1

    def scanned(x_MD, stacked):
      x_MD, l1 = jax.lax.scan(jax.checkpoint(layer), x_MD, stacked)
      return jnp.sum(x_MD) + jnp.sum(l1)

    def looped(x_MD, stacked):
      total = 0.0
      for i in range(2):
        x_MD, l1 = layer(x_MD, [w[i] for w in stacked])
        total += l1
      return jnp.sum(x_MD) + total

    of_scan, of_loop = (run(jax.jit(jax.grad(f, (0, 1))), problem.x_MD, stacked) for f in (scanned, looped))
    for d, expected in zip(jax.tree.leaves(of_scan), jax.tree.leaves(of_loop), strict=True):
      assert relative_error(d, expected) <= 1e-6

  def test_forward_mode_is_refused(self):
    x_MD, *weights = map(jnp.asarray, draw(79, 2, 8, 8, dtype=jnp.float32).arrays)
    with pytest.raises(TypeError, match="forward-mode"):
      jax.jvp(lambda x_MD: twell.gated_feedforward(x_MD, *weights)[0], (x_MD,), (x_MD,))


class TestRefusals:
  x_MD, w_FD = jnp.zeros((3, 128), jnp.bfloat16), jnp.zeros((256, 128), jnp.bfloat16)

  def refused(self, error, said, x_MD=None, w_gate_FD=None, w_up_FD=None, w_down_FD=None, **options):
    arrays = [self.w_FD if w is None else w for w in (w_gate_FD, w_up_FD, w_down_FD)]
    with pytest.raises(error, match=said):
      twell.gated_feedforward(self.x_MD if x_MD is None else x_MD, *arrays, **options)

  @pytest.mark.parametrize(
    "x",
    [jnp.zeros((2, 3, 128), jnp.bfloat16), jnp.zeros(128), jnp.zeros((3, 128), jnp.int32)],
    ids=lambda x: str(x.aval),
  )
  def test_tokens_that_are_no_floating_matrix(self, x):
    said = re.escape(f"x_MD must be floating [M, D], got {x.dtype}{x.shape}; reshape other axes into M")
    self.refused(ValueError, "twell.gated_feedforward: " + said, x)
    with pytest.raises(ValueError, match=r"twell\.feedforward: " + said):
      twell.feedforward(x, self.w_FD, self.w_FD)
    with pytest.raises(ValueError, match=r"twell\.pack: " + said):
      twell.pack(x, self.w_FD)

  @pytest.mark.parametrize("name", ["w_gate_FD", "w_up_FD", "w_down_FD"])
  def test_a_weight_of_another_dtype(self, name):
    said = f"{name} is float32 and x_MD is bfloat16; cast one"
    self.refused(TypeError, said, **{name: self.w_FD.astype(jnp.float32)})

  @pytest.mark.parametrize("name", ["w_gate_FD", "w_up_FD", "w_down_FD"])
  @pytest.mark.parametrize("shape", [(128, 256), (256, 127), (256,), (1, 256, 128)], ids=str)
  def test_a_weight_of_another_width_or_rank(self, name, shape):
    said = re.escape(f"{name} must be [F, D] with the D=128 of x_MD(3, 128), got shape {shape}; weights are neuron-maj")
    self.refused(ValueError, said, **{name: jnp.zeros(shape, jnp.bfloat16)})

  @pytest.mark.parametrize("name", ["w_up_FD", "w_down_FD"])
  def test_a_weight_of_other_neurons(self, name):
    said = re.escape(f"{name} has shape (255, 128) and w_gate_FD has (256, 128); all weights share F neurons")
    self.refused(ValueError, said, **{name: self.w_FD[:255]})
    with pytest.raises(ValueError, match=re.escape("w_down_FD has shape (255, 128) and w_up_FD has (256, 128)")):
      twell.feedforward(self.x_MD, self.w_FD, self.w_FD[:255])

  def test_an_unknown_route(self):
    self.refused(ValueError, r"route='fast' must be one of \('sparse', 'dense', 'auto'\)", route="fast")

  @pytest.mark.parametrize("hint", [-0.001, 1.001, 29, float("nan"), np.float32(1.5)])
  def test_a_hint_that_is_no_share(self, hint):
    self.refused(
      ValueError, rf"density_hint={hint} is a share of the neurons and must lie in \[0, 1\]", density_hint=hint
    )

  def test_a_hint_for_each_token(self):
    self.refused(ValueError, r"density_hint must be one floating number, got float32\(3,\)", density_hint=jnp.zeros(3))

  @pytest.mark.parametrize("hint", [jnp.array(True), jnp.array(1)], ids=["bool", "integer"])
  def test_a_hint_of_another_type(self, hint):
    self.refused(ValueError, rf"density_hint must be one floating number, got {hint.dtype}\(\)", density_hint=hint)

  def test_a_spec_of_another_type(self):
    self.refused(TypeError, r"spec=\{\} must be a twell\.Spec or None", spec={})

  def test_a_number_of_hot_neurons_that_is_no_integer(self):
    self.refused(ValueError, r"hot=128\.0 must be a multiple of 128", hot=128.0)

  @pytest.mark.parametrize("hot", [-128, 1, 64, 384])
  def test_hot_neurons_that_are_no_blocks_or_too_many(self, hot):
    self.refused(ValueError, rf"hot={hot} must be a multiple of 128 in 0\.\.F=256", hot=hot)

  def test_more_neurons_than_the_format_can_name(self):
    x_MD, w_FD = jnp.zeros((3, 1), jnp.bfloat16), jnp.zeros((65537, 1), jnp.bfloat16)
    said = r"F=65537 columns, but a word has 16 bits for a column, 65536 at most; use route='dense'"
    self.refused(ValueError, said, x_MD, w_FD, w_FD, w_FD, route="sparse")
    with pytest.raises(ValueError, match=said):
      twell.pack(x_MD, w_FD)

  def test_an_unknown_implementation(self):
    self.refused(ValueError, r"implementation='cuda' must be None or one of", implementation="cuda")

  def test_an_array_that_is_spread_over_devices(self):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    spread = jax.device_put(self.w_FD, jax.NamedSharding(mesh, jax.P("data")))
    said = r"w_up_FD is sharded over devices .* call pallas_kernels\.sharding\.twell_gated_feedforward"
    self.refused(ValueError, said, w_up_FD=spread)
    with pytest.raises(ValueError, match=r"w_FD is sharded over devices .* pallas_kernels\.sharding\.twell_pack"):
      twell.pack(self.x_MD, spread)

  @pytest.mark.parametrize("implementation", ["interpret", "hopper"])
  @pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [((256, 128), jnp.float32, "float32"), ((256, 100), jnp.bfloat16, "D=100"), ((100, 128), jnp.bfloat16, "F=100")],
    ids=["dtype", "width", "neurons"],
  )
  def test_what_no_kernel_takes(self, shape, dtype, said, implementation):
    x_MD, w_FD = jnp.zeros((3, shape[1]), dtype), jnp.zeros(shape, dtype)
    said = rf'implementation="{implementation}" cannot serve this call: .*{said}'
    self.refused(NotImplementedError, said, x_MD, w_FD, w_FD, w_FD, implementation=implementation)
    with pytest.raises(NotImplementedError, match=said):
      twell.feedforward(x_MD, w_FD, w_FD, implementation=implementation)
    with pytest.raises(NotImplementedError, match=said):
      twell.pack(x_MD, w_FD, implementation=implementation)


def assert_random_problem_equals_oracle(data, implementation, shape, dtype):
  tokens, _, neurons = shape
  gated, hot = data.draw(st.booleans()), 128 * data.draw(st.integers(0, neurons // 128))
  share = st.sampled_from([0, 0.01, 0.05, 0.3, 0.9, 1])
  # Neurons of a few kinds, in runs of 64 so that tiles differ.
  density = np.repeat([data.draw(share) for _ in range(-(-neurons // 64))], 64)[:neurons]
  problem = draw(data.draw(st.integers(0, 99)), *shape, gated=gated, dtype=dtype, density=density)
  kinds = data.draw(st.lists(st.sampled_from(["full", "empty", "full_tile", "nan"]), max_size=min(tokens, 4)))
  problem = problem.with_rows(**{kind: [row] for row, kind in enumerate(kinds)})
  run = lambda function, *args: jax.tree.map(np.asarray, function(*args))
  result = call(run, problem, implementation=implementation, route="sparse", hot=hot)
  assert_equals_oracle(problem, result, hot=hot)


@hypothesis.settings(derandomize=True, deadline=None, max_examples=30)
@hypothesis.given(data=st.data())
def test_random_problems_equal_float64(data):
  """A few shapes, since each is compiled."""
  shape = data.draw(st.sampled_from([(5, 128, 128), (66, 24, 260)]))
  dtype = data.draw(st.sampled_from([jnp.bfloat16, jnp.float16]))
  assert_random_problem_equals_oracle(data, "reference", shape, dtype)


@pytest.mark.slow  # every example is compiled
@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_gradient_of_layers_needs_little_more_memory_on_either_route_than_on_the_sparse_one():
  """Beside what one layer's dense gradient needs."""
  num_tokens, width, neurons = 16384, 512, 1408
  x_MD = jax.ShapeDtypeStruct((num_tokens, width), jnp.bfloat16)
  weights = [jax.ShapeDtypeStruct((4, neurons, width), jnp.bfloat16)] * 3

  def temporaries(route):
    def loss(x_MD, *weights):
      def layer(x_MD, of_layer):
        y_MD, stats = twell.gated_feedforward(x_MD, *of_layer, route=route)
        return x_MD + y_MD, stats.l1

      x_MD, l1 = jax.lax.scan(layer, x_MD, weights)
      return jnp.sum(x_MD, dtype=jnp.float32) + jnp.sum(l1)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(x_MD, *weights).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  one_layer = tuple(jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in weights)
  chunk = jax.jit(gradients.dense).lower(x_MD, one_layer, x_MD, jax.ShapeDtypeStruct((), jnp.float32)).compile()
  assert temporaries("auto") <= 1.15 * temporaries("sparse") + chunk.memory_analysis().temp_size_in_bytes


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@hypothesis.settings(
  derandomize=True,
  deadline=None,
  max_examples=30,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],  # the fixture only skips
)
@hypothesis.given(data=st.data())
def test_random_larger_problems_equal_float64(data):
  tokens = data.draw(st.one_of(st.integers(0, 130), st.integers(131, 2000)))
  shape = (tokens, 128 * data.draw(st.integers(1, 8)), 128 * data.draw(st.integers(1, 24)))
  dtype = data.draw(st.sampled_from([jnp.bfloat16, jnp.float16]))
  assert_random_problem_equals_oracle(data, "hopper", shape, dtype)


def test_gradients_of_float64_are_float64():
  with jax.enable_x64(True):
    arrays = [jnp.asarray(np.random.default_rng(n).normal(size=(4, 8))) for n in range(4)]
    loss = lambda *arrays: jnp.sum(twell.gated_feedforward(*arrays)[0])
    found = jax.grad(loss, range(4))(*arrays)
    expected = jax.grad(lambda x, g, u, d: jnp.sum((jax.nn.relu(x @ g.T) * (x @ u.T)) @ d), range(4))(*arrays)
    for a, b in zip(found, expected):
      assert a.dtype == jnp.float64
      np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
