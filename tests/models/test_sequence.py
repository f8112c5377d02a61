"""Window attention, the personalised feed-forward block, seed pooling and rotary times, against loops over rows."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packed_rows import (
  assert_agrees,
  assert_close,
  by_row,
  dot_flops,
  jit,
  merge,
  offsets_of,
  parameters,
  project,
  rms,
  silu,
  softmax_attention,
  tokens_of,
)

from sparse_lm.models.seed_pooling import SeedPooling, SumKron
from sparse_lm.models.sequence import PersonalisedFfn, TimeRotary, WindowAttention
from sparse_lm.precision.recipes import RECIPES

D, HEADS = 8, 2
FP32, BF16 = RECIPES["fp32"], RECIPES["bf16"]
SHORT = [0, 5, 1, 0, 9, 0]
ROTARY = TimeRotary(head_width=D // HEADS, t_scale=60.0)


@functools.cache
def attention_of(recipe=FP32, **options):
  return jit(lambda: WindowAttention(D, HEADS, recipe, rngs=nnx.Rngs(0), **options))()


@functools.cache
def ffn_of(recipe=FP32, **options):
  sizes = dict(summary_tokens=3, neurons=5, tau=2.0)
  return jit(lambda: PersonalisedFfn(D, HEADS, recipe, **sizes, **options, rngs=nnx.Rngs(0)))()


@functools.cache
def pooling_of(recipe=FP32):
  sizes = dict(seeds=4, tokens=2, terms=3, width_out=6)
  return jit(lambda: SeedPooling(D, HEADS, recipe, **sizes, rngs=nnx.Rngs(0)))()


def sees_within(window=None, block=None):
  return lambda i, j: (window is None or abs(i - j) <= window) and (block is None or i // block == j // block)


def window_attention(xp, p, s, sees, turn=lambda x: x):
  """Of one row."""
  p, x = p["heads"], rms(xp, s)
  q, k = (turn(rms(xp, project(xp, x, p[name]))) for name in ("w_query_HKD", "w_key_HKD"))
  return s + merge(xp, softmax_attention(xp, q, k, project(xp, x, p["w_value_HKD"]), sees), p["w_out_HKD"])


def personalised_ffn(xp, p, s, x_sum, tau=2.0):
  """Of one row, neuron by neuron."""
  heads = []
  for h in range(HEADS):
    q = s[:, h * D // HEADS : (h + 1) * D // HEADS]
    k, v = (p[f"mix_{n}_HFM"][h] @ (x_sum @ p[f"w_{n}_HKE"][h].T) for n in ("key", "value"))
    heads.append(sum(silu(xp, q @ k[f][:, None] / tau) * v[f][None, :] for f in range(len(k))))
  return s + xp.concatenate(heads, axis=1)


def pma(xp, p, s):
  """Of one row: [1, S, D]."""
  heads = p["heads"]
  q = project(xp, rms(xp, p["seeds_SD"]), heads["w_query_HKD"])
  k, v = (project(xp, s, heads[name]) for name in ("w_key_HKD", "w_value_HKD"))
  return merge(xp, softmax_attention(xp, q, k, v), heads["w_out_HKD"])[None]


def sum_kron(p, x):
  """Of one row."""
  return sum(a @ x @ w.T for a, w in zip(p["mix_RNS"], p["w_RED"]))


def turned_by(xp, angles):
  """Of [L, H, K] by [L, K / 2]."""

  def turn(x):
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return xp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)

  return turn


def split_angles(position, dt):
  """By the docstring, K = 4: one pair turns by position, one by time."""
  return np.stack([position, np.log(1 + dt / 60.0)], axis=1)


def test_window_attention_turned_by_position_and_time_equals_a_loop_over_rows():
  offsets = jnp.asarray(offsets_of(SHORT))
  dt = (1e4 * np.abs(tokens_of(SHORT, seed=1))).astype(np.float32)
  rotary = jit(ROTARY)(dt, offsets)

  def of_row(xp, p, s, dt):
    turn = turned_by(xp, split_angles(np.arange(len(s)), dt))
    return window_attention(xp, p, s, sees_within(3), turn)

  oracle = lambda xp, p, s: by_row(xp, lambda *row: of_row(xp, p, *row), SHORT, s, np.asarray(dt, np.float64))
  assert_agrees(attention_of(window=3), lambda module, s: module(s, offsets, rotary), oracle, tokens_of(SHORT, D))


def test_attention_inside_blocks_of_64_equals_a_loop_over_rows_that_end_around_one():
  lengths = [64, 0, 63, 1, 65]
  offsets = jnp.asarray(offsets_of(lengths))
  oracle = lambda xp, p, s: by_row(xp, lambda row: window_attention(xp, p, row, sees_within(block=64)), lengths, s)
  assert_agrees(attention_of(block=64), lambda module, s: module(s, offsets), oracle, tokens_of(lengths, D))


def test_personalised_ffn_equals_a_loop_over_rows_and_neurons():
  offsets = jnp.asarray(offsets_of(SHORT))
  x_sum = np.random.default_rng(2).normal(size=(len(SHORT), 3, D)).astype(np.float32)

  def oracle(xp, p, s, x_sum):
    rows = iter(range(len(SHORT)))
    return by_row(xp, lambda row: personalised_ffn(xp, p, row, x_sum[next(rows)]), SHORT, s)

  call = lambda module, s, x_sum: module(s, x_sum, offsets)
  assert_agrees(ffn_of(activation="silu"), call, oracle, tokens_of(SHORT, D), x_sum)


def test_seed_pooling_equals_a_loop_over_rows_and_terms_and_an_empty_row_gives_zeros():
  offsets = jnp.asarray(offsets_of(SHORT))

  def oracle(xp, p, s):
    return by_row(xp, lambda row: sum_kron(p["compress"], pma(xp, p["pool"], row)[0])[None], SHORT, s)

  call = lambda module, s: module(s, offsets)
  assert_agrees(pooling_of(), call, oracle, tokens_of(SHORT, D))
  assert not np.any(jit(call)(pooling_of(), tokens_of(SHORT, D))[np.array(SHORT) == 0])


def test_sum_kron_of_as_many_terms_as_one_whole_matrix_needs_is_that_matrix():
  """Terms of one pair of tokens each: A_r picks them, W_r is their block of the matrix."""
  module = jit(lambda: SumKron(3, 2, 4, 5, FP32, terms=6, rngs=nnx.Rngs(0)))()
  whole = np.random.default_rng(0).normal(size=(2, 5, 3, 4)).astype(np.float32)
  pairs = list(itertools.product(range(2), range(3)))
  mix = np.zeros((6, 2, 3), np.float32)
  for r, (n, s) in enumerate(pairs):
    mix[r, n, s] = 1
  module.mix_RNS[...] = jnp.asarray(mix)
  module.w_RED[...] = jnp.asarray(np.stack([whole[n, :, s] for n, s in pairs]))
  x = np.random.default_rng(1).normal(size=(7, 3, 4)).astype(np.float32)
  assert_close(module(x), np.einsum("nesd,bsd->bne", whole, x))


CALLS = {  # a packed output, or one of rows
  "window": (lambda: attention_of(window=2), lambda m, s, x, o: m(s, o, ROTARY(jnp.abs(s[:, 0]), o)), True),
  "personalised_ffn": (ffn_of, lambda m, s, x, o: m(s, x, o), True),
  "seed_pooling": (pooling_of, lambda m, s, x, o: m(s, o), False),
}
each = pytest.mark.parametrize(("make", "call", "packed"), CALLS.values(), ids=CALLS)


@each
def test_a_row_is_the_same_alone_and_beside_rows_of_nan(make, call, packed):
  lengths, offsets = [4, 7, 2], offsets_of([4, 7, 2])
  module, call = make(), jit(call)
  s, x = tokens_of(lengths, D), np.random.default_rng(3).normal(size=(3, 3, D)).astype(np.float32)
  together = call(module, s, x, jnp.asarray(offsets))
  alone = call(module, s[4:11], x[1:2], jnp.array([0, 7], jnp.int32))
  of_row = lambda out: out[4:11] if packed else out[1:2]
  assert_close(of_row(together), alone)
  s[:4], s[11:], x[0], x[2] = np.nan, np.nan, np.nan, np.nan
  np.testing.assert_array_equal(of_row(call(module, s, x, jnp.asarray(offsets))), of_row(together))


@each
@pytest.mark.parametrize(("lengths", "padding"), [([], 0), ([0, 0], 3), ([1], 0)], ids=str)
def test_no_rows_no_tokens_and_one_token_serve(make, call, packed, lengths, padding):
  s, x = tokens_of(lengths, D)[: sum(lengths) + padding], np.ones((len(lengths), 3, D), np.float32)
  out = jit(call)(make(), s, x, jnp.asarray(offsets_of(lengths)))
  assert len(out) == (len(s) if packed else len(lengths))
  assert np.isfinite(out).all()


@pytest.mark.parametrize("make", [lambda r: attention_of(r, window=2), ffn_of, pooling_of])
def test_bf16_computes_in_bf16_within_its_precision(make):
  s, x, offsets = tokens_of(SHORT, D), np.ones((len(SHORT), 3, D), np.float32), jnp.asarray(offsets_of(SHORT))
  call = lambda m, *arrays: m(*arrays[: 2 if isinstance(m, PersonalisedFfn) else 1], offsets)
  in_both = lambda exact, rounded: (call(exact, s, x), call(rounded, *(a.astype(jnp.bfloat16) for a in (s, x))))
  exact, rounded = jit(in_both)(make(FP32), make(BF16))
  assert rounded.dtype == jnp.bfloat16
  assert np.linalg.norm(np.asarray(rounded, np.float32) - exact) < 0.03 * np.linalg.norm(exact)


def test_a_schedule_made_once_fits_the_calls_that_its_module_makes():
  """Any other is refused."""
  s, x, offsets = tokens_of(SHORT, D), np.ones((len(SHORT), 3, D), np.float32), jnp.asarray(offsets_of(SHORT))
  scheduled = lambda module, by, *arrays: jax.eval_shape(
    lambda: module(*arrays, offsets, schedule=by.make_schedule(offsets, len(s)))
  )
  attention, ffn, pool = attention_of(window=2), ffn_of(), pooling_of().pool
  for module, arrays in ((attention, (s,)), (ffn, (s, x)), (pool, (s,))):
    assert scheduled(module, module, *arrays).dtype == s.dtype
    with pytest.raises(ValueError, match="make one with its mask and tokens"):
      scheduled(module, attention_of(block=64), *arrays)


@pytest.mark.parametrize("mask", [{"window": 2}, {"block": 4}, {"window": 1, "block": 4}, {}], ids=str)
def test_flops_of_attention_are_those_of_projections_and_visible_pairs(mask):
  lengths, module, sees = [0, 9, 1, 3, 8], attention_of(**mask), sees_within(**mask)
  pairs = sum(sees(i, j) for n in lengths for i in range(n) for j in range(n))
  expected = dot_flops(module, jnp.zeros((sum(lengths), D)), jnp.asarray(offsets_of(lengths))) + 4 * D * pairs
  assert module.flops(lengths) == expected


def test_flops_of_feedforward_and_pooling_are_those_of_projections_and_visible_pairs():
  s, x, offsets = jnp.zeros((sum(SHORT), D)), jnp.zeros((len(SHORT), 3, D)), jnp.asarray(offsets_of(SHORT))
  assert ffn_of().flops(SHORT) == dot_flops(ffn_of(), s, x, offsets) + 4 * D * sum(SHORT) * 5
  assert pooling_of().flops(SHORT) == dot_flops(pooling_of(), s, offsets) + 4 * D * sum(SHORT) * 4


@pytest.mark.parametrize("mode", ["split", "sum"])
def test_angles_are_position_and_log_time_at_geometric_frequencies(mode):
  rotary = TimeRotary(head_width=8, t_scale=10.0, mode=mode, position_base=100.0, time_base=16.0)
  dt = np.array([500.0, 3.0, 0.0, -7.0, np.nan], np.float32)
  found = jit(rotary)(dt, jnp.array([0, 1, 1, 4], jnp.int32))
  position, time = np.array([0, 0, 1, 2.0]), np.log(1 + np.array([500, 3, 0, 0]) / 10)
  if mode == "split":
    angles = np.stack([position, position / 10, time, time / 4], axis=1)
  else:
    angles = np.stack([position * 100 ** (-p / 4) + time * 16 ** (-p / 4) for p in range(4)], axis=1)
  np.testing.assert_allclose(found.cos_TP[:4], np.cos(angles), atol=1e-5)
  np.testing.assert_allclose(found.sin_TP[:4], np.sin(angles), atol=1e-5)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"head_width": 6}, "head_width=6 must be a multiple of 4 for mode='split'"),
    ({"head_width": 3, "mode": "sum"}, "head_width=3 must be a multiple of 2 for mode='sum'"),
    ({"t_scale": 0.0}, "t_scale=0.0 must be positive"),
    ({"mode": "both"}, "mode='both' must be 'split' or 'sum'"),
  ],
)
def test_rotary_times_refuse_what_they_cannot_do(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(ROTARY, **changes)


def test_a_softmax_is_no_activation_of_a_feedforward_block():
  with pytest.raises(ValueError, match="activation='softmax' must be one of raw, gelu"):
    ffn_of(activation="softmax")


def test_heads_share_the_width_evenly():
  with pytest.raises(ValueError, match="num_heads=3 must divide width=8"):
    WindowAttention(8, 3, FP32, rngs=nnx.Rngs(0))


def test_every_weight_is_float32_and_keeps_the_variance_of_its_input():
  module = jit(lambda: SeedPooling(64, 4, BF16, seeds=96, tokens=48, terms=4, rngs=nnx.Rngs(0)))()
  fan_in = {"seeds_SD": 1, "mix_RNS": 96, "w_RED": 256}
  for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(module)))[0]:
    assert leaf.dtype == jnp.float32
    assert abs(np.std(leaf) * fan_in.get(path[-1].key, 64) ** 0.5 - 1) < 0.05, path


def test_parameters_are_found_by_name():
  assert set(parameters(ffn_of())) == {"w_key_HKE", "w_value_HKE", "mix_key_HFM", "mix_value_HFM"}
