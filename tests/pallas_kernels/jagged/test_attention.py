"""The attention family against float64 loops: every instance, odd rows, gradients, and what must not leak."""

import dataclasses
import functools
import re

import jagged_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import jagged


@dataclasses.dataclass
class Problem:
  """Float32 arguments, and what a call says beside them."""

  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  q_offsets: np.ndarray
  k_offsets: np.ndarray | None  # None: those of q
  options: dict
  d_o: np.ndarray
  tables: oracle.Bias | None = None
  angles: np.ndarray | None = None  # of a rotary embedding, [T, K / 2]
  turn_values: bool = False

  @property
  def broadcast(self) -> bool:
    return bool(self.options.get("broadcast_q"))

  def call(self, q, k, v, position=None, time=None, **options):
    """The operation, of what is differentiable."""
    bias = None
    if self.tables is not None:
      bias = jagged.RelativeBias(position, time, jnp.asarray(self.tables.timestamps))
    targets = {name: jnp.asarray(self.options[name]) for name in ("num_targets",) if name in self.options}
    q_offsets = None if self.broadcast else jnp.asarray(self.q_offsets)
    k_offsets = None if self.k_offsets is None else jnp.asarray(self.k_offsets)
    if self.angles is not None:
      behind = np.arange(len(self.angles)) >= self.q_offsets[-1]
      # What lies behind the last row is never read.
      cos_and_sin = (
        jnp.asarray(np.where(behind[:, None], np.nan, f(self.angles)), jnp.float32) for f in (np.cos, np.sin)
      )
      options["rotary"] = jagged.Rotary(*cos_and_sin, values=self.turn_values)
    return jagged.attention(q, k, v, q_offsets, k_offsets, **(self.options | targets | options), bias=bias)

  @property
  def arrays(self) -> tuple[np.ndarray, ...]:
    return (self.q, self.k, self.v, *(() if self.tables is None else (self.tables.position, self.tables.time)))

  @functools.cached_property
  def expected(self):
    """o, and the gradients in the order of `arrays`."""
    options = {name: value for name, value in self.options.items() if name != "broadcast_q"}
    for ours, theirs in (("pre_scale", "pre"), ("post_scale", "post")):
      if ours in options:
        options[theirs] = options.pop(ours)
    rows = len(self.q_offsets) - 1
    q = np.tile(self.q, (rows, 1, 1)) if self.broadcast else self.q
    k_offsets = self.q_offsets if self.k_offsets is None else self.k_offsets
    arguments = q, self.k, self.v, self.q_offsets, k_offsets
    with np.errstate(invalid="ignore"):
      attention = oracle.attention
      if self.angles is not None:
        attention = functools.partial(oracle.turned_attention, angles=self.angles, values=self.turn_values)
      o, d = attention(*arguments, bias=self.tables, d_o=self.d_o, **options)
    if self.broadcast:
      d["q"] = d["q"].reshape(rows, *self.q.shape).sum(axis=0)
    return o, tuple(d[name] for name in ("q", "k", "v", "position", "time") if name in d)


def offsets_of(lengths) -> np.ndarray:
  return np.cumsum([0, *lengths]).astype(np.int32)


