"""From scores to a token: greedy, or drawn at a temperature from the most likely ones.

Dimension key: B sequences, V vocabulary.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from sparse_lm.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How the next token is chosen. Temperature first, then top-k, then top-p, each over what the one before has left."""

  temperature: float = 0.0  # 0: always the most likely token, the lower id if two are equally likely
  top_k: int | None = None  # draws from the k most likely; None: from all
  top_p: float | None = None  # draws from the fewest most likely that together reach this probability; None: from all

  def __post_init__(self):
    """Raises UserError for values out of range."""
    if not (self.temperature >= 0 and math.isfinite(self.temperature)):
      raise UserError(f"temperature={self.temperature} must be at least 0 and finite")
    if self.top_k is not None and self.top_k < 1:
      raise UserError(f"top_k={self.top_k} must be at least 1")
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise UserError(f"top_p={self.top_p} must lie in (0, 1]")
    if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
      raise UserError(
        f"top_k={self.top_k} and top_p={self.top_p} have no effect at temperature=0; set a temperature, such as 1"
      )


def choose(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
  """Returns i32[B], the chosen token of each sequence.

  Args:
    logits_BV: scores, in any dtype.
    keys_B: a random key for each sequence; not read at temperature 0.
    sampling: how.
  """
  if sampling.temperature == 0:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  scores_BV = logits_BV.astype(jnp.float32) / sampling.temperature
  ids_BV = None  # the candidates of each column, where they are not the whole vocabulary in its order
  if sampling.top_k is not None or sampling.top_p is not None:
    vocab_size = scores_BV.shape[-1]
    scores_BV, ids_BV = jax.lax.top_k(scores_BV, min(sampling.top_k or vocab_size, vocab_size))
  if sampling.top_p is not None:
    p_BV = jax.nn.softmax(scores_BV, axis=-1)
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    kept_BV = (before_BV < sampling.top_p).at[:, 0].set(True)  # one stays, whatever rounding says
    scores_BV = jnp.where(kept_BV, scores_BV, -jnp.inf)
  chosen_B = jax.vmap(jax.random.categorical)(keys_B, scores_BV)
  if ids_BV is not None:
    chosen_B = jnp.take_along_axis(ids_BV, chosen_B[:, None], axis=-1)[:, 0]
  return chosen_B.astype(jnp.int32)
