"""Counts of firing units against a float64 decoder."""

import jax
import numpy as np
import oracle
import pytest
from flax import nnx

from sparse_lm.errors import UserError
from sparse_lm.evaluation.activity import activity

TEXTS = ["the cat sat on the mat", "", "cats " * 20, "the mat"]


@pytest.mark.parametrize("kind", ["gated_relu", "relu"])
def test_counts_equal_those_of_a_float64_decoder(kind, opened):
  model = opened(seed=4, ffn_kind=kind, context_length=8, num_layers=3)
  tokenizer = model.tokenizer
  stream = [0]
  for text in TEXTS:
    stream += [*tokenizer.encode(text), 0]
  contexts = np.array(stream[: len(stream) // 8 * 8]).reshape(-1, 8)
  parameters = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model.model)))
  fires = [[layer[1] for layer in oracle.decoder(parameters, row, model.config)[2]] for row in contexts]
  counts_BNL = np.array(fires).sum(axis=-1)
  found = activity(model, TEXTS, max_tokens=10_000, min_count=2)
  assert found["tokens"] == contexts.size
  np.testing.assert_allclose(found["l0_per_layer"], counts_BNL.mean(axis=(0, 2)), rtol=1e-9)
  np.testing.assert_array_equal(found["l0_max_per_layer"], counts_BNL.max(axis=(0, 2)))
  np.testing.assert_allclose(found["l0_by_position"], counts_BNL.mean(axis=(0, 1)), rtol=1e-9)
  by_token = {}
  for row, counts_NL in zip(contexts, counts_BNL):
    for token, value in zip(row, counts_NL.mean(axis=0)):
      by_token.setdefault(int(token), []).append(value)
  wanted = sorted((float(np.mean(v)), tokenizer.decode([t]), len(v)) for t, v in by_token.items() if len(v) >= 2)
  assert [entry["l0"] for entry in found["fewest"]] == pytest.approx([value for value, _, _ in wanted][:20])
  assert {(entry["token"], entry["count"]) for entry in found["most"]} == {(t, n) for _, t, n in wanted[-20:]}
  assert found["most"][0]["l0"] == pytest.approx(wanted[-1][0])


def test_no_more_contexts_are_read_than_asked_for(opened):
  model = opened(context_length=8)
  whole = activity(model, TEXTS, max_tokens=10_000, min_count=1)
  first = activity(model, TEXTS, max_tokens=17, min_count=1)
  assert first["tokens"] == 16 < whole["tokens"]
  assert sum(entry["count"] for entry in first["most"]) == 16


def test_too_little_text_and_units_that_never_are_off_are_said(opened):
  with pytest.raises(UserError, match=r"tokens do not fill one context of 48"):
    activity(opened(), ["m"], max_tokens=1000, min_count=1)
  with pytest.raises(UserError, match=r"ffn_kind='gated_silu' has no neurons that ReLU can switch off"):
    activity(opened(ffn_kind="gated_silu"), TEXTS, max_tokens=1000, min_count=1)
