"""A folder that stands for a data set on the Hugging Face hub, and a tokenizer for it."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers


def stream_from(folder):
  """Writes 12 documents, 1,200 words, into `folder`; returns the changes that make a config stream them."""
  words = [f"w{n}" for n in range(200)]
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({word: n for n, word in enumerate([*words, "<|endoftext|>"])}, unk_token="w0")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  (folder / "hub").mkdir()
  tokenizer.save(str(folder / "tokenizer.json"))
  rng = random.Random(1)
  for part in range(3):
    texts = [" ".join(rng.choices(words[part * 50 :], k=length)) for length in (40, 200, 0, 160)]
    pq.write_table(pa.table({"text": texts}), folder / "hub" / f"train-{part}.parquet")
  return {
    "data.source": "hub",
    "data.path": str(folder / "hub"),
    "data.tokenizer": str(folder / "tokenizer.json"),
    "data.cache_dir": str(folder / "cache"),
    "data.validation_fraction": 0.0,
    "data.validation_documents": 3,
  }
