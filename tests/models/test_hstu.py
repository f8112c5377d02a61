"""HSTU and SASRec blocks against loops over rows, and what holds for both: causality, rows apart, dropout."""

import functools
import math

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
  layer,
  merge,
  offsets_of,
  project,
  silu,
  softmax_attention,
  tokens_of,
)

from sparse_lm.models.hstu import HstuBlock
from sparse_lm.models.sasrec import SasrecBlock
from sparse_lm.precision.recipes import RECIPES

D, HEADS, K, LONGEST = 6, 2, 5, 12  # heads of odd width, together wider than the tokens
FP32, BF16 = RECIPES["fp32"], RECIPES["bf16"]
LENGTHS = [0, 5, 1, 0, 9]


@functools.cache
def hstu_of(recipe=FP32, dropout=0.0):
  """With tables so large that a wrong place in them shows."""
  sizes = dict(max_length=LONGEST, dropout=dropout)
  module = jit(lambda: HstuBlock(D, HEADS, K, recipe, **sizes, rngs=nnx.Rngs(0)))()
  return jax.tree.map(lambda w: 20 * w, module)


@functools.cache
def sasrec_of(recipe=FP32, dropout=0.0):
  return jit(lambda: SasrecBlock(D, HEADS, recipe, neurons=7, dropout=dropout, rngs=nnx.Rngs(0)))()


def times_of(lengths):
  """Seconds to years between events; those of padding mean nothing."""
  gaps = np.exp(np.random.default_rng(4).uniform(0, 17, size=sum(lengths) + 3))
  return np.cumsum(gaps).astype(np.int32)


def call_hstu(module, x, offsets, **options):
  return module(x, offsets, jnp.asarray(times_of([len(x) - 3])), **options)


def call_sasrec(module, x, offsets, **options):
  return module(x, offsets, **options)


BLOCKS = {"hstu": (hstu_of, call_hstu), "sasrec": (sasrec_of, call_sasrec)}
each = pytest.mark.parametrize(("make", "call"), BLOCKS.values(), ids=BLOCKS)


def hstu(xp, p, x, times):
  """Of one row."""
  length, times = len(x), times.astype(int)
  u, v, q, k = (
    silu(xp, project(xp, layer(xp, x, 1e-6), p[f"w_{name}_HKD"])) for name in ("gate", "value", "query", "key")
  )
  place, bucket, seen = np.zeros((3, length, length), int)
  for i in range(length):
    for j in range(i + 1):
      distance = abs(times[min(i + 1, length - 1)] - times[j])
      place[i, j], bucket[i, j] = j - i + LONGEST - 1, min(128, math.floor(math.log(max(1, distance)) / 0.301))
      seen[i, j] = 1
  rab = p["position_P"][place] + p["time_C"][bucket]
  a = silu(xp, xp.einsum("ihk,jhk->hij", q, k) + rab[None]) / LONGEST * seen[None]
  o = layer(xp, xp.einsum("hij,jhk->ihk", a, v).reshape(length, HEADS * K), 1e-6).reshape(length, HEADS, K)
  return x + merge(xp, o * u, p["w_out_HKD"])


def sasrec(xp, p, x):
  """Of one row."""
  heads = p["heads"]
  q, k, v = (project(xp, layer(xp, x), heads[f"w_{name}_HKD"]) for name in ("query", "key", "value"))
  x = x + merge(xp, softmax_attention(xp, q, k, v, lambda i, j: j <= i), heads["w_out_HKD"])
  up, down = p["pointwise"]["layers"].values()
  h = layer(xp, x) @ up["w_FD"].T + up["b_F"][None]
  return x + (h * (h > 0)) @ down["w_FD"].T + down["b_F"][None]


def test_hstu_equals_a_loop_over_rows():
  offsets, times = jnp.asarray(offsets_of(LENGTHS)), times_of(LENGTHS)
  oracle = lambda xp, p, x: by_row(xp, lambda row, t: hstu(xp, p, row, t), LENGTHS, x, times)
  call = lambda module, x: module(x, offsets, jnp.asarray(times))
  assert_agrees(hstu_of(), call, oracle, tokens_of(LENGTHS, D))


def test_sasrec_equals_a_loop_over_rows():
  offsets = jnp.asarray(offsets_of(LENGTHS))
  oracle = lambda xp, p, x: by_row(xp, lambda row: sasrec(xp, p, row), LENGTHS, x)
  assert_agrees(sasrec_of(), lambda module, x: module(x, offsets), oracle, tokens_of(LENGTHS, D))


