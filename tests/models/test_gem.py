"""The GEM-style recommender: its wiring sample by sample, what CompSkip leaves out, its count of operations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recommender_inputs
from flax import nnx
from packed_rows import assert_close, dot_flops, jit
from recommender_inputs import sample_of, visible_pairs

from sparse_lm.models.gem import GemRecommender
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.recsys_config import RecommenderConfig, StreamConfig

FEATURES, NUMERIC, LONGEST, EMBEDDING = 3, 2, 9, 6
STREAM = StreamConfig(width=8, num_heads=2, window=2, neurons=5, seeds=6, pooled_tokens=2)
CONFIG = RecommenderConfig(
  width=4, embedding_width=EMBEDDING, head_width=7, num_layers=2, rank=3, tokens=4, mlp_width=5, stream=STREAM
)


def model_of(config=CONFIG, **changes):
  config = dataclasses.replace(config, **changes)
  return GemRecommender(config, FEATURES, NUMERIC, LONGEST, RECIPES["fp32"], rngs=nnx.Rngs(0))


def inputs_of(lengths, padding=0, width=EMBEDDING):
  return recommender_inputs.inputs_of(lengths, features=FEATURES, numeric=NUMERIC, width=width, padding=padding)


def wiring(model, inputs, comp_skip):
  """The logit of one sample, from the model's parts, as the module's docstring has them."""
  (stream,) = inputs.streams
  offsets, item = stream.offsets, inputs.item_BD[0]
  x = model.tokens(inputs)
  (meet,), (rotary,) = model.meetings, model.rotaries
  met = [meet.mlp(jnp.concatenate([e, e * item, item])) for e in stream.events_TD]
  s = jnp.stack([m[:-1] + meet.widen(e) for m, e in zip(met, stream.events_TD)])
  interest, first, angles = sum(m[-1] * e for m, e in zip(met, stream.events_TD)), x, rotary(stream.age_T, offsets)
  for n, block in enumerate(model.blocks):
    (part,) = block.streams
    even = n % 2 == 0
    if even or not comp_skip:
      s = part.feedforward(s, block.summary(x), offsets)
    if not even or not comp_skip:
      s = part.attention(s, offsets, angles) if part.attention is not None else s
    if even or not comp_skip:
      h = part.pooling(s, offsets)
    x = block.interact.wukong(jnp.concatenate([x, h], axis=1))
  return model.head(jnp.concatenate([x.ravel(), first.ravel(), interest])[None])[0]


@pytest.mark.parametrize("comp_skip", [False, True])
def test_a_sample_scores_what_its_parts_give_whoever_shares_the_batch(comp_skip):
  model = model_of(comp_skip=comp_skip, num_layers=3)
  inputs = inputs_of([3, 1, 9], padding=4)
  found = jit(lambda model, inputs: model(inputs))(model, inputs)
  expected = [wiring(model, sample_of(inputs, b), comp_skip) for b in range(3)]
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_sample_without_events_has_a_score_and_finite_gradients():
  model = model_of()
  loss = lambda model, inputs: jnp.sum(model(inputs))
  for lengths, padding in (([0], 0), ([0, 2, 0], 3)):
    grads = jit(jax.grad(loss, argnums=(0, 1), allow_int=True))(model, inputs_of(lengths, padding))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads) if x.dtype == jnp.float32)


def test_recomputed_blocks_give_the_same_gradients():
  inputs = inputs_of([3, 5], padding=2)
  gradient = lambda model: jit(jax.grad(lambda model: jnp.sum(model(inputs))))(model)
  expected, found = (jax.tree.leaves(gradient(model_of(recompute=recompute))) for recompute in (False, True))
  for a, b in zip(found, expected, strict=True):
    assert_close(a, b, tolerance=1e-5)


def test_comp_skip_leaves_out_what_nothing_reads():
  parts = lambda model: [
    [name for name in ("feedforward", "attention", "pooling") if getattr(block.streams[0], name) is not None]
    for block in model.blocks
  ]
  even, odd = ["feedforward", "pooling"], ["attention"]
  assert parts(model_of(comp_skip=True, num_layers=4)) == [even, odd, even, []]
  assert parts(model_of(comp_skip=True, num_layers=5)) == [even, odd, even, odd, even]
  assert parts(model_of(comp_skip=True, num_layers=1)) == [even]
  assert parts(model_of(num_layers=2)) == [["feedforward", "attention", "pooling"]] * 2


@pytest.mark.parametrize(
  ("changes", "stream"),
  [
    ({}, {}),
    ({"experts": 3}, {"window": None}),
    ({"comp_skip": True, "num_layers": 3}, {"window": None, "block": 4}),
    ({"embedding_width": None, "mlp_layers": 2}, {"pooled_tokens": None}),
  ],
)
def test_flops_are_those_of_projections_and_visible_pairs(changes, stream):
  lengths = [3, 0, 9]
  stream = dataclasses.replace(STREAM, **stream)
  width = changes.get("embedding_width", EMBEDDING) or CONFIG.width
  model = model_of(stream=stream, **changes)
  layers = changes.get("num_layers", 2)
  attending = layers // 2 if changes.get("comp_skip") else layers
  transforming = layers - attending if changes.get("comp_skip") else layers
  attention = 4 * stream.width * visible_pairs(stream, lengths) * attending
  attention += 4 * stream.width * sum(lengths) * (stream.neurons + stream.seeds) * transforming
  expected = dot_flops(lambda inputs: model(inputs), inputs_of(lengths, width=width)) + attention
  assert model.flops([lengths]) == expected


@pytest.mark.parametrize("change", [{"window": None}, {"window": None, "block": 4}, {"pooled_tokens": None}])
def test_other_masks_and_poolings_train(change):
  model = model_of(stream=dataclasses.replace(STREAM, **change))
  inputs = inputs_of([4, 7], padding=1)
  grads = jit(jax.grad(lambda model: jnp.sum(model(inputs))))(model)
  assert all(np.any(np.asarray(x)) for x in jax.tree.leaves(grads.blocks[0].streams[0]))


def test_experts_share_the_tokens_and_zeros_fill_the_last_share():
  """3 features, 1 of numbers, 2 pooled: 6 tokens, then 6 of 4 and 2; for 4 experts, 8 each."""
  model = model_of(experts=4)
  assert [block.interact.fill for block in model.blocks] == [2, 2]
  assert jit(lambda model, inputs: model(inputs))(model, inputs_of([2, 3])).shape == (2,)
