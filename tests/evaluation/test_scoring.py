"""Scores of text against a float64 decoder: borders of text and tokens, windows, and independence of the company."""

import jax
import numpy as np
import oracle
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_lm.evaluation.scoring import Scorer, encode_pair

CONTEXT = 48  # of the model
LONG = "the cat sat on the mat " * 600  # 3,000 tokens and more
CONTINUATIONS = ["s sat", " sat", "", "m" * 200, " naïve — 漢字", "<|endoftext|>"]
CONTEXTS = ["The cat", "", LONG]


@pytest.fixture(scope="module")
def model(opened):
  return opened(seed=1)


@pytest.fixture(scope="module")
def scorer(model):
  return Scorer(model)


@pytest.fixture(scope="module")
def truth(model):
  """`truth(context ids, continuation ids)`: (log-probability, greedy) in float64, window by window, token by token."""
  parameters = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model.model)))

  def log_probabilities(inputs):
    logits = oracle.decoder(parameters, np.array(inputs), model.config)[1]
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))

  def score(context, continuation):
    tokens, total, greedy, done = [*context, *continuation], 0.0, True, len(context)
    while done < len(tokens):
      end = min(done + CONTEXT, len(tokens))
      inputs = tokens[max(0, end - 1 - CONTEXT) : end - 1]
      table = log_probabilities(inputs)[done - end :]
      targets = tokens[done:end]
      total += table[np.arange(len(targets)), targets].sum()
      greedy &= bool((table.argmax(axis=-1) == targets).all())
      done = end
    return total, greedy

  return score


@pytest.mark.parametrize("context", CONTEXTS, ids=["short", "empty", "long"])
def test_scores_equal_a_float64_decoder(context, model, scorer, truth):
  pairs = [encode_pair(model.tokenizer, context, continuation) for continuation in CONTINUATIONS]
  for pair, found in zip(pairs, scorer.score(pairs)):
    log_probability, greedy = truth(*pair)
    np.testing.assert_allclose(found.log_probability, log_probability, rtol=1e-5, atol=1e-5)
    assert found.greedy == greedy
    assert found.tokens == len(pair[1])


def test_an_empty_continuation_has_probability_1(model, scorer):
  assert scorer.score([encode_pair(model.tokenizer, "The cat", "")]) == [(0.0, True, 0)]
  assert scorer.score([]) == []


def test_the_likeliest_continuation_is_greedy_and_its_rival_is_not(model, scorer):
  start = [*model.tokenizer.start_ids, *model.tokenizer.encode("the")]
  scores = [scorer.score([(start, [v])])[0] for v in range(model.config.vocab_size)]
  values = [score.log_probability for score in scores]
  assert [score.greedy for score in scores].index(True) == int(np.argmax(values))
  assert sum(score.greedy for score in scores) == 1
  np.testing.assert_allclose(np.sum(np.exp(values)), 1, rtol=1e-5)


@pytest.mark.parametrize("parts", [["the", " cat", " sat"], ["The cat", "s sat"], ["", "the mat"], ["a", "", "b"]])
def test_the_score_of_a_text_is_the_sum_of_its_parts_each_after_those_before(parts, model, scorer):
  """Each part has the tokens that `encode_pair` gives it, and so has the whole."""
  ids, pairs = [], []
  for n, part in enumerate(parts):
    pairs.append(encode_pair(model.tokenizer, "".join(parts[:n]), part))
    ids += pairs[-1][1]
  total = sum(score.log_probability for score in scorer.score(pairs))
  (whole,) = scorer.score([(model.tokenizer.start_ids, ids)])
  np.testing.assert_allclose(whole.log_probability, total, rtol=1e-5)
  assert model.tokenizer.decode(ids) == "".join(parts)


text = st.text(alphabet="the cats ", max_size=12)


@given(context=text, continuation=text)
@settings(deadline=None)
def test_context_and_continuation_keep_their_text(context, continuation, tokenizer):
  before, after = encode_pair(tokenizer, context, continuation)
  assert before[0] == tokenizer.eos_id
  stripped = context.rstrip(" ")
  assert tokenizer.decode(before[1:]) == stripped
  assert tokenizer.decode(after) == context[len(stripped) :] + continuation


def test_a_token_across_the_border_belongs_to_neither(tokenizer):
  """`cats` is one token of the whole; as the continuation's it would add "cat", as the context's it would lose s."""
  whole = tokenizer.encode("the cats sat")
  before, after = encode_pair(tokenizer, "the cat", "s sat")
  assert whole[: len(before) - 1] != before[1:]
  assert (tokenizer.decode(before[1:]), tokenizer.decode(after)) == ("the cat", "s sat")


def test_tokens_of_the_whole_are_used_where_the_border_is_one_of_theirs(tokenizer):
  before, after = encode_pair(tokenizer, "the cat", " sat on")
  assert [*before[1:], *after] == tokenizer.encode("the cat sat on")
  assert encode_pair(tokenizer, "the cat ", "sat on") == (before, after)


def test_a_score_does_not_depend_on_what_else_is_scored_not_in_a_bit(model, scorer):
  rng = np.random.default_rng(0)
  pairs = [
    (rng.integers(0, 275, rng.integers(1, 90)).tolist(), rng.integers(0, 275, rng.integers(0, 120)).tolist())
    for _ in range(25)
  ]
  together = scorer.score(pairs)
  assert [scorer.score([pair])[0] for pair in pairs] == together
  assert scorer.score(pairs[::-1])[::-1] == together
  assert scorer.score(pairs[:7]) + scorer.score(pairs[7:]) == together