def draw(
  seed, lengths, k_lengths=None, *, heads=2, key_heads=None, width=16, padding=3, longest=None, turn=None, **options
):
  """Random tokens, some of padding behind the last row."""
  rng = np.random.default_rng(seed)
  q_offsets, k_offsets = offsets_of(lengths), None if k_lengths is None else offsets_of(k_lengths)
  broadcast = options.get("broadcast_q")
  num_q = q_offsets[-1] + padding
  num_k = num_q if k_offsets is None else k_offsets[-1] + padding
  if broadcast:
    num_q = lengths[0] if lengths else 3
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  tables = None
  if longest is not None:
    times = np.sort(rng.integers(0, 10**6, num_q)).astype(np.int32)
    tables = oracle.Bias(normal(2 * longest - 1), normal(129), times)
  q = normal(num_q, heads, width)
  k, v = (normal(num_k, key_heads or heads, width) for _ in range(2))
  d_o = normal(q_offsets[-1] if broadcast else num_q, heads, width)
  angles = None if turn is None else rng.uniform(-10, 10, (num_q, width // 2))
  return Problem(q, k, v, q_offsets, k_offsets, options, d_o, tables, angles, turn == "values")


def assert_equals_oracle(problem: Problem, *, tolerance=1e-5, **options):
  """o and all gradients; also that what lies behind the last row is exactly 0."""
  o, found = with_gradients(problem, **options)
  expected_o, expected = problem.expected
  close(o, expected_o, tolerance)
  for name, d, expected_d in zip(("q", "k", "v", "position", "time"), found, expected, strict=False):
    close(d, expected_d, tolerance, name)
  if not problem.broadcast:
    assert not np.any(np.asarray(o)[problem.q_offsets[-1] :])
    assert not np.any(np.asarray(found[0])[problem.q_offsets[-1] :])


def with_gradients(problem: Problem, **options):
  """o, and the gradients of all arrays."""

  @jax.jit
  def run(d_o, *arrays):
    o, pull = jax.vjp(functools.partial(problem.call, **options), *arrays)
    return o, pull(d_o.astype(o.dtype))

  return run(problem.d_o, *problem.arrays)


def close(found, expected, tolerance, name="o"):
  found = np.asarray(found, np.float64)
  scale = max(1.0, float(np.max(np.abs(expected), initial=0)))
  np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale, err_msg=name)


LENGTHS = [0, 1, 127, 0, 128, 129, 5, 0]
OTHERS = [4, 0, 130, 0, 3, 64, 129, 7]
INSTANCES = {
  "flash": dict(),
  "flash_scaled": dict(pre_scale=0.7, post_scale=0.25),
  "flash_of_nothing": dict(post_scale=0.0),
  "causal": dict(causal=True),
  "window": dict(window=20),
  "causal_window": dict(causal=True, window=20),
  "block": dict(block=64),
  "causal_block_window": dict(causal=True, block=48, window=30),
  "raw": dict(activation="raw"),
  "gelu": dict(activation="gelu"),
  "gelu_approx_causal": dict(activation="gelu_approx", causal=True, pre_scale=0.5, post_scale=0.1),
  "relu_window": dict(activation="relu", window=3),
  "silu": dict(activation="silu"),
  "leaky_relu": dict(activation="leaky_relu"),
  "relu_square": dict(activation="relu_square", pre_scale=0.3),
  "hardswish": dict(activation="hardswish"),
  "each_head_its_own": dict(activation=("silu", "relu", "gelu", "raw"), heads=4),
  "grouped_heads": dict(heads=4, key_heads=2),
  "one_key_head": dict(activation=("silu", "relu", "gelu", "raw"), heads=4, key_heads=1),
  "targets": dict(num_targets=np.array([0, 1, 3, 0, 128, 20, 1, 0], np.int32), causal=True),
  "hstu": dict(
    activation="silu", causal=True, post_scale=1 / 130, longest=130,
    num_targets=np.array([0, 0, 2, 0, 10, 129, 1, 0], np.int32),
  ),
  "rotary": dict(turn="q and k", causal=True),
  "rotary_values": dict(turn="values", block=64),
  "rotary_grouped": dict(turn="values", activation="silu", heads=4, key_heads=2),
  "softmax_with_bias": dict(longest=129, window=40),
}  # fmt: skip


# One of each kind; the slow tests have them all.
QUICK = ("flash", "causal_window", "block", "silu", "each_head_its_own", "grouped_heads", "hstu", "softmax_with_bias")
ALL_INSTANCES = [
  pytest.param(options, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, options in INSTANCES.items()
]


class TestInstances:
  @pytest.mark.parametrize("options", ALL_INSTANCES)
  def test_equals_float64(self, options):
    assert_equals_oracle(draw(1, LENGTHS, **options), implementation="reference")

  @pytest.mark.parametrize("name", ["causal_window", "block", "silu", "grouped_heads"])
  def test_keys_of_other_lengths(self, name):
    assert_equals_oracle(draw(2, LENGTHS, OTHERS, **INSTANCES[name]), implementation="reference")

  @pytest.mark.parametrize("options", [{}, dict(activation="gelu"), dict(key_heads=1), dict(causal=True)])
  def test_seeds_that_are_the_same_for_all_rows(self, options):
    assert_equals_oracle(draw(3, [7] * 8, OTHERS, broadcast_q=True, **options), implementation="reference")

  @pytest.mark.parametrize("width", [1, 96])
  def test_widths(self, width):
    assert_equals_oracle(draw(4, [3, 70], width=width), implementation="reference", tolerance=2e-5)

  @pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 1e-2), (jnp.float16, 2e-3)])
  def test_half_precision_is_rounded_once(self, dtype, tolerance):
    problem = draw(5, LENGTHS, causal=True, activation="silu", post_scale=0.1)
    rounded = lambda a: np.asarray(jnp.asarray(a, dtype), np.float32)
    for name in ("q", "k", "v", "d_o"):
      setattr(problem, name, rounded(getattr(problem, name)))
    problem.q, problem.k, problem.v = (jnp.asarray(a, dtype) for a in problem.arrays)
    o, found = with_gradients(problem)
    expected_o, expected = problem.expected
    for a, b in zip((o, *found), (expected_o, *expected), strict=True):
      assert a.dtype == dtype
      np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=tolerance, atol=1e-4)

  def test_float64(self):
    with jax.enable_x64():
      problem = draw(6, LENGTHS, causal=True)
      for name in ("q", "k", "v", "d_o"):
        setattr(problem, name, getattr(problem, name).astype(np.float64))
      assert_equals_oracle(problem, tolerance=1e-12)


length = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129]), st.integers(0, 200))


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_random_rows_equal_float64(data):
  lengths = data.draw(st.lists(length, max_size=5))
  masks = st.fixed_dictionaries(
    {
      "causal": st.booleans(),
      "window": st.one_of(st.none(), st.integers(0, 150)),
      "block": st.sampled_from([None, 1, 64, 100]),
      "activation": st.sampled_from(["softmax", "silu", "raw"]),
    }
  )
  options = data.draw(masks)
  k_lengths = data.draw(st.one_of(st.none(), st.lists(length, min_size=len(lengths), max_size=len(lengths))))
  problem = draw(data.draw(st.integers(0, 99)), lengths, k_lengths, padding=data.draw(st.integers(0, 130)), **options)
  assert_equals_oracle(problem, tolerance=1e-4)


class TestOddRows:
  @pytest.mark.parametrize("activation", ["softmax", "silu"])
  @pytest.mark.parametrize(
    ("lengths", "k_lengths"),
    [([0, 3, 0], [2, 0, 3]), ([1, 0, 1, 1], None), ([0, 0], None), ([], None), ([0, 2], [3, 0])],
    ids=["no_row_has_both", "single_tokens", "only_empty", "no_rows", "no_pair"],
  )
  def test_empty_and_single(self, lengths, k_lengths, activation):
    problem = draw(11, lengths, k_lengths, padding=0 if sum(lengths) else 2, activation=activation)
    assert_equals_oracle(problem)
    if k_lengths is not None:
      o, found = with_gradients(problem)
      assert not any(np.any(np.asarray(a)) for a in (o, *found))

  def test_one_giant_row_among_tiny_ones(self):
    assert_equals_oracle(draw(12, [1, 900, 2, 1], causal=True, window=100), tolerance=2e-5)

  def test_no_keys_at_all(self):
    problem = draw(13, [3], [0], padding=0)
    assert problem.k.shape[0] == 0
    assert_equals_oracle(problem)


