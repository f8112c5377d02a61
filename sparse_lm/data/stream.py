"""Batches of text that is read while it is trained on: documents in source order, each tokenised whole, then EOS.

The blocks are those of packing.py, cut from one endless stream of tokens in which epoch follows epoch, so nothing is
dropped; global batch t holds blocks tB .. (t+1)B - 1 of it. In memory are about a million characters of text and a few
batches.

Every process reads and tokenises the whole stream and keeps its rows of each global batch. So the shares are disjoint
and P processes together see the batches that one process sees, whatever P is; the price is that the text is read P
times.

A state is the position of the first document still needed, how many of its tokens are used up, and the CRC-32 of its
tokens, by which a resumed run notices that it reads something else.

Dimension key: L tokens of a document.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import zlib
from collections.abc import Generator, Iterator

import numpy as np

from sparse_lm.config import LmConfig
from sparse_lm.data.batches import BatchIterator, State, share
from sparse_lm.data.dataset import Dataset, counts, require_a_block
from sparse_lm.data.hub import START, HubText, Position
from sparse_lm.data.packing import Batch, Blocks
from sparse_lm.data.prefetch import Prefetch
from sparse_lm.data.progress import Report
from sparse_lm.data.shards import memory_store
from sparse_lm.data.tokenizer import given_tokenizer
from sparse_lm.errors import UserError

_BATCHES_AHEAD = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamDataset(Dataset):
  """Training text is streamed in every epoch; the first documents of the stream are held out."""

  source: HubText
  first: Position  # of the first document to train on
  report: Report

  def training_batches(self, *, process_index: int = 0, process_count: int = 1) -> BatchIterator:
    """Returns the endless batches in source order, made by a thread that stays a few ahead."""
    rows = share(self.config.training.batch_size, process_index, process_count)
    return _StreamIterator(self, rows)


def open_stream(config: LmConfig, report: Report) -> StreamDataset:
  """Opens data.path on the hub, and reads the data.validation_documents that are held out."""
  tokenizer, source = given_tokenizer(config), HubText(config.data, report)
  wanted = config.data.validation_documents
  stream = source.read(START)
  held_out = [text for _, text in itertools.islice(stream, wanted)]
  first, _ = next(stream, (None, None))
  if first is None:
    raise UserError(
      f"{source.name}: holds {len(held_out)} documents, and data.validation_documents={wanted} leaves none to train on"
    )
  validation = None
  if held_out:
    store = memory_store(list(tokenizer.encode_documents(held_out)))
    blocks = Blocks(store, config.model.context_length, config.data.document_mask)
    remedy = "raise data.validation_documents (0: no validation) or lower model.context_length"
    validation = require_a_block("validation", blocks, remedy)
  layout = {
    "files": source.files,
    "split": config.data.hub_split,
    "validation_documents": wanted,
    "tokenizer": tokenizer.fingerprint,
    "block_length": config.model.context_length,
    "document_mask": config.data.document_mask,
  }
  fingerprint = hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()
  report(f"data: training documents are streamed; {counts('validation', validation)}")
  return StreamDataset(
    config=config,
    validation=validation,
    tokenizer=tokenizer,
    fingerprint=fingerprint,
    source=source,
    first=first,
    report=report,
  )


@dataclasses.dataclass(frozen=True)
class _Document:
  epoch: int  # from 1
  position: Position
  tokens_L: np.ndarray  # EOS included, hence never empty


class _StreamIterator:
  """Its state is that of the last batch handed out; the thread starts with the first batch that is asked for."""

  def __init__(self, dataset: StreamDataset, rows: range):
    self._dataset, self._rows = dataset, rows
    self._state: State = {"batches": 0, "epoch": 1, "position": dataset.first, "skip": 0, "crc32": None}
    self._ahead: Prefetch[tuple[Batch, State]] | None = None

  def __iter__(self) -> BatchIterator:
    return self

  def __next__(self) -> Batch:
    if self._ahead is None:
      self._ahead = Prefetch(_batches(self._dataset, self._rows, self._state), ahead=_BATCHES_AHEAD)
    batch, self._state = next(self._ahead)
    return batch

  def state(self) -> State:
    return self._state

  def restore(self, state: State) -> None:
    self.close()
    self._state = state

  def close(self) -> None:
    if self._ahead is not None:
      self._ahead.close()
      self._ahead = None


def _batches(dataset: StreamDataset, rows: range, state: State) -> Generator[tuple[Batch, State]]:
  """Yields `rows` of each global batch from `state` on, and the state after it."""
  training, length = dataset.config.training, dataset.config.model.context_length
  used = training.batch_size * length  # tokens that a batch uses up; it needs one more, the last target
  held: collections.deque[_Document] = collections.deque()
  number, skip, crc = state["batches"], state["skip"], state["crc32"]
  available = -skip
  for document in _documents(dataset, state["epoch"], state["position"], least=used + 1):
    if crc is not None and crc != zlib.crc32(document.tokens_L):
      raise UserError(
        f"{dataset.source.name}: document {document.position['document']}, where the checkpoint goes on, is another one"
        " than when it was saved; restore the files, or give another --workdir"
      )
    crc = None
    held.append(document)
    available += len(document.tokens_L)
    while available > used:
      batch = _cut(held, skip, used + 1, dataset).gather(np.arange(rows.start, rows.stop))
      number, skip, available = number + 1, skip + used, available - used
      while skip >= len(held[0].tokens_L):
        skip -= len(held.popleft().tokens_L)
      head = held[0]
      after = {"epoch": head.epoch, "position": head.position, "crc32": zlib.crc32(head.tokens_L)}
      yield batch, {"batches": number, "skip": skip} | after


def _cut(held: collections.deque[_Document], skip: int, length: int, dataset: StreamDataset) -> Blocks:
  """The blocks in `length` tokens of the documents held, after the first `skip` of them."""
  pieces: list[np.ndarray] = []
  for document in held:
    pieces.append(document.tokens_L[0 if pieces else skip :][:length])
    length -= len(pieces[-1])
  config = dataset.config
  return Blocks(memory_store(pieces), config.model.context_length, config.data.document_mask)


def _documents(dataset: StreamDataset, epoch: int, position: Position, *, least: int) -> Iterator[_Document]:
  """Yields documents for ever; raises UserError if a whole epoch has fewer than `least` tokens."""
  source, first = dataset.source, dataset.first
  while True:
    positions: collections.deque[Position] = collections.deque()

    def texts(start: Position, positions: collections.deque[Position]) -> Iterator[str]:
      for position, text in source.read(start):
        positions.append(position)
        yield text

    whole, num_tokens, num_documents = position == first, 0, position["document"]
    for tokens_L in dataset.tokenizer.encode_documents(texts(position, positions)):
      yield _Document(epoch, positions.popleft(), tokens_L)
      num_tokens, num_documents = num_tokens + len(tokens_L), num_documents + 1
    if whole and num_tokens < least:
      raise UserError(
        f"{source.name}: holds {num_tokens} tokens in {num_documents - first['document']} training documents, but a"
        f" batch needs {least} (training.batch_size={dataset.config.training.batch_size} blocks of"
        f" model.context_length={dataset.config.model.context_length}, and a last target); give more text or smaller"
        " batches"
      )
    epoch, position = epoch + 1, first
    dataset.report(f"data: {source.name} ends after {num_documents:,} documents; epoch {epoch} starts over")
