"""Text to token ids and back: a byte-level BPE trained on the corpus at hand, or a tokenizer.json that is given.

Text is always encoded as plain text: an end-of-text mark spelled out inside a document does not become the special
token, so that a document cannot forge its own end.
"""

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sparse_lm.config import LmConfig
from sparse_lm.data.cache import DamagedError, cache_root, load_or_build
from sparse_lm.data.corpus import Corpus
from sparse_lm.data.hub import tokenizer_file
from sparse_lm.data.progress import Report, reported
from sparse_lm.errors import UserError

EOS = "<|endoftext|>"
EOS_NAMES = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
_FORMAT_VERSION = 1
_SMALLEST_VOCAB = 256 + 1  # every byte, so that any text can be encoded, and the end of text
_BATCH_CHARACTERS = 1 << 20  # of text encoded at once: bounds memory, and is plenty for all cores


class Tokenizer:
  """A tokenizer.json in use; what it would add, cut or pad on its own is switched off."""

  def __init__(self, json_text: str, *, name: str):
    """Raises UserError, naming `name`, for text that is no tokenizer or has no end-of-text token."""
    library = _tokenizers()
    try:
      self._tokenizer = library.Tokenizer.from_str(json_text)
    except Exception as error:  # the library raises bare Exception
      raise UserError(f"{name}: is not a tokenizer.json ({error})") from error
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self._tokenizer.encode_special_tokens = True
    ids = self._tokenizer.get_vocab(with_added_tokens=True)
    found = [ids[token] for token in EOS_NAMES if token in ids]
    if not found:
      raise UserError(f"{name}: has no end-of-text token; looked for {', '.join(EOS_NAMES)}")
    self.eos_id: int = found[0]
    self.eos: str = self._tokenizer.id_to_token(self.eos_id)
    # Ids may leave gaps, and an embedding needs a row for the largest one.
    self.vocab_size: int = max(ids.values()) + 1
    self.fingerprint: str = hashlib.sha256(json_text.encode()).hexdigest()
    self.json_text = json_text

  @functools.cached_property
  def start_ids(self) -> list[int]:
    """What stands before every text: the mark that the tokenizer's own template puts there, else an end of text."""
    plain: list[int] = self._tokenizer.encode("a", add_special_tokens=False).ids
    marked: list[int] = self._tokenizer.encode("a", add_special_tokens=True).ids
    return marked[: marked.index(plain[0])] or [self.eos_id]

  def require_rows(self, rows: int, where: Path) -> None:
    """Raises UserError if a model, `where`, has fewer rows in its vocabulary than there are ids."""
    if self.vocab_size > rows:
      raise UserError(f"the tokenizer has {self.vocab_size} ids, but {where} has {rows} rows; give its own")

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, without end of text."""
    ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """Text of `ids`, special tokens spelled out."""
    text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
    return text

  def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yields the ids of each document followed by end of text; several documents at a time, on all cores.

    A document is encoded whole, for its tokens must not depend on where it was cut: a single one of 12 MB took 2.2 GB
    of memory, its training included, so a far larger file is better given as several documents.
    """
    for batch in _batches(texts):
      for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
        yield np.array([*encoding.ids, self.eos_id], np.uint32)


def given_tokenizer(config: LmConfig) -> Tokenizer:
  """The tokenizer of data.tokenizer."""
  vocab_size = config.model.vocab_size
  tokenizer = read_tokenizer(tokenizer_file(config.data), "data.tokenizer")
  if tokenizer.vocab_size > vocab_size:
    raise UserError(
      f"data.tokenizer={config.data.tokenizer!r} has {tokenizer.vocab_size} ids but model.vocab_size={vocab_size};"
      f" set model.vocab_size={tokenizer.vocab_size} or more"
    )
  return tokenizer


def open_tokenizer(config: LmConfig, corpus: Corpus, report: Report) -> Tokenizer:
  """The tokenizer of data.tokenizer, or one trained on the training documents of `corpus` (cached)."""
  if config.data.tokenizer is not None:
    return given_tokenizer(config)
  vocab_size = config.model.vocab_size
  if vocab_size < _SMALLEST_VOCAB:
    raise UserError(
      f"model.vocab_size={vocab_size} is too small for a byte-level tokenizer: it needs at least {_SMALLEST_VOCAB}"
      " (256 bytes and the end of text)"
    )
  made_from = f"tokenizer {_FORMAT_VERSION} {corpus.part_hash('training')} {vocab_size}"
  folder = cache_root(config.data) / "tokenizers" / hashlib.sha256(made_from.encode()).hexdigest()[:32]
  return load_or_build(
    folder,
    load=_load_cached,
    build=lambda new: _save(_train(corpus, vocab_size, report), new),
    report=report,
    what="tokenizer",
  )


def read_tokenizer(path: str, name: str) -> Tokenizer:
  """The tokenizer in a tokenizer.json; `name` is what the person who gave the path calls it.

  Raises:
    UserError: it cannot be read or is none.
  """
  try:
    json_text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
  except OSError as error:
    raise UserError(f"{name}={path!r}: cannot be read ({error.strerror})") from error
  except UnicodeDecodeError as error:
    raise UserError(f"{name}={path!r}: is not a tokenizer.json (not UTF-8 at byte {error.start})") from error
  return Tokenizer(json_text, name=f"{name}={path!r}")


def _train(corpus: Corpus, vocab_size: int, report: Report) -> str:
  library = _tokenizers()
  num_documents = corpus.num_documents("training")
  report(f"data: training a byte-level BPE of {vocab_size} tokens on {num_documents} documents")
  tokenizer = library.Tokenizer(library.models.BPE())
  tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = library.decoders.ByteLevel()
  trainer = library.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[EOS],
    initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(reported(corpus.texts("training"), "counting words", report), trainer)
  json_text: str = tokenizer.to_str(pretty=True)
  return json_text


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
  batch: list[str] = []
  characters = 0
  for text in texts:
    batch.append(text)
    characters += len(text) + 1  # an empty text takes its place too
    if characters >= _BATCH_CHARACTERS:
      yield batch
      batch, characters = [], 0
  if batch:
    yield batch


def _save(json_text: str, folder: Path) -> None:
  raw = json_text.encode()
  (folder / "tokenizer.json").write_bytes(raw)
  (folder / "sha256").write_text(hashlib.sha256(raw).hexdigest() + "\n")


def _load_cached(folder: Path) -> Tokenizer:
  file = folder / "tokenizer.json"
  try:
    raw, wanted = file.read_bytes(), (folder / "sha256").read_text().strip()
  except (OSError, UnicodeDecodeError) as error:
    raise DamagedError(f"{file} or its sha256 cannot be read ({error})") from error
  if hashlib.sha256(raw).hexdigest() != wanted:
    raise DamagedError(f"{file} ({len(raw)} bytes) does not match its sha256")
  return Tokenizer(raw.decode(), name=str(file))


def _tokenizers() -> ModuleType:
  try:
    import tokenizers
    import tokenizers.decoders
    import tokenizers.models
    import tokenizers.pre_tokenizers
    import tokenizers.trainers
  except ImportError as error:
    raise UserError("text data needs the package tokenizers: pip install -e '.[demo]'") from error
  library: Any = tokenizers
  return library