@each
def test_no_later_token_and_no_other_row_influences_an_output(make, call):
  """By gradient: exactly zero for each of those, and not for earlier tokens of the row."""
  lengths, module = [3, 4], make()
  x, offsets = np.nan_to_num(tokens_of(lengths, D)), jnp.asarray(offsets_of(lengths))
  weights = jnp.arange(1.0, D + 1)[None]
  sums = lambda x: jnp.sum(call(module, x, offsets) * weights, axis=1)
  influence = np.abs(jit(jax.jacrev(sums))(x)).sum(2) > 0
  expected = np.zeros((10, 10), bool)
  for start, end in ((0, 3), (3, 7)):
    expected[start:end, start:end] = np.tri(end - start, dtype=bool)
  np.testing.assert_array_equal(influence[:7], expected[:7])
  assert not influence[7:, :7].any()


@each
def test_a_row_is_the_same_alone_and_beside_rows_of_nan(make, call):
  lengths, module = [4, 7, 2], make()
  x, offsets, times = tokens_of(lengths, D), offsets_of(lengths), times_of(lengths)
  run = lambda x, offsets, times: jit(
    lambda x, offsets, times: module(x, offsets, *([times] if make is hstu_of else []))
  )(x, jnp.asarray(offsets), times)
  together = run(x, offsets, times)
  assert_close(together[4:11], run(x[4:11], np.array([0, 7], np.int32), times[4:11]))
  x[:4], x[11:] = np.nan, np.nan
  np.testing.assert_array_equal(run(x, offsets, times)[4:11], together[4:11])
  assert np.isfinite(together).all()


@each
@pytest.mark.parametrize("lengths", [[], [0, 0], [1]], ids=str)
def test_no_rows_no_tokens_and_one_token_serve(make, call, lengths):
  x = tokens_of(lengths, D)
  out = jit(call)(make(), x, jnp.asarray(offsets_of(lengths)))
  assert out.shape == x.shape
  assert np.isfinite(out).all()


def test_a_batch_of_no_tokens_at_all_serves():
  x, offsets, times = jnp.zeros((0, D)), jnp.array([0, 0], jnp.int32), jnp.zeros(0, jnp.int32)
  assert jit(hstu_of())(x, offsets, times).shape == x.shape
  assert jit(sasrec_of())(x, offsets).shape == x.shape


@each
def test_bf16_computes_in_bf16_within_its_precision(make, call):
  x, offsets = tokens_of(LENGTHS, D), jnp.asarray(offsets_of(LENGTHS))
  in_both = lambda exact, rounded: (call(exact, x, offsets), call(rounded, x.astype(jnp.bfloat16), offsets))
  exact, rounded = jit(in_both)(make(), make(BF16))
  assert rounded.dtype == jnp.bfloat16
  assert np.linalg.norm(np.asarray(rounded, np.float32) - exact) < 0.03 * np.linalg.norm(exact)


@each
def test_dropout_needs_a_key_and_the_same_key_drops_the_same(make, call):
  x, offsets = tokens_of(LENGTHS, D), jnp.asarray(offsets_of(LENGTHS))
  run = jit(lambda module, key: call(module, x, offsets, key=key))
  plain, a, again, b = (run(make(dropout=0.5), k and jax.random.key(k)) for k in (None, 1, 1, 2))
  np.testing.assert_array_equal(plain, run(make(), None))
  np.testing.assert_array_equal(a, again)
  assert not np.allclose(a, plain)
  assert not np.allclose(a, b)


@each
def test_a_schedule_made_once_fits_the_call(make, call):
  module, x, offsets = make(), tokens_of(LENGTHS, D), jnp.asarray(offsets_of(LENGTHS))
  assert (
    jax.eval_shape(lambda: call(module, x, offsets, schedule=module.make_schedule(offsets, len(x)))).shape == x.shape
  )


@each
def test_flops_are_those_of_projections_and_causal_pairs(make, call):
  module, tokens = make(), sum(LENGTHS)
  of_pair = 4 * HEADS * K if make is hstu_of else 4 * D
  pairs = sum(j <= i for n in LENGTHS for i in range(n) for j in range(n))
  x, offsets = jnp.zeros((tokens, D)), jnp.asarray(offsets_of(LENGTHS))
  expected = dot_flops(lambda x: call(module, x, offsets), x) + of_pair * pairs
  assert module.flops(LENGTHS) == expected


def test_a_row_longer_than_the_table_of_positions_is_nan_and_no_guess():
  x, offsets = np.ones((LONGEST + 1, D), np.float32), jnp.array([0, LONGEST + 1], jnp.int32)
  out = jit(hstu_of())(x, offsets, jnp.zeros(LONGEST + 1, jnp.int32))
  assert np.isnan(out[-1]).all()


def test_weights_of_hstu_are_drawn_as_in_the_public_code():
  make = lambda: HstuBlock(64, 4, 32, FP32, max_length=200, rngs=nnx.Rngs(0))
  for path, w in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(jit(make)())))[0]:
    std = (2 / (64 + 4 * 32)) ** 0.5 if path[-1].key == "w_out_HKD" else 0.02
    assert w.dtype == jnp.float32
    assert abs(np.std(w) / std - 1) < 0.2, path
