"""What the feed-forward blocks of a model read, on whole contexts of text: to look at it, or to keep it.

Dimension key: N layers, B sequences, L length, D model width, F hidden neurons, M tokens as rows.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_lm.errors import UserError
from sparse_lm.inference.opening import OpenedModel
from sparse_lm.models.transformer import Transformer
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.training.state import COMPILER_OPTIONS

_TOKENS_PER_CALL = 16_384


class Captured(NamedTuple):
  """One feed-forward block: what it read, on the host, and the weights that it multiplies that with."""

  x_MD: np.ndarray
  w_gate_FD: jax.Array | None  # None: a non-gated block
  w_up_FD: jax.Array
  w_down_FD: jax.Array


def require_neurons(opened: OpenedModel) -> None:
  """Raises UserError for a model whose hidden units are never off."""
  if opened.config.ffn_kind not in ("gated_relu", "relu"):
    raise UserError(f"model.ffn_kind={opened.config.ffn_kind!r} has no neurons that ReLU can switch off")


def contexts(opened: OpenedModel, texts: Iterable[str], max_tokens: int) -> np.ndarray:
  """i32[B, L], packed as in training: documents follow one another, each after an end of text.

  Args:
    opened: whose tokenizer and context length are taken.
    texts: documents.
    max_tokens: no more contexts are read than hold this many.

  Raises:
    UserError: the text does not fill one context.
  """
  length, tokens = opened.config.context_length, [opened.tokenizer.eos_id]
  for text in texts:
    tokens += [*opened.tokenizer.encode(text), opened.tokenizer.eos_id]
    if len(tokens) >= max_tokens:
      break
  count = min(len(tokens), max_tokens) // length
  if count == 0:
    raise UserError(f"{len(tokens)} tokens do not fill one context of {length}; give more text or a larger limit")
  return np.array(tokens[: count * length], np.int32).reshape(count, length)


def batches(contexts_BL: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
  """Yields parts that all have one shape, the last filled up with zeros, and how many sequences of each are real."""
  count, length = contexts_BL.shape
  rows = max(1, min(_TOKENS_PER_CALL // length, count))
  for first in range(0, count, rows):
    part_BL = contexts_BL[first : first + rows]
    yield np.concatenate([part_BL, np.zeros((rows - len(part_BL), length), np.int32)]), len(part_BL)


def at_blocks(model: Transformer, tokens_BL: jax.Array, read: Callable[[jax.Array, nnx.Module], Any]) -> Any:
  """Returns `read(x_BLD, feedforward)` of every layer, stacked; x_BLD is what the feed-forward block gets."""
  real_BL = jnp.ones_like(tokens_BL, dtype=bool)
  angles = model.angles(jnp.arange(tokens_BL.shape[1])[None, :])

  def layer(x_BLD, block):
    q_BLHK, k_BLGK, v_BLGK = block.project(x_BLD, angles)
    o_BLHK = block.attention.attend(q_BLHK, k_BLGK, v_BLGK, None)
    found = read(block.feedforward_norm(x_BLD + block.attention.merge(o_BLHK)), block.feedforward)
    return block.finish(x_BLD, o_BLHK, real_BL)[0], found

  return jax.lax.scan(layer, model.embed(tokens_BL), model.blocks)[1]


def capture(opened: OpenedModel, contexts_BL: np.ndarray) -> list[Captured]:
  """Runs the model once.

  Returns:
    For every layer, inputs of B * L rows in the order of the tokens, and weights, both in the compute dtype.
  """
  (count, length), config = contexts_BL.shape, opened.config
  dtype = RECIPES[opened.precision.recipe].compute_dtype
  x_NBLD = np.empty((config.num_layers, count, length, config.model_width), dtype)
  done = 0
  for part_BL, real in batches(contexts_BL):
    x_NBLD[:, done : done + real] = np.asarray(_inputs(opened.model, jnp.asarray(part_BL)))[:, :real]
    done += real
  block: Any = opened.model.blocks.feedforward  # all layers, stacked
  gated = hasattr(block, "w_gate_FD")
  return [
    Captured(
      x_MD=x_NBLD[n].reshape(-1, config.model_width),
      w_gate_FD=block.w_gate_FD[n].astype(dtype) if gated else None,
      w_up_FD=block.w_up_FD[n].astype(dtype),
      w_down_FD=block.w_down_FD[n].astype(dtype),
    )
    for n in range(config.num_layers)
  ]


@jax.jit(compiler_options=COMPILER_OPTIONS)
def _inputs(model: Transformer, tokens_BL) -> jax.Array:
  """[N, B, L, D]."""
  return at_blocks(model, tokens_BL, lambda x_BLD, feedforward: x_BLD)
