"""How well a model predicts text, by token and by byte.

Perplexity by token depends on the tokenizer: two models compare only if theirs is the same one. By byte they always do.
Each document is scored alone, from its first token on; the end-of-text token that follows it in training is not.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

from sparse_lm.errors import UserError
from sparse_lm.evaluation.scoring import Scorer
from sparse_lm.inference.opening import OpenedModel


def perplexity(
  opened: OpenedModel, texts: Iterable[str], report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
  """Scores documents.

  Returns:
    Counts, nats a token, perplexity per token and per byte, bits per byte, and the tokenizer's fingerprint.

  Raises:
    UserError: there is no token to predict.
  """
  tokenizer, pairs, num_bytes = opened.tokenizer, [], 0
  for text in texts:
    pairs.append((tokenizer.start_ids, tokenizer.encode(text)))
    num_bytes += len(text.encode())
  scores = Scorer(opened).score(pairs, report)
  tokens = sum(score.tokens for score in scores)
  if tokens == 0:
    raise UserError(f"there is nothing to predict: {len(pairs)} documents without a single token")
  nats = -math.fsum(score.log_probability for score in scores)
  return {
    "documents": len(pairs),
    "tokens": tokens,
    "bytes": num_bytes,
    "nats_per_token": nats / tokens,
    "perplexity_per_token": _exp(nats / tokens),
    "perplexity_per_byte": _exp(nats / num_bytes),
    "bits_per_byte": nats / num_bytes / math.log(2),
    "tokenizer": tokenizer.fingerprint,
  }


def _exp(nats: float) -> float:
  return math.exp(nats) if nats < 700 else math.inf