class TestConventions:
  """F04, F05: equal weights, and values that are their position."""

  def positions(self, num_q, num_k, **options):
    q, k = np.zeros((num_q, 1, 1), np.float32), np.zeros((num_k, 1, 1), np.float32)
    v = np.arange(num_k, dtype=np.float32).reshape(-1, 1, 1)
    return np.asarray(jagged.attention(q, k, v, offsets_of([num_q]), offsets_of([num_k]), **options)).ravel()

  def test_causal_counts_from_the_start_of_both_rows(self):
    np.testing.assert_allclose(self.positions(2, 5, causal=True), [0, 0.5])
    np.testing.assert_allclose(self.positions(5, 2, causal=True), [0, 0.5, 0.5, 0.5, 0.5])

  def test_a_window_is_inclusive(self):
    np.testing.assert_allclose(self.positions(70, 70, window=0), np.arange(70))
    everything = self.positions(70, 70)
    np.testing.assert_array_equal(self.positions(70, 70, window=69), everything)
    np.testing.assert_array_equal(np.flatnonzero(self.positions(70, 70, window=68) != everything), [0, 69])

  @pytest.mark.parametrize("window", [2**31 - 1, 2**40, np.int64(200)])
  def test_a_window_beyond_every_row_is_none(self, window):
    np.testing.assert_array_equal(self.positions(70, 70, window=window), self.positions(70, 70))

  def test_blocks_restart_with_each_row(self):
    problem = draw(21, [3, 130], block=64)
    alone = draw(21, [3, 130], block=64)
    alone.q, alone.k, alone.v = (a[3:] for a in (problem.q, problem.k, problem.v))
    alone.q_offsets = offsets_of([130])
    np.testing.assert_allclose(problem.call(*problem.arrays)[3:], alone.call(*alone.arrays), atol=1e-6)

  def test_the_default_scale_is_that_of_softmax_alone(self):
    for activation, scale in (("softmax", 0.25), ("silu", 1.0)):
      plain, scaled = (draw(22, [40], activation=activation, **o) for o in ({}, dict(pre_scale=scale)))
      np.testing.assert_array_equal(plain.call(*plain.arrays), scaled.call(*scaled.arrays))


class TestLeaks:
  def test_padding_is_never_read(self):
    problem = draw(31, [5, 128, 60], padding=70, activation="silu")
    clean = problem.call(*problem.arrays)
    last = problem.q_offsets[-1]
    for array in (problem.q, problem.k, problem.v, problem.d_o):
      array[last:] = np.nan
    np.testing.assert_array_equal(problem.call(*problem.arrays), clean)
    for d in with_gradients(problem)[1]:
      assert np.isfinite(np.asarray(d)).all()
      assert not np.any(np.asarray(d)[last:])

  @pytest.mark.parametrize("activation", ["softmax", "relu_square"])
  @pytest.mark.parametrize("value", [np.nan, np.inf])
  def test_a_row_that_is_not_finite_spoils_no_other(self, activation, value):
    problem = draw(32, [5, 7, 130], activation=activation)
    clean = np.asarray(problem.call(*problem.arrays))
    for array in (problem.q, problem.k, problem.v):
      array[8] = value
    spoilt = np.asarray(problem.call(*problem.arrays))
    others = np.r_[0:5, 12:142]
    np.testing.assert_array_equal(spoilt[others], clean[others])
    assert np.isnan(spoilt[8]).all()

  @pytest.mark.parametrize("activation", ["softmax", "silu"])
  def test_gradients_stay_in_the_row_and_in_the_past(self, activation):
    problem = draw(33, [40, 150], causal=True, activation=activation)
    one = np.zeros_like(problem.d_o)
    one[40 + 70] = 1
    problem.d_o = one
    d_q, d_k, d_v = (np.abs(np.asarray(d)).sum(axis=(1, 2)) for d in with_gradients(problem)[1])
    np.testing.assert_array_equal(np.flatnonzero(d_q), [110])
    for d in (d_k, d_v):
      np.testing.assert_array_equal(np.flatnonzero(d), np.arange(40, 111))

  def test_a_target_is_seen_by_itself_alone(self):
    problem = draw(34, [30], causal=True, num_targets=np.array([4], np.int32), activation="silu")
    for target in range(26, 30):
      one = np.zeros_like(problem.d_o)
      one[target] = 1
      _, pull = jax.vjp(problem.call, *problem.arrays)
      d_v = np.abs(np.asarray(pull(jnp.asarray(one))[2])).sum(axis=(1, 2))
      np.testing.assert_array_equal(np.flatnonzero(d_v), [*range(26), target])

  def test_the_time_bias_sees_one_event_ahead_and_no_further(self):
    """F10: output t may know when it is asked for, which is when event t + 1 happens, and nothing later."""
    problem = draw(35, [20], causal=True, activation="silu", longest=20)
    clean = np.asarray(problem.call(*problem.arrays))
    problem.tables.timestamps[10:20] += 5000
    moved = np.asarray(problem.call(*problem.arrays))
    np.testing.assert_array_equal(moved[:9], clean[:9])
    assert np.any(moved[9] != clean[9])

  def test_a_row_longer_than_the_table_is_not_a_number(self):
    problem = draw(36, [20, 22], causal=True, longest=20)
    o = np.asarray(problem.call(*problem.arrays))
    assert np.isfinite(o[:40]).all()
    assert np.isnan(o[40:42]).all()


