"""How many hidden units fire: by layer, by position in the context, and by token (TwELL, figures 6 and 7).

Dimension key: B sequences, L length, N layers, V vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm.evaluation.feedforward_inputs import at_blocks, batches, contexts, require_neurons
from sparse_lm.inference.opening import OpenedModel
from sparse_lm.models.transformer import Transformer
from sparse_lm.training.state import COMPILER_OPTIONS

_LISTED = 20  # tokens at each end


def activity(
  opened: OpenedModel,
  texts: Iterable[str],
  *,
  max_tokens: int,
  min_count: int,
  report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
  """Counts over whole contexts of text, packed as in training: documents follow one another, each after an end of text.

  Args:
    opened: a model whose hidden units can be off.
    texts: documents.
    max_tokens: no more contexts are read than hold this many.
    min_count: occurrences that a token needs to be listed.
    report: takes one line.

  Returns:
    l0_per_layer and l0_max_per_layer (mean and largest number of non-zeros of a token), l0_by_position (mean over
    layers), and the tokens with the `fewest` and `most` non-zeros, each with its count and mean.

  Raises:
    UserError: the text does not fill one context, or the model has no such units.
  """
  require_neurons(opened)
  length, vocab_size = opened.config.context_length, opened.config.vocab_size
  inputs_BL = contexts(opened, texts, max_tokens)
  sums_NL, max_N = np.zeros((opened.config.num_layers, length)), np.zeros(opened.config.num_layers, np.int32)
  token_sums_V, token_counts_V = np.zeros(vocab_size), np.zeros(vocab_size, np.int64)
  done = 0
  for padded_BL, real in batches(inputs_BL):
    part_BL = padded_BL[:real]
    counts_NBL = np.asarray(_counts(opened.model, jnp.asarray(padded_BL)))[:, :real]
    sums_NL += counts_NBL.sum(axis=1, dtype=np.float64)
    max_N = np.maximum(max_N, counts_NBL.max(axis=(1, 2)))
    means_BL = counts_NBL.mean(axis=0, dtype=np.float64)
    token_sums_V += np.bincount(part_BL.ravel(), weights=means_BL.ravel(), minlength=vocab_size)
    token_counts_V += np.bincount(part_BL.ravel(), minlength=vocab_size)
    done += part_BL.size
    report(f"counted {done:,} of {inputs_BL.size:,} tokens")
  listed = [int(v) for v in np.flatnonzero(token_counts_V >= max(min_count, 1))]
  listed.sort(key=lambda v: token_sums_V[v] / token_counts_V[v])
  entry = lambda v: {
    "token": opened.tokenizer.decode([v]),
    "count": int(token_counts_V[v]),
    "l0": float(token_sums_V[v] / token_counts_V[v]),
  }
  return {
    "tokens": int(inputs_BL.size),
    "ffn_width": opened.config.ffn_width,
    "l0_per_layer": (sums_NL.mean(axis=1) / len(inputs_BL)).tolist(),
    "l0_max_per_layer": max_N.tolist(),
    "l0_by_position": (sums_NL.mean(axis=0) / len(inputs_BL)).tolist(),
    "min_count": min_count,
    "fewest": [entry(v) for v in listed[:_LISTED]],
    "most": [entry(v) for v in listed[::-1][:_LISTED]],
  }


@jax.jit(compiler_options=COMPILER_OPTIONS)
def _counts(model: Transformer, tokens_BL) -> jax.Array:
  """i32[N, B, L]: units of each layer that fire for each token."""
  firing = lambda x_BLD, block: jnp.sum(block.gate(x_BLD) != 0, axis=-1, dtype=jnp.int32)
  return at_blocks(model, tokens_BL, firing)
