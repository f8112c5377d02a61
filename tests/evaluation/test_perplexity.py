"""Units of perplexity, by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.errors import UserError
from sparse_lm.evaluation.perplexity import perplexity


@pytest.fixture(scope="module")
def indifferent(opened):
  """To it all 275 tokens are equally likely, always."""
  model = opened(tie_embeddings=False)
  model.model.head_VD[...] = jnp.zeros_like(model.model.head_VD[...])
  return model


def test_units_are_tokens_and_bytes_and_not_characters(indifferent, tokenizer):
  texts = ["the cats sat", "é", ""]
  found = perplexity(indifferent, texts)
  tokens = sum(len(tokenizer.encode(text)) for text in texts)
  assert (found["documents"], found["tokens"], found["bytes"]) == (3, tokens, 14)
  nats = tokens * math.log(275)
  np.testing.assert_allclose(found["nats_per_token"], math.log(275), rtol=1e-6)
  np.testing.assert_allclose(found["perplexity_per_token"], 275, rtol=1e-5)
  np.testing.assert_allclose(found["perplexity_per_byte"], math.exp(nats / 14), rtol=1e-5)
  np.testing.assert_allclose(found["bits_per_byte"], nats / 14 / math.log(2), rtol=1e-6)
  assert found["tokenizer"] == tokenizer.fingerprint


def test_a_document_longer_than_the_context_counts_every_token_once(indifferent):
  found = perplexity(indifferent, ["m" * 500])
  assert found["tokens"] == 500
  np.testing.assert_allclose(found["nats_per_token"], math.log(275), rtol=1e-6)


def test_a_document_does_not_see_the_one_before(opened):
  model = opened(seed=2)
  alone, twice = perplexity(model, ["the cat sat"]), perplexity(model, ["the cat sat"] * 2)
  assert alone["nats_per_token"] == pytest.approx(twice["nats_per_token"], rel=1e-12)


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_nothing_to_predict_is_said(texts, indifferent):
  with pytest.raises(UserError, match=rf"there is nothing to predict: {len(texts)} documents"):
    perplexity(indifferent, texts)