class TestInvariance:
  @pytest.mark.parametrize("options", [{}, dict(activation="silu", causal=True)])
  def test_order_of_rows(self, options):
    lengths, order = [5, 130, 0, 64], [3, 1, 0, 2]
    problem = draw(41, lengths, padding=0, **options)
    rows = np.split(np.arange(sum(lengths)), problem.q_offsets[1:-1])
    tokens = np.concatenate([rows[b] for b in order])
    moved = dataclasses.replace(problem, q_offsets=offsets_of([lengths[b] for b in order]))
    moved.q, moved.k, moved.v = (a[tokens] for a in (problem.q, problem.k, problem.v))
    np.testing.assert_allclose(moved.call(*moved.arrays), np.asarray(problem.call(*problem.arrays))[tokens], atol=1e-5)

  def test_more_padding(self):
    problem, longer = draw(42, [5, 130], padding=0), draw(42, [5, 130], padding=0)
    for name in ("q", "k", "v"):
      setattr(longer, name, np.pad(getattr(problem, name), ((0, 200), (0, 0), (0, 0)), constant_values=np.inf))
    np.testing.assert_allclose(longer.call(*longer.arrays)[:135], problem.call(*problem.arrays), atol=1e-6)


class TestTransformations:
  problem = draw(51, [5, 130, 0, 64], causal=True, activation="silu", longest=130)

  def test_jit_with_traced_offsets(self):
    p = self.problem
    bias = jagged.RelativeBias(p.tables.position, p.tables.time, p.tables.timestamps)
    call = jax.jit(lambda q, k, v, offsets, bias: jagged.attention(q, k, v, offsets, bias=bias, **p.options))
    np.testing.assert_allclose(call(p.q, p.k, p.v, p.q_offsets, bias), p.expected[0], atol=1e-4)

  def test_checkpoint_gives_the_same_gradients(self):
    loss = lambda call: lambda *arrays: jnp.sum(call(*arrays) * self.problem.d_o)
    plain, remat = (
      jax.jit(jax.grad(loss(call), argnums=(0, 1, 2, 3, 4)))(*self.problem.arrays)
      for call in (self.problem.call, jax.checkpoint(self.problem.call))
    )
    for a, b in zip(plain, remat, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)

  def test_vmap_equals_a_loop(self):
    problem = draw(52, [5, 60])
    many = jnp.stack([jnp.asarray(problem.q), -jnp.asarray(problem.q)])
    found = jax.vmap(lambda q: problem.call(q, problem.k, problem.v))(many)
    for q, o in zip(many, found, strict=True):
      np.testing.assert_allclose(o, problem.call(q, problem.k, problem.v), atol=1e-6)

  def test_the_same_bits_twice(self):
    first, again = (with_gradients(self.problem) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)

  def test_angles_are_constants(self):
    p = draw(40, [3, 2], turn="values")
    call = lambda a_TP: jnp.sum(
      jagged.attention(p.q, p.k, p.v, p.q_offsets, rotary=jagged.Rotary(jnp.cos(a_TP), jnp.sin(a_TP)))
    )
    assert not np.any(jax.grad(call)(jnp.asarray(p.angles, jnp.float32)))

  def test_forward_mode_is_refused(self):
    with pytest.raises(TypeError, match="custom_vjp"):
      jax.jvp(self.problem.call, self.problem.arrays, self.problem.arrays)


