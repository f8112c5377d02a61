"""From a config to blocks of tokens: read and hash the corpus, split it, get its tokenizer, tokenise, check, count."""

import dataclasses
import hashlib
import json
from pathlib import Path

from sparse_lm.config import LmConfig
from sparse_lm.data import shards
from sparse_lm.data.cache import cache_root, load_or_build
from sparse_lm.data.corpus import Corpus, Part, read_corpus
from sparse_lm.data.packing import Blocks
from sparse_lm.data.progress import Report, reported
from sparse_lm.data.tokenizer import Tokenizer, open_tokenizer
from sparse_lm.errors import UserError


@dataclasses.dataclass(frozen=True)
class Dataset:
  """What a run trains and is judged on; counts of tokens and documents are fields of the two `Blocks`."""

  train: Blocks
  validation: Blocks | None  # None: data.validation_fraction is 0
  tokenizer: Tokenizer
  fingerprint: str  # of texts, split, tokenizer and block layout: equal fingerprints mean equal blocks


def open_dataset(config: LmConfig, *, report: Report) -> Dataset:
  """Opens the data of a run; everything slow is cached on disk, checked, and built again where damaged.

  Args:
    config: reads `data`, `model.vocab_size` and `model.context_length`.
    report: receives plain lines about what is found and what takes long.

  Returns:
    The same value for the same config and files, on any machine.
  """
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
  held_out = "no validation" if validation is None else _counts("validation", validation)
  report(f"data: {_counts('training', train)}; {held_out}")
  fingerprint = hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()
  return Dataset(train, validation, tokenizer, fingerprint)


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
  blocks = Blocks(store, config.model.context_length, config.data.document_mask)
  if len(blocks) == 0:
    remedy = "give more text or lower model.context_length"
    if part == "validation":
      remedy += ", or change data.validation_fraction (0: no validation)"
    raise UserError(
      f"the {part} part holds {blocks.num_tokens} tokens in {blocks.num_documents} documents, but one block of"
      f" model.context_length={blocks.block_length} needs {blocks.block_length + 1}; {remedy}"
    )
  return blocks


def _counts(part: str, blocks: Blocks) -> str:
  return (
    f"{blocks.num_documents:,} {part} documents, {blocks.num_tokens:,} tokens,"
    f" {len(blocks):,} blocks of {blocks.block_length}"
  )
