"""A small corpus, a config that reads it, and the lines that were reported."""

import pytest

from sparse_lm.config import LmConfig


@pytest.fixture
def lines():
  """Everything that was reported, in order; pass `lines.append`."""
  return []


@pytest.fixture
def corpus_folder(tmp_path):
  """Twenty short texts of different lengths."""
  folder = tmp_path / "corpus"
  folder.mkdir()
  for number in range(20):
    (folder / f"{number:02d}.txt").write_text(f"Document {number} counts: " + " ".join(map(str, range(number * 3 + 1))))
  return folder


@pytest.fixture
def config(corpus_folder, tmp_path):
  """Reads `corpus_folder` into blocks of 8 tokens and caches in tmp_path/cache."""
  result = LmConfig()
  result.model.vocab_size, result.model.context_length = 300, 8
  result.data.source, result.data.path = "text", str(corpus_folder)
  result.data.cache_dir, result.data.validation_fraction = str(tmp_path / "cache"), 0.2
  result.validate()
  return result
