"""Log-probability of a continuation after a context, exactly as long as its text.

Every text stands after the mark of a text's start, as documents do in training, whether or not it has a context. So the
chain rule holds: the score of a text is the sum of the scores of its parts, each after those before it.

A continuation is cut where its text begins. Where a token of the whole text would reach across that border, context and
continuation are encoded apart, so that neither loses or gains a character.

What does not fit into the model's context is scored in windows: each token once, after as much as fits before it if the
continuation fits, else in windows that follow one another (a window sees the last token of the one before; the last
window is filled up to the left).

A request has the same shape on the device whatever else is scored, and so the same score to the last bit.

Dimension key: B sequences, L length.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm.data.tokenizer import Tokenizer
from sparse_lm.inference.opening import OpenedModel
from sparse_lm.models.transformer import Transformer
from sparse_lm.training.state import COMPILER_OPTIONS

_SHORTEST = 64  # lengths are rounded up to powers of two from here, so that few programs serve all
_TOKENS_PER_CALL = {"cpu": 1024}  # by back end
_TOKENS_PER_CALL_OF_A_GPU = 16_384
_SECONDS_BETWEEN_REPORTS = 5.0


class Score(NamedTuple):
  """Of one continuation."""

  log_probability: float  # nats, summed over its tokens
  greedy: bool  # each of its tokens is the most likely one at its place
  tokens: int


@dataclasses.dataclass(frozen=True)
class _Window:
  request: int
  inputs: list[int]
  targets: list[int]
  scored: int  # of the last targets


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
  """Ids of a context, start mark included, and of what follows it; their texts are the two texts.

  Spaces at the end of the context count as the start of the continuation, since tokens begin with their space.
  """
  stripped = context.rstrip(" ")
  continuation, context = context[len(stripped) :] + continuation, stripped
  before, whole = tokenizer.encode(context), tokenizer.encode(context + continuation)
  apart = whole[: len(before)] != before
  return [*tokenizer.start_ids, *before], tokenizer.encode(continuation) if apart else whole[len(before) :]


class Scorer:
  """A model ready to score."""

  def __init__(self, opened: OpenedModel):
    self._model, self._context_length = opened.model, opened.config.context_length
    self._tokens_per_call = _TOKENS_PER_CALL.get(jax.default_backend(), _TOKENS_PER_CALL_OF_A_GPU)

  def score(
    self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], report: Callable[[str], None] = lambda line: None
  ) -> list[Score]:
    """Returns the score of each (context, continuation), ids both; a context has at least one id.

    An empty continuation has log-probability 0 and is greedy.
    """
    windows = [w for n, (context, text) in enumerate(pairs) for w in self._windows(n, [*context], [*text])]
    nats, greedy = np.zeros(len(pairs)), np.ones(len(pairs), bool)
    for window, values_L, best_L in _reported(self._run(windows), len(windows), report):
      nats[window.request] += np.sum(values_L[-window.scored :], dtype=np.float64)
      greedy[window.request] &= best_L[-window.scored :].all()
    return [Score(float(a), bool(b), len(text)) for a, b, (_, text) in zip(nats, greedy, pairs)]

  def _windows(self, request: int, context: list[int], continuation: list[int]) -> Iterator[_Window]:
    tokens, position = context + continuation, len(context)
    while position < len(tokens):
      scored = min(self._context_length, len(tokens) - position)
      position += scored
      start = max(0, position - 1 - self._context_length)
      yield _Window(request, tokens[start : position - 1], tokens[start + 1 : position], scored)

  def _run(self, windows: list[_Window]) -> Iterator[tuple[_Window, np.ndarray, np.ndarray]]:
    """Yields log-probabilities and whether the token was the likeliest, for all targets of each window."""
    by_length = defaultdict(list)
    for window in windows:
      by_length[_rounded(len(window.inputs))].append(window)
    for length, group in sorted(by_length.items()):
      rows = max(1, self._tokens_per_call // length)
      for first in range(0, len(group), rows):
        part = group[first : first + rows]
        inputs_BL, targets_BL = np.zeros((2, rows, length), np.int32)
        for row, window in enumerate(part):
          inputs_BL[row, : len(window.inputs)] = window.inputs
          targets_BL[row, : len(window.targets)] = window.targets
        values_BL, best_BL = jax.device_get(_score(self._model, jnp.asarray(inputs_BL), jnp.asarray(targets_BL)))
        for row, window in enumerate(part):
          yield window, values_BL[row, : len(window.targets)], best_BL[row, : len(window.targets)]


@jax.jit(compiler_options=COMPILER_OPTIONS)
def _score(model: Transformer, inputs_BL, targets_BL) -> tuple[jax.Array, jax.Array]:
  logits_BLV = model.logits(model(inputs_BL)[0]).astype(jnp.float32)
  picked_BL = jnp.take_along_axis(logits_BLV, targets_BL[:, :, None], axis=-1)[:, :, 0]
  return picked_BL - jax.nn.logsumexp(logits_BLV, axis=-1), jnp.argmax(logits_BLV, axis=-1) == targets_BL


def _rounded(length: int) -> int:
  rounded = _SHORTEST
  while rounded < length:
    rounded *= 2
  return rounded


def _reported(results: Iterable, total: int, report: Callable[[str], None]) -> Iterator:
  """Yields them, and says every few seconds how far it is."""
  start = last = time.monotonic()
  for done, result in enumerate(results, start=1):
    yield result
    if (now := time.monotonic()) - last >= _SECONDS_BETWEEN_REPORTS:
      last = now
      report(f"scored {done:,} of {total:,} sequences, {int((now - start) * (total - done) / done)} s left")
