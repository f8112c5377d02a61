"""Kinds of recommenders side by side: their counts of operations, tables of the model's width and of another."""

import jax
import pytest
from flax import nnx
from packed_rows import dot_flops
from recommender_inputs import inputs_of

from sparse_lm.models.recommender import make_recommender
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.recsys_config import MODEL_KINDS, RecommenderConfig

LENGTHS = [3, 0, 9]
WITH_ATTENTION = ("interformer", "gem")  # have tests of their own
SIZES = {"width": 8, "head_width": 7, "num_layers": 2, "rank": 3, "tokens": 4, "mlp_width": 5}


def model_of(kind, numeric, **changes):
  """Of odd sizes, so that none stands for another by chance."""
  config = RecommenderConfig(kind=kind, **SIZES | ({"width": 1} if kind == "logistic" else changes))
  sizes = {"features": 3, "numeric": numeric, "longest": 9}
  make = lambda: make_recommender(config, **sizes, recipe=RECIPES["fp32"], rngs=nnx.Rngs(0))
  model = jax.eval_shape(make)
  return model, inputs_of(LENGTHS, features=3, numeric=numeric, width=config.table_width)


@pytest.mark.parametrize("numeric", [0, 2])
@pytest.mark.parametrize("embedding_width", [None, 6])
@pytest.mark.parametrize("kind", [kind for kind in MODEL_KINDS if kind not in WITH_ATTENTION])
def test_flops_of_models_without_attention_are_those_of_their_products(kind, embedding_width, numeric):
  model, inputs = model_of(kind, numeric, embedding_width=embedding_width)
  assert model.flops([LENGTHS]) == dot_flops(lambda model, inputs: model(inputs), model, inputs)
