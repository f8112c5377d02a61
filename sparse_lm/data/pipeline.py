"""From a config to its data set. A corpus becomes blocks of tokens: read and hash it, split, tokenise, check, count."""

import dataclasses
import hashlib
import json
from pathlib import Path

from sparse_lm.config import LmConfig
from sparse_lm.data import shards
from sparse_lm.data.batches import BatchIterator, training_batches
from sparse_lm.data.cache import cache_root, load_or_build
from sparse_lm.data.corpus import Corpus, Part, read_corpus
from sparse_lm.data.dataset import Dataset, counts, require_a_block
from sparse_lm.data.packing import Blocks
from sparse_lm.data.progress import Report, reported
from sparse_lm.data.stream import open_stream
from sparse_lm.data.tokenizer import Tokenizer, open_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusDataset(Dataset):
  """Every block of the corpus is on disk, and each epoch draws all of them in an order of its own."""

  train: Blocks

  def training_batches(self, *, process_index: int = 0, process_count: int = 1) -> BatchIterator:
    """Returns the endless shuffled batches of data.loader."""
    return training_batches(
      self.train,
      batch_size=self.config.training.batch_size,
      seed=self.config.seed,
      process_index=process_index,
      process_count=process_count,
      loader=self.config.data.loader,
    )


def open_dataset(config: LmConfig, *, report: Report) -> Dataset:
  """Opens the data of a run.

  Args:
    config: reads `data`, `model.vocab_size` and `model.context_length`; batches also `training.batch_size` and `seed`.
    report: receives plain lines about what is found and what takes long, also from a thread that builds batches.

  Returns:
    The same value for the same config and files, on any machine.
  """
  return open_stream(config, report) if config.data.source == "hub" else _open_corpus(config, report)


def _open_corpus(config: LmConfig, report: Report) -> CorpusDataset:
  """Everything slow is cached on disk, checked, and built again where damaged."""
  report(f"data: reading {config.data.source if config.data.path is None else config.data.path}")
  corpus = read_corpus(config.data, report)
  tokenizer = open_tokenizer(config, corpus, report)
  train = _open_blocks("training", config, corpus, tokenizer, report)
  validation = None
  if config.data.validation_fraction > 0:
    validation = _open_blocks("validation", config, corpus, tokenizer, report)
  layout = {
    "texts_and_split": corpus.part_hash("validation"),
    "tokenizer": tokenizer.fingerprint,
    "block_length": config.model.context_length,
    "document_mask": config.data.document_mask,
    "format_version": shards.FORMAT_VERSION,
  }
  report(f"data: {counts('training', train)}; {counts('validation', validation)}")
  fingerprint = hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()
  return CorpusDataset(config=config, validation=validation, tokenizer=tokenizer, fingerprint=fingerprint, train=train)


def _open_blocks(part: Part, config: LmConfig, corpus: Corpus, tokenizer: Tokenizer, report: Report) -> Blocks:
  made_from = {"texts": corpus.part_hash(part), "tokenizer": tokenizer.fingerprint, "eos_id": tokenizer.eos_id}
  key = hashlib.sha256(json.dumps([shards.FORMAT_VERSION, made_from], sort_keys=True).encode()).hexdigest()[:32]

  def build(folder: Path) -> None:
    report(f"data: tokenising {corpus.num_documents(part):,} {part} documents")
    shards.write_store(
      folder,
      tokenizer.encode_documents(reported(corpus.texts(part), f"tokenising {part} documents", report)),
      vocab_size=tokenizer.vocab_size,
      made_from=made_from,
      shard_tokens=shards.SHARD_TOKENS,
    )

  store = load_or_build(
    cache_root(config.data) / "tokens" / key,
    load=lambda folder: shards.load_store(folder, made_from=made_from),
    build=build,
    report=report,
    what=f"{part} tokens",
  )
  remedy = "give more text or lower model.context_length"
  if part == "validation":
    remedy += ", or change data.validation_fraction (0: no validation)"
  return require_a_block(part, Blocks(store, config.model.context_length, config.data.document_mask), remedy)
