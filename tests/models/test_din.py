"""DIN against a few lines of NumPy, a sample at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recommender_inputs
from flax import nnx

from sparse_lm.models.din import Din
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.recsys_config import RecommenderConfig

WIDTH, EMBEDDING, FEATURES = 4, 5, 3


@pytest.fixture
def model():
  config = RecommenderConfig(kind="din", width=WIDTH, embedding_width=EMBEDDING, head_width=6)
  return Din(config, FEATURES, 0, RECIPES["fp32"], rngs=nnx.Rngs(0))


def inputs_of(lengths, padding=0):
  return recommender_inputs.inputs_of(lengths, features=FEATURES, numeric=0, width=EMBEDDING, padding=padding)


def mlp(module, x):
  (first, last) = ((np.asarray(layer.w_FD[...]), np.asarray(layer.b_F[...])) for layer in module.layers)
  return last[0] @ np.maximum(first[0] @ x + first[1], 0) + last[1]


def oracle(model, inputs):
  logits, (stream,) = [], inputs.streams
  w_DE, b_D = (np.asarray(parameter[...]) for parameter in (model.tokens.widen.w_FD, model.tokens.widen.b_F))
  for b, (begin, end) in enumerate(zip(stream.offsets[:-1], stream.offsets[1:])):
    item = np.asarray(inputs.item_BD[b])
    interest = np.zeros(EMBEDDING)
    for event in np.asarray(stream.events_TD[begin:end]):
      interest += mlp(model.activation_unit, np.concatenate([event, event * item, item])) * event
    x = np.concatenate([np.asarray(inputs.tokens_BFD[b]) @ w_DE.T + b_D, interest[None]], axis=None)
    logits.append(mlp(model.head.mlp, x)[0])
  return np.array(logits)


@pytest.mark.parametrize("lengths", [[0], [1], [0, 3, 0, 2], [5, 1, 0]])
def test_a_sample_at_a_time(model, lengths):
  inputs = inputs_of(lengths, padding=3)
  np.testing.assert_allclose(model(inputs), oracle(model, inputs), rtol=1e-5, atol=1e-6)


def test_padding_reaches_no_gradient(model):
  inputs = inputs_of([2, 0], padding=4)
  grads = jax.grad(lambda model, inputs: jnp.sum(model(inputs)), argnums=(0, 1), allow_int=True)(model, inputs)
  leaves = [x for x in jax.tree.leaves(grads) if x.dtype == jnp.float32]
  assert all(np.isfinite(x).all() for x in leaves)
  assert np.any(np.asarray(grads[1].streams[0].events_TD[:2]))