class TestRefusals:
  q = np.zeros((6, 4, 8), np.float32)
  offsets = offsets_of([2, 4])

  def refused(self, said, error=ValueError, **changes):
    arguments = dict(q_THK=self.q, k_SGK=self.q, v_SGK=self.q, q_offsets=self.offsets) | changes
    with pytest.raises(error, match=re.escape(said)):
      jagged.attention(**arguments)

  def test_arrays(self):
    self.refused("q_THK must be floating [T, H, K], got int32(6, 4, 8)", q_THK=self.q.astype(np.int32))
    self.refused("q_THK must be floating [T, H, K], got float32(6, 32)", q_THK=self.q.reshape(6, 32))
    self.refused("k_SGK is float16 and q_THK is float32", TypeError, k_SGK=self.q.astype(np.float16))
    self.refused("v_SGK must be [S, G, K] with the K=8 of q_THK, got shape (6, 4, 7)", v_SGK=self.q[:, :, :7])
    self.refused("v_SGK has shape (5, 4, 8) and k_SGK has (6, 4, 8)", v_SGK=self.q[:5])
    few = self.q[:, :3]
    self.refused("H=4 query heads must be a positive multiple of the G=3 key heads", k_SGK=few, v_SGK=few)

  def test_offsets(self):
    self.refused("q_offsets[0] = 3 must be 0", q_offsets=np.array([3, 4], np.int32))
    self.refused("q_offsets[2] = 2 is below q_offsets[1] = 3", q_offsets=np.array([0, 3, 2, 5], np.int32))
    self.refused("q_offsets[1] = 7 points past the T = 6 tokens", q_offsets=np.array([0, 7], np.int32))
    self.refused("k_offsets[2] = 7 points past", k_offsets=np.array([0, 7, 7], np.int32))
    self.refused("q_offsets must be int32, got int64", TypeError, q_offsets=self.offsets.astype(np.int64))
    self.refused("q_offsets have 2 rows and k_offsets 1", k_offsets=offsets_of([3]))
    self.refused("(as those of the keys)[2] = 6 points past the T = 5 tokens", k_SGK=self.q[:5], v_SGK=self.q[:5])
    self.refused("q_offsets=None is for broadcast_q=True", q_offsets=None)
    self.refused("broadcast_q=True takes q_offsets=None", broadcast_q=True)
    self.refused("broadcast_q=True takes q_offsets=None, and k_offsets", broadcast_q=True, q_offsets=None)

  def test_options(self):
    self.refused("activation='swish' must be one of softmax, raw, gelu, ", activation="swish")
    self.refused("activation has 2 names, one for each of the H=4 heads is needed", activation=("silu", "relu"))
    self.refused("activation mixes softmax with silu", activation=("silu", "softmax", "silu", "silu"))
    self.refused("window=-1 must be an integer from 0 on, or None", window=-1)
    self.refused("window=1.5 must be an integer", window=1.5)
    self.refused("window=True must be an integer", window=True)
    self.refused("block=0 must be an integer from 1 on", block=0)
    self.refused("pre_scale must be a Python number", TypeError, pre_scale=jnp.float32(1))
    self.refused("post_scale=nan must be finite", post_scale=float("nan"))
    self.refused(
      "q_THK(6, 4, 0) has heads of no width", **{name: self.q[:, :, :0] for name in ("q_THK", "k_SGK", "v_SGK")}
    )

  def test_rotary(self):
    a_TP = np.ones((6, 4), np.float32)
    rotary = lambda cos_TP, sin_TP=a_TP: jagged.Rotary(cos_TP, sin_TP)
    self.refused("rotary.cos_TP must be float32[6, 4], an angle for each token and pair", rotary=rotary(a_TP[:5]))
    self.refused("rotary.sin_TP must be float32[6, 4]", rotary=rotary(a_TP, a_TP.astype(np.float16)))
    self.refused("rotary is for queries and keys that are the same", rotary=rotary(a_TP), k_offsets=self.offsets)
    self.refused(
      "q and k of the same tokens, and q has 6, k 8 of them",
      rotary=rotary(a_TP),
      k_SGK=np.zeros((8, 4, 8), np.float32),
      v_SGK=np.zeros((8, 4, 8), np.float32),
    )
    odd = np.ones((6, 4, 7), np.float32)
    odd = dict(q_THK=odd, k_SGK=odd, v_SGK=odd)
    self.refused("rotary turns pairs of features, and the heads have K=7", rotary=rotary(a_TP), **odd)

  def test_targets_and_bias(self):
    self.refused("num_targets must be int32[2], one for each row, got int32(3,)", num_targets=np.zeros(3, np.int32))
    self.refused(
      "num_targets is for queries and keys that are the same tokens", num_targets=np.zeros(2, np.int32),
      k_offsets=self.offsets,
    )  # fmt: skip
    for values, said in (
      ([-3, 0], "num_targets[0] = -3 must lie in 0..2"),
      ([0, 5], "num_targets[1] = 5 must lie in 0..4"),
    ):
      self.refused(said, num_targets=np.array(values, np.int32))
    bias = lambda position=9, time=129, timestamps=6: jagged.RelativeBias(
      jnp.zeros(position), jnp.zeros(time), jnp.zeros(timestamps, jnp.int32)
    )
    self.refused("bias.position must be float32[2 N - 1], got float32(8,)", bias=bias(position=8))
    self.refused("bias.time must be float32[129], got float32(128,)", bias=bias(time=128))
    self.refused("bias.timestamps must be int32[6], one for each token, got int32(5,)", bias=bias(timestamps=5))
    self.refused("bias is for queries and keys that are the same tokens", bias=bias(), k_offsets=self.offsets)

  def test_times_that_32_bits_do_not_hold_are_refused_not_cut(self):
    times = np.full(6, 1_700_000_000_000)
    bias = jagged.RelativeBias(np.zeros(9, np.float32), np.zeros(129, np.float32), times)
    self.refused("bias.timestamps must be int32[6], one for each token, got int64(6,); subtract the first", bias=bias)

  def test_other_kinds_of_things(self):
    a_TP, table = np.ones((6, 4), np.float32), np.zeros(9, np.float32)
    self.refused("rotary must be a jagged.Rotary or None, got tuple", TypeError, rotary=(a_TP, a_TP))
    self.refused("rotary.cos_TP must be an array, got list", TypeError, rotary=jagged.Rotary(a_TP.tolist(), a_TP))
    self.refused("rotary.values=1 must be True or False", TypeError, rotary=jagged.Rotary(a_TP, a_TP, 1))
    self.refused("bias must be a jagged.RelativeBias or None, got tuple", TypeError, bias=(table, table))
    self.refused("bias.time must be an array, got NoneType", TypeError, bias=jagged.RelativeBias(table, None, table))
    self.refused("schedule must be a jagged.Schedule or None, got int", TypeError, schedule=3)
    self.refused("must be a name, or one for each head", TypeError, activation=jax.nn.silu)

  def test_an_implementation_that_cannot_serve(self):
    self.refused('implementation="hopper" cannot serve this call', NotImplementedError, implementation="hopper")


