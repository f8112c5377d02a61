"""Pruned and sorted neurons compute what the block did before; widths and the cost model on hand-made counts.

Weights and tokens are small integers: sums are exact in float32, so that no order of neurons changes a bit.

Dimension key: M tokens, D model width, F hidden neurons.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import twell

M, D = 40, 16
gated_or_not = pytest.mark.parametrize("gated", [True, False], ids=["gated", "non_gated"])


def draw(neurons, *, dead=(), gated=True, seed=0):
  """Tokens, and weights of a block (without a gate: None) of which some neurons never fire."""
  rng = np.random.default_rng(seed)
  x_MD = rng.integers(-2, 3, (M, D)).astype(np.float32)
  x_MD[:, 0], x_MD[0] = 8, 8 * np.eye(D)[1]  # all but the dead neurons fire for the first token
  w_gate_FD, w_up_FD, w_down_FD = (rng.integers(-2, 3, (neurons, D)).astype(np.float32) for _ in range(3))
  w_gate_FD[:, 0], w_gate_FD[:, 1] = -rng.integers(0, 3, neurons), 1
  w_gate_FD[list(dead), 0], w_gate_FD[list(dead), 1] = -100, 0
  return x_MD, *((w_gate_FD, w_up_FD, w_down_FD) if gated else (None, w_gate_FD, w_down_FD))


def block(x_MD, w_gate_FD, w_up_FD, w_down_FD, **options):
  """Output, and for how many tokens each neuron fires, which Stats do not say."""
  gate_FD = w_up_FD if w_gate_FD is None else w_gate_FD
  counts_F = np.sum(np.asarray(x_MD) @ np.asarray(gate_FD).T > 0, axis=0)
  if w_gate_FD is None:
    return twell.feedforward(x_MD, w_up_FD, w_down_FD, implementation="reference", **options)[0], counts_F
  return twell.gated_feedforward(x_MD, w_gate_FD, w_up_FD, w_down_FD, implementation="reference", **options)[
    0
  ], counts_F


def weights_of(neurons):
  return neurons.w_gate_FD, neurons.w_up_FD, neurons.w_down_FD


class TestPruneDead:
  @gated_or_not
  @pytest.mark.parametrize(
    ("neurons", "dead", "options", "width"),
    [
      (300, range(0, 200, 3), {}, 256),
      (300, [], {}, 384),
      (256, [], {}, 256),
      (256, [0, 255], {}, 256),
      (257, [128], {}, 256),
      (300, range(0, 200, 3), {"multiple": 1}, 233),
      (300, range(0, 200, 3), {"width": 512}, 512),
      (300, range(0, 200, 3), {"width": 233}, 233),
    ],
  )
  def test_the_block_computes_what_it_did(self, neurons, dead, options, width, gated):
    x_MD, *weights = draw(neurons, dead=dead, gated=gated)
    y_MD, counts_F = block(x_MD, *weights)
    assert np.flatnonzero(counts_F == 0).tolist() == list(dead)
    pruned = twell.prune_dead(*weights, counts_F, **options)
    assert pruned.w_up_FD.shape == (width, D)
    assert (pruned.w_gate_FD is None) == (not gated)
    assert pruned.hot == 0
    np.testing.assert_array_equal(block(x_MD, *weights_of(pruned))[0], y_MD)

  def test_live_neurons_keep_their_order_and_padding_is_zeros(self):
    _, *weights = draw(5)
    pruned = twell.prune_dead(*weights, np.asarray([3, 0, 1, 0, 7]), multiple=4)
    assert pruned.order.tolist() == [0, 2, 4, -1]
    for before_FD, after_FD in zip(weights, weights_of(pruned)):
      np.testing.assert_array_equal(after_FD, [before_FD[0], before_FD[2], before_FD[4], np.zeros(D)])
    assert pruned.take(np.asarray([3, 0, 1, 0, 7])).tolist() == [3, 1, 7, 0]

  def test_padding_never_fires(self):
    x_MD, *weights = draw(5)
    pruned = twell.prune_dead(*weights, np.ones(5), multiple=128)
    _, stats = twell.gated_feedforward(x_MD, *weights_of(pruned), with_active=True, implementation="reference")
    assert not stats.active[5:].any()

  def test_with_all_neurons_dead_one_block_is_left_that_gives_zeros(self):
    x_MD, *weights = draw(300, dead=range(300))
    pruned = twell.prune_dead(*weights, np.zeros(300, np.int32))
    assert pruned.w_down_FD.shape == (128, D)
    assert pruned.order.tolist() == [-1] * 128
    assert not block(x_MD, *weights_of(pruned))[0].any()

  @pytest.mark.parametrize("dtype", [bool, np.int32, np.uint8, np.float32])
  def test_it_is_enough_to_know_who_fired(self, dtype):
    _, *weights = draw(5)
    counts_F = jnp.asarray([1, 0, 1, 0, 1], dtype)
    assert twell.prune_dead(*weights, counts_F, multiple=1).order.tolist() == [0, 2, 4]

  def test_weights_keep_their_dtype(self):
    _, *weights = draw(5)
    pruned = twell.prune_dead(*(jnp.asarray(w, jnp.bfloat16) for w in weights), np.ones(5))
    assert [w.dtype for w in weights_of(pruned)] == [jnp.bfloat16] * 3

  def test_scanned_layers_share_the_width_of_the_widest(self):
    x_MD, *narrow = draw(300, dead=range(0, 300, 2))
    _, *wide = draw(300, dead=range(7, 40), seed=1)
    y_LMD, counts_LF = zip(*(block(x_MD, *layer) for layer in (narrow, wide)))
    assert [np.sum(counts_F > 0) for counts_F in counts_LF] == [150, 267]
    stacked = [np.stack(layers) for layers in zip(narrow, wide)]
    pruned = twell.prune_dead(*stacked, np.stack(counts_LF))
    assert pruned.w_up_FD.shape == (2, 384, D)
    assert pruned.order.shape == (2, 384)
    assert np.sum(pruned.order >= 0, axis=1).tolist() == [150, 267]
    assert np.sum(pruned.take(np.stack(counts_LF)) > 0, axis=1).tolist() == [150, 267]
    _, scanned_LMD = jax.lax.scan(lambda _, layer: (None, block_of(x_MD, layer)), None, weights_of(pruned))
    np.testing.assert_array_equal(scanned_LMD, y_LMD)

  def test_a_width_that_does_not_hold_the_live_neurons_is_refused(self):
    _, *weights = draw(300)
    counts_F = np.arange(300) < 150
    twell.prune_dead(*weights, counts_F, width=150)
    with pytest.raises(
      ValueError, match="prune_dead: width=149 must be at least 1 and hold the 150 neurons that fired"
    ):
      twell.prune_dead(*weights, counts_F, width=149)
    with pytest.raises(ValueError, match="width=0 must be at least 1 and hold the 0 neurons that fired"):
      twell.prune_dead(*weights, np.zeros(300), width=0)
    stacked = [np.stack([w, w]) for w in weights]
    with pytest.raises(ValueError, match="width=149 must be at least 1 and hold the 150 neurons that fired"):
      twell.prune_dead(*stacked, np.stack([counts_F, counts_F & False]), width=149)

  def test_a_multiple_of_nothing_is_refused(self):
    _, *weights = draw(5)
    with pytest.raises(ValueError, match="multiple=0 must be at least 1"):
      twell.prune_dead(*weights, np.ones(5), multiple=0)


def block_of(x_MD, layer):
  return twell.gated_feedforward(x_MD, *layer, implementation="reference")[0]


class TestSortNeurons:
  @gated_or_not
  def test_the_block_computes_what_it_did(self, gated):
    x_MD, *weights = draw(600, dead=[3, 4], gated=gated)
    y_MD, counts_F = block(x_MD, *weights)
    neurons = twell.sort_neurons(*weights, counts_F, M)
    assert neurons.hot == 512  # these neurons fire often
    assert sorted(neurons.order) == list(range(600))
    sorted_MD, sorted_counts_F = block(x_MD, *weights_of(neurons), hot=neurons.hot)
    np.testing.assert_array_equal(sorted_MD, y_MD)
    assert (np.diff(sorted_counts_F) <= 0).all()
    np.testing.assert_array_equal(neurons.take(counts_F), sorted_counts_F)

  def test_equal_counts_keep_their_order(self):
    _, *weights = draw(6)
    neurons = twell.sort_neurons(*weights, np.asarray([1, 5, 1, 5, 0, 1], np.uint8), 5)
    assert neurons.order.tolist() == [1, 3, 0, 2, 5, 4]
    assert neurons.order.dtype == np.int32

  def test_pruned_neurons_are_sorted_with_their_own_counts(self):
    x_MD, *weights = draw(300, dead=range(100))
    y_MD, counts_F = block(x_MD, *weights)
    pruned = twell.prune_dead(*weights, counts_F)
    neurons = twell.sort_neurons(*weights_of(pruned), pruned.take(counts_F), M)
    assert neurons.w_up_FD.shape == (256, D)
    np.testing.assert_array_equal(block(x_MD, *weights_of(neurons), hot=neurons.hot)[0], y_MD)

  @pytest.mark.parametrize(
    ("non_zeros", "hot"),
    [
      ([5, 3], 256),
      ([4.2, 4.1], 512),
      ([4.0, 3.9], 0),  # as fast either way
      ([9, 8, 7, 0], 768),
      ([0, 0], 0),
      ([3, 5], 256),  # sorted first
    ],
    ids=str,
  )
  def test_a_block_pays_that_takes_more_than_four_non_zeros(self, non_zeros, hot):
    """Counts of 2560 tokens: each non-zero a token is ten counts for each neuron of a block."""
    counts_F = np.repeat(np.round(np.asarray(non_zeros) * 10), 256)
    weights = np.zeros((len(counts_F), D), np.float32)
    assert twell.sort_neurons(None, weights, weights, counts_F, 2560).hot == hot
    counts_F[0] += 1  # however little more
    if hot == 0 and max(non_zeros) == 4:
      assert twell.sort_neurons(None, weights, weights, counts_F, 2560).hot == 256

  @pytest.mark.parametrize(("neurons", "hot"), [(255, 0), (256, 256), (300, 256), (511, 256)])
  def test_a_block_that_is_not_whole_is_not_hot(self, neurons, hot):
    weights = np.zeros((neurons, D), np.float32)
    assert twell.sort_neurons(None, weights, weights, np.full(neurons, 10), 10).hot == hot

  @pytest.mark.parametrize("hot", [0, 256, 512])
  def test_a_given_number_is_taken(self, hot):
    weights = np.zeros((600, D), np.float32)
    assert twell.sort_neurons(None, weights, weights, np.full(600, 10), 10, hot=hot).hot == hot

  def test_scanned_layers_are_sorted_each_and_share_the_mean(self):
    x_MD, *first = draw(600)
    _, *second = draw(600, dead=range(500), seed=1)
    y_LMD, counts_LF = zip(*(block(x_MD, *layer) for layer in (first, second)))
    stacked, counts_LF = [np.stack(layers) for layers in zip(first, second)], np.stack(counts_LF)
    neurons = twell.sort_neurons(*stacked, counts_LF, M)
    assert neurons.hot == 512  # the second block takes no non-zero from the second layer, but many from the first
    assert (np.diff(np.asarray(neurons.take(counts_LF)), axis=1) <= 0).all()
    assert neurons.order[0].tolist() != neurons.order[1].tolist()
    _, sorted_LMD = jax.lax.scan(lambda _, layer: (None, block_of(x_MD, layer)), None, weights_of(neurons))
    np.testing.assert_array_equal(sorted_LMD, y_LMD)

  @pytest.mark.parametrize(("non_zeros", "hot"), [([7.9, 0], 0), ([8.1, 0], 256), ([4.1, 3.8], 0)], ids=str)
  def test_one_number_for_all_layers_is_what_pays_in_the_mean(self, non_zeros, hot):
    counts_LF = np.repeat(np.round(np.asarray(non_zeros) * 10)[:, None], 256, axis=1)
    weights = np.zeros((2, 256, D), np.float32)
    assert twell.sort_neurons(None, weights, weights, counts_LF, 2560).hot == hot

  @pytest.mark.parametrize("hot", [-256, 128, 1, 768])
  def test_another_number_of_hot_neurons_is_refused(self, hot):
    _, *weights = draw(600)
    with pytest.raises(ValueError, match=rf"sort_neurons: hot={hot} must be a multiple of 256 in 0\.\.F=600"):
      twell.sort_neurons(*weights, np.ones(600), 10, hot=hot)

  @pytest.mark.parametrize("num_tokens", [0, 6])
  def test_more_counts_than_tokens_are_refused(self, num_tokens):
    _, *weights = draw(5)
    said = rf"num_tokens={num_tokens} must be at least 1 and the largest of counts_F, which is 7"
    with pytest.raises(ValueError, match=said):
      twell.sort_neurons(*weights, np.asarray([3, 0, 7, 1, 0]), num_tokens)


def sort_all(*arguments):
  return twell.sort_neurons(*arguments, 10)


@pytest.mark.parametrize("change", [twell.prune_dead, sort_all], ids=["prune_dead", "sort_neurons"])
class TestRefusals:
  w_FD = np.zeros((5, D), np.float32)

  @pytest.mark.parametrize("shape", [(4,), (6,), (5, 1), (1, 5), ()], ids=str)
  def test_counts_of_other_neurons(self, change, shape):
    said = re.escape(f"counts_F must have one count for each neuron, (5,), got shape {shape}")
    with pytest.raises(ValueError, match=said):
      change(None, self.w_FD, self.w_FD, np.ones(shape))

  def test_counts_of_one_layer_for_all(self, change):
    stacked = np.zeros((3, 5, D))
    with pytest.raises(ValueError, match=r"one count for each neuron, \(3, 5\), got shape \(5,\)"):
      change(None, stacked, stacked, np.ones(5))

  @pytest.mark.parametrize("count", [-1.0, np.nan])
  def test_counts_that_count_nothing(self, change, count):
    with pytest.raises(ValueError, match=f"counts_F must be at least 0, got {count:g}"):
      change(None, self.w_FD, self.w_FD, np.asarray([0, 1, count, 2, 3]))

  def test_traced_counts(self, change):
    with pytest.raises(TypeError, match=r"counts_F is traced, but its values decide .* call it outside of jit"):
      jax.jit(lambda counts_F: change(None, self.w_FD, self.w_FD, counts_F).w_up_FD)(jnp.ones(5))

  @pytest.mark.parametrize("place", ["w_gate_FD", "w_down_FD"])
  def test_weights_of_other_neurons(self, change, place):
    weights = {"w_gate_FD": self.w_FD, "w_up_FD": self.w_FD, "w_down_FD": self.w_FD} | {place: self.w_FD[:4]}
    with pytest.raises(ValueError, match=re.escape(f"{place} has shape (4, {D}) and w_up_FD has (5, {D})")):
      change(*weights.values(), np.ones(5))

  def test_weights_that_are_no_matrices(self, change):
    with pytest.raises(ValueError, match=r"w_up_FD must be \[F, D\] or \[layers, F, D\], got shape \(5,\)"):
      change(None, np.ones(5), np.ones(5), np.ones(5))

  def test_weights_may_be_traced(self, change):
    """Only the counts decide shapes."""
    counts_F = np.asarray([1, 0, 1, 0, 1])
    changed = jax.jit(lambda w_FD: change(None, w_FD, w_FD, counts_F).w_up_FD)(self.w_FD)
    assert changed.shape[1] == D


def test_counts_of_too_few_neurons_are_refused_when_they_are_brought_into_order():
  weights = (jnp.ones((256, 8)),) * 3
  neurons = twell.sort_neurons(*weights, np.arange(256), 300)
  with pytest.raises(ValueError, match=r"values\(9,\) have 9 rows, but neuron 255 is among those kept"):
    neurons.take(np.arange(9))
