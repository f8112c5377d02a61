"""Text that grows with every token, ready to print: no half characters, nothing that a stop string may take back."""

from collections.abc import Sequence

from sparse_lm.data.tokenizer import Tokenizer

_HALF_CHARACTER = "\ufffd"  # what a decoder gives for bytes that are no whole character yet


class TextStream:
  """Turns tokens into text as they come, and ends at the first stop string."""

  def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = (), *, stop: Sequence[str] = ()):
    """Starts a stream.

    Args:
      tokenizer: of the tokens.
      after: ids of whole text that the stream goes on from.
      stop: texts that end the stream, and are not part of it; none of them empty.
    """
    self._tokenizer, self._stop = tokenizer, tuple(stop)
    # Some decoders treat the first token in a special way, so each token is decoded together with the last ones before
    # it: `_ids` from `_read` on are not text yet, those before are there for that.
    self._ids = list(after)
    self._read = len(self._ids)
    self._held = ""  # decoded, but possibly the start of a stop string
    self.stopped = False  # a stop string has come

  def push(self, token: int) -> str:
    """Takes a token; returns the text that is certain now."""
    self._ids.append(token)
    before = self._tokenizer.decode(self._ids[: self._read])
    now = self._tokenizer.decode(self._ids)
    if now.endswith(_HALF_CHARACTER):
      return ""
    self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
    return self._release(now[len(before) :])

  def finish(self) -> str:
    """The rest: what was held back for a stop string that did not come, and half a character as it is."""
    if self.stopped:
      return ""
    before = self._tokenizer.decode(self._ids[: self._read])
    text = self._release(self._tokenizer.decode(self._ids)[len(before) :])
    if not self.stopped:
      text, self._held = text + self._held, ""
    return text

  def _release(self, text: str) -> str:
    text = self._held + text
    found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
    if found:
      self.stopped, self._held = True, ""
      return text[: min(found)]
    held = max((_overlap(text, stop) for stop in self._stop), default=0)
    self._held = text[len(text) - held :]
    return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
  """Length of the longest end of `text` that `stop` could go on from."""
  return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