def test_buckets_of_time_are_those_of_the_formula():
  rng = np.random.default_rng(61)
  distances = np.unique(np.r_[0:2000, rng.integers(0, 2**31 - 1, 3000), 2**31 - 1])
  bias = jagged.RelativeBias(jnp.zeros(1), jnp.zeros(129), jnp.zeros(1, jnp.int32))
  zero, times = jnp.zeros(1, jnp.int32), jnp.asarray(distances, jnp.int32)
  _, bucket = bias.places(zero, jnp.zeros(len(times), jnp.int32), zero, times)
  expected = np.minimum(128, np.floor(np.log(np.maximum(1, distances.astype(np.float64))) / 0.301))
  np.testing.assert_array_equal(bucket[0], expected)


def test_the_oracles_gradients_are_differences():
  problem = draw(62, [3, 2], width=2, longest=3, activation="silu", causal=True, post_scale=0.5)
  arrays = [a.astype(np.float64) for a in problem.arrays]

  def loss(arrays):
    tables = oracle.Bias(*arrays[3:], problem.tables.timestamps)
    options = dict(activation="silu", causal=True, post=0.5, bias=tables)
    o, _ = oracle.attention(*arrays[:3], problem.q_offsets, problem.q_offsets, **options)
    return np.sum(o * problem.d_o)

  for n, expected in enumerate(problem.expected[1]):
    for place in np.ndindex(arrays[n].shape):
      moved = [[a.copy() for a in arrays] for _ in range(2)]
      moved[0][n][place] += 1e-5
      moved[1][n][place] -= 1e-5
      assert (loss(moved[0]) - loss(moved[1])) / 2e-5 == pytest.approx(expected[place], abs=1e-6)
