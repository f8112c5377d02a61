"""Text that goes on from prompts: a batch of any lengths, streamed, each sequence ending on its own.

The device is one step ahead of the host: while it reads the newest tokens, the host turns those before into text.

Dimension key: B sequences, L tokens of the longest prompt.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm.errors import UserError
from sparse_lm.inference.decoding import Decoder
from sparse_lm.inference.opening import OpenedModel
from sparse_lm.inference.sampling import Sampling
from sparse_lm.inference.text_stream import TextStream

# Lengths are rounded up to this, so that prompts of nearly the same length share one program.
_ROUND = 64
_CONTEXT_OF_TEXT = 8  # tokens; plenty to decode what follows as its continuation

Reason = Literal["end of text", "stop string", "max_tokens", "context is full"]


@dataclasses.dataclass(frozen=True)
class Piece:
  """A bit of text of one sequence, and with its last bit why it ended."""

  prompt: int  # which
  text: str
  tokens: int  # chosen for this sequence so far
  end: Reason | None


class Generator:
  """A model ready to generate; keep it for several calls."""

  def __init__(self, opened: OpenedModel):
    self._opened = opened
    self._decoder = Decoder(opened.model)

  def stream(
    self,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    seed: int = 0,
    stop: Sequence[str] = (),
    first_number: int = 0,
  ) -> Iterator[Piece]:
    """Yields the text that follows each prompt as it comes, pieces of all prompts in turn.

    The text of a prompt depends on the prompt, its number and the seed, up to rounding, and not on the others.

    Args:
      prompts: encoded as plain text after the mark of a text's start, the way documents stand in training.
      max_tokens: for each prompt.
      sampling: how a token is chosen.
      seed: of the draws.
      stop: texts that end a sequence and are not part of it.
      first_number: of the first prompt, where these are part of a longer list.

    Raises:
      UserError: a prompt does not fit into the context, or an argument is out of range. Nothing is yielded then.
    """
    ids = self.encode(prompts)
    if max_tokens < 1:
      raise UserError(f"max_tokens={max_tokens} must be at least 1")
    if "" in stop:
      raise UserError("stop='' would stop before the first token; leave it out")
    return self._stream(ids, max_tokens, sampling, seed, stop, first_number) if ids else iter(())

  def encode(self, prompts: Sequence[str]) -> list[list[int]]:
    """Ids of each prompt, start mark included; raises UserError for one that leaves no room in the context."""
    tokenizer, context = self._opened.tokenizer, self._opened.config.context_length
    encoded = [[*tokenizer.start_ids, *tokenizer.encode(prompt)] for prompt in prompts]
    for number, ids in enumerate(encoded, start=1):
      if len(ids) >= context:
        raise UserError(
          f"prompt {number} has {len(ids)} tokens, its start mark included, but the model's context holds {context} and"
          f" needs room for at least one more; shorten it by {len(ids) - context + 1} tokens"
        )
    return encoded

  def _stream(self, ids, max_tokens, sampling, seed, stop, first_number) -> Iterator[Piece]:
    context, lengths = self._opened.config.context_length, [len(row) for row in ids]
    room = [min(max_tokens, context - length) for length in lengths]
    slots = _rounded(max(length + n for length, n in zip(lengths, room)))
    tokens_BL = np.zeros((len(ids), min(_rounded(max(lengths)), slots)), np.int32)
    for row_L, row_ids in zip(tokens_BL, ids):
      row_L[: len(row_ids)] = row_ids
    numbers_B = jnp.arange(first_number, first_number + len(ids))
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers_B)
    now = self._decoder.start(
      jnp.asarray(tokens_BL), jnp.asarray(lengths, jnp.int32), keys_B, slots=slots, sampling=sampling
    )
    texts = [TextStream(self._opened.tokenizer, row_ids[-_CONTEXT_OF_TEXT:], stop=stop) for row_ids in ids]
    open_rows = set(range(len(ids)))
    for count in range(1, max(room) + 1):
      tokens_B = now.tokens_B
      if count < max(room):
        now = self._decoder.advance(now, keys_B, sampling=sampling)  # runs while the host goes on
      for row, token in enumerate(np.asarray(tokens_B).tolist()):
        if row in open_rows:
          piece = self._piece(row, token, count, texts[row], room[row], max_tokens)
          if piece.end is not None:
            open_rows.remove(row)
          yield piece
      if not open_rows:
        return

  def _piece(self, row: int, token: int, count: int, text: TextStream, room: int, max_tokens: int) -> Piece:
    if token == self._opened.tokenizer.eos_id:
      return Piece(row, text.finish(), count, "end of text")
    new = text.push(token)
    if text.stopped:
      return Piece(row, new, count, "stop string")
    if count < room:
      return Piece(row, new, count, None)
    return Piece(row, new + text.finish(), count, "max_tokens" if room == max_tokens else "context is full")


def _rounded(length: int) -> int:
  return -(-length // _ROUND) * _ROUND
