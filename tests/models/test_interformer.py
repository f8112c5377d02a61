"""The InterFormer layer against a loop over rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from packed_rows import (
  assert_agrees,
  assert_close,
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

from sparse_lm.models.interformer import InterFormerLayer
from sparse_lm.models.packed import prepend
from sparse_lm.models.seed_pooling import SumKron
from sparse_lm.precision.recipes import RECIPES

D, HEADS, N, CLS, SEEDS, RECENT = 8, 2, 5, 3, 2, 2
EVENTS = [1, 4, 0]  # fewer than are asked for, more, and none
LENGTHS = [CLS + n for n in EVENTS]
FP32 = RECIPES["fp32"]


@functools.cache
def layer_of():
  def make():
    rngs = nnx.Rngs(0)
    interaction = SumKron(N + CLS + SEEDS + RECENT, N - 1, D, D, FP32, terms=2, rngs=rngs)
    sizes = dict(tokens=N, cls_tokens=CLS, seeds=SEEDS, recent=RECENT)
    return InterFormerLayer(D, HEADS, FP32, interaction=interaction, **sizes, rngs=rngs)

  return jit(make)()


def interaction_tokens(seed=5):
  return np.random.default_rng(seed).normal(size=(len(LENGTHS), N, D)).astype(np.float32)


def gate(xp, p, z):
  affine = p["mlp"]["layers"][0]
  return z / (1 + xp.exp(-(z @ affine["w_FD"].T + affine["b_F"][None])))


def of_row(xp, p, x, s):
  """(X, S) of the next layer."""
  x_sum = gate(xp, p["token_summary"]["gate"], p["token_summary"]["mix_MN"] @ x)
  summary, sequence = p["sequence_summary"], p["attention"]["heads"]
  heads = summary["pool"]["heads"]
  q = project(xp, rms(xp, summary["pool"]["seeds_SD"]), heads["w_query_HKD"])
  k, v = (project(xp, s, heads[f"w_{name}_HKD"]) for name in ("key", "value"))
  pooled = merge(xp, softmax_attention(xp, q, k, v), heads["w_out_HKD"])
  events = s[CLS:]
  recent = xp.concatenate([np.zeros((RECENT, D)), events])[-RECENT:]
  s_sum = gate(xp, summary["gate"], xp.concatenate([s[:CLS], pooled, recent]))
  tokens = xp.concatenate([x, s_sum])
  kron = p["interaction"]
  x = sum(a @ tokens @ w.T for a, w in zip(kron["mix_RNS"], kron["w_RED"]))
  s = silu(xp, s @ (x_sum.T @ p["pffn"]["w_FM"].T))
  q, k = (rms(xp, project(xp, rms(xp, s), sequence[f"w_{name}_HKD"])) for name in ("query", "key"))
  v = project(xp, rms(xp, s), sequence["w_value_HKD"])
  return x, s + merge(xp, softmax_attention(xp, q, k, v), sequence["w_out_HKD"])


def oracle(xp, p, x, s):
  """Both outputs as one flat array, so that one comparison serves."""
  offsets = offsets_of(LENGTHS)
  rows = [of_row(xp, p, x[b], s[offsets[b] : offsets[b + 1]]) for b in range(len(LENGTHS))]
  return xp.concatenate([xp.stack([x for x, _ in rows]).reshape(-1), *(s.reshape(-1) for _, s in rows)])


def test_both_sides_and_their_gradients_equal_a_loop_over_rows():
  offsets = jnp.asarray(offsets_of(LENGTHS))

  def call(module, x, s):
    x, s = module(x, s, offsets)
    return jnp.concatenate([x.reshape(-1), s.reshape(-1)])

  assert_agrees(layer_of(), call, oracle, interaction_tokens(), tokens_of(LENGTHS, D))


def test_a_row_is_the_same_alone_and_beside_rows_of_nan():
  layer, x, s = jit(layer_of()), interaction_tokens(), tokens_of(LENGTHS, D)
  offsets = jnp.asarray(offsets_of(LENGTHS))
  x_next, s_next = layer(x, s, offsets)
  x_alone, s_alone = layer(x[1:2], s[4:11], jnp.array([0, 7], jnp.int32))
  assert_close(x_next[1:2], x_alone)
  assert_close(s_next[4:11], s_alone)
  x[[0, 2]], s[:4], s[11:] = np.nan, np.nan, np.nan
  x_again, s_again = layer(x, s, offsets)
  np.testing.assert_array_equal(x_again[1], x_next[1])
  np.testing.assert_array_equal(s_again[4:11], s_next[4:11])


def test_two_layers_let_each_side_change_the_other():
  """The first layer's summary of X stands before the events; by gradient, each input reaches each output."""
  layer, events = layer_of(), tokens_of(EVENTS, D)[: sum(EVENTS)]

  def sums(x, events):
    s, offsets = prepend(layer.token_summary(x), events, jnp.asarray(offsets_of(EVENTS)))
    x, s = layer(x, s, offsets)
    return jnp.sum(x**2, axis=(1, 2)), jnp.sum(s[: sum(LENGTHS)] ** 2)

  (x_by_x, x_by_events), (s_by_x, s_by_events) = jit(jax.jacrev(sums, (0, 1)))(interaction_tokens(), events)
  row_of_event = np.repeat(np.arange(3), EVENTS)
  for b in range(3):
    assert np.array_equal(np.abs(x_by_x[b]).sum((1, 2)) > 0, np.arange(3) == b)
    assert np.array_equal(np.abs(x_by_events[b]).sum(1) > 0, row_of_event == b)
  assert (np.abs(s_by_x).sum((1, 2)) > 0).all()
  assert (np.abs(s_by_events).sum(1) > 0).all()


def test_parts_are_found_by_name():
  names = {"token_summary", "sequence_summary", "interaction", "pffn", "attention"}
  assert set(parameters(layer_of())) == names
