"""InterFormer as a recommender: its wiring sample by sample, what padding reaches, its count of operations.

The layers themselves are compared with a loop over rows in test_interformer.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recommender_inputs
from flax import nnx
from packed_rows import dot_flops, jit
from recommender_inputs import sample_of, visible_pairs

from sparse_lm.errors import UserError
from sparse_lm.models.interformer import InterformerRecommender
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.recsys_config import RecommenderConfig, StreamConfig

FEATURES, NUMERIC, EMBEDDING, CLS, RECENT = 3, 2, 6, 3, 2
CONFIG = RecommenderConfig(
  kind="interformer",
  width=8,
  embedding_width=EMBEDDING,
  head_width=7,
  num_layers=2,
  rank=3,
  tokens=4,
  mlp_width=5,
  summary_tokens=CLS,
  time_scale=2.0,  # so that a second more or less shows
  stream=StreamConfig(num_heads=2, window=2, seeds=5),
)


def model_of(stream=None, **changes):
  config = dataclasses.replace(CONFIG, stream=dataclasses.replace(CONFIG.stream, **(stream or {})), **changes)
  return InterformerRecommender(config, FEATURES, NUMERIC, RECIPES["fp32"], rngs=nnx.Rngs(0))


@functools.cache
def model():
  return jit(model_of)()


def inputs_of(lengths, padding=0, width=EMBEDDING):
  return recommender_inputs.inputs_of(lengths, features=FEATURES, numeric=NUMERIC, width=width, padding=padding)


def wiring(model, inputs):
  """The logit of one sample, from the model's parts: CLS tokens, of age 0, stand before its events."""
  (stream,) = inputs.streams
  x = model.tokens(inputs)
  s = jnp.concatenate([model.layers[0].token_summary(x)[0], *(model.widen(e)[None] for e in stream.events_TD)])
  offsets = jnp.array([0, len(s)], jnp.int32)
  angles = model.rotary(jnp.concatenate([jnp.zeros(CLS), stream.age_T]), offsets)
  for layer in model.layers:
    x, s = layer(x, s, offsets, angles)
  both = [model.token_summary(x), model.sequence_summary(s, offsets)]
  return model.head(jnp.concatenate([summary.ravel() for summary in both])[None])[0]


@pytest.mark.parametrize(("lengths", "padding"), [([0], 0), ([0, 0], 3), ([3, 0, 1, 9], 4)])
def test_a_sample_scores_what_its_parts_give_whoever_shares_the_batch(lengths, padding):
  inputs = inputs_of(lengths, padding)
  alone = [sample_of(inputs, b) for b in range(len(lengths))]
  found, expected = jit(lambda model: (model(inputs), [wiring(model, sample) for sample in alone]))(model())
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_sample_of_nan_harms_no_other():
  run, inputs = jit(lambda model, inputs: model(inputs)), inputs_of([2, 4, 3])
  (stream,) = inputs.streams
  bad = inputs._replace(
    tokens_BFD=inputs.tokens_BFD.at[1].set(jnp.nan),
    streams=(
      stream._replace(events_TD=stream.events_TD.at[2:6].set(jnp.nan), age_T=stream.age_T.at[2:6].set(jnp.nan)),
    ),
  )
  fine, found = (np.asarray(run(model(), it)) for it in (inputs, bad))
  assert np.isnan(found[1])
  np.testing.assert_array_equal(found[[0, 2]], fine[[0, 2]])


@pytest.mark.parametrize("lengths", [[0, 0], [0, 4, 1]])
def test_gradients_are_finite_and_none_reaches_padding(lengths):
  loss = lambda model, inputs: jnp.sum(model(inputs))
  grads = jit(jax.grad(loss, argnums=(0, 1), allow_int=True))(model(), inputs_of(lengths, padding=3))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads) if x.dtype == jnp.float32)
  reached = np.any(np.asarray(grads[1].streams[0].events_TD), axis=1)
  np.testing.assert_array_equal(reached, np.arange(sum(lengths) + 3) < sum(lengths))


def test_every_parameter_learns():
  """Also those of the last layer's attention, which the last summary reads."""
  inputs = inputs_of([3, 5, 2], padding=1)
  grads = jit(jax.grad(lambda model: jnp.sum(model(inputs))))(model())
  still = [jax.tree_util.keystr(path) for path, x in jax.tree.leaves_with_path(grads) if not np.any(np.asarray(x))]
  assert still == []


@pytest.mark.parametrize(
  ("changes", "stream"),
  [
    ({}, {}),
    ({"num_layers": 1, "tokens": 6}, {"window": None}),
    ({"embedding_width": None, "num_layers": 3, "mlp_layers": 2}, {"window": None, "block": 4}),
  ],
)
def test_flops_are_those_of_projections_and_visible_pairs(changes, stream):
  """Inside custom derivatives, and so not counted: attention, pooling, and each row's own matrix."""
  lengths, width = [3, 0, 9], CONFIG.width
  model = jax.eval_shape(lambda: model_of(stream, **changes))
  inputs = inputs_of(lengths, width=changes.get("embedding_width", EMBEDDING) or width)
  x = jax.eval_shape(lambda model, inputs: model.tokens(inputs), model, inputs)
  with_cls = [CLS + length for length in lengths]
  layers = changes.get("num_layers", CONFIG.num_layers)
  mask = dataclasses.replace(CONFIG.stream, **stream)
  expected = dot_flops(lambda model, inputs: model(inputs), model, inputs)
  expected -= dot_flops(lambda summary, x: summary(x), model.layers[0].token_summary, x)  # asked for twice, done once
  expected += layers * 4 * width * visible_pairs(mask, with_cls)
  expected += (layers + 1) * 4 * width * sum(with_cls) * mask.seeds
  expected += layers * 2 * width**2 * sum(with_cls)
  assert model.flops([lengths]) == expected


@pytest.mark.parametrize("mask", [{"window": 1}, {"window": None, "block": 4}, {"window": None}], ids=str)
def test_layers_attend_within_the_stream_s_mask(mask):
  """What the last event of a row of CLS + 9 tokens gets in one layer: from those that it sees."""
  (layer,) = jit(lambda: model_of(mask, num_layers=1))().layers
  tokens, mask = CLS + 9, dataclasses.replace(CONFIG.stream, **mask)
  s, offsets = np.random.default_rng(0).normal(size=(tokens, CONFIG.width)), jnp.array([0, tokens], jnp.int32)
  x = jnp.ones((1, FEATURES + 1, CONFIG.width))
  last = lambda s: jnp.sum(layer(x, s, offsets)[1][-1] ** 2)
  reached = np.any(np.asarray(jit(jax.grad(last))(jnp.asarray(s, jnp.float32))), axis=1)
  sees = [
    (mask.window is None or tokens - 1 - j <= mask.window)
    and (mask.block is None or j // mask.block == 11 // mask.block)
    for j in range(tokens)
  ]
  np.testing.assert_array_equal(reached, sees)


def test_heads_share_the_width_of_both_sides():
  """That of gem's stream is not read."""
  dataclasses.replace(CONFIG, width=24, stream=StreamConfig(width=16, num_heads=3)).validate()
  said = r"^model.width=16 / model.stream.num_heads=3 must be a multiple of 4: half"
  with pytest.raises(UserError, match=said):
    dataclasses.replace(CONFIG, width=16, stream=StreamConfig(width=24, num_heads=3)).validate()
