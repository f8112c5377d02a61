"""From a config to batches, against an oracle that knows only files, hashes and the tokenizer's encode."""

import hashlib
import math

import numpy as np
import pytest

from sparse_lm.config import LmConfig
from sparse_lm.data import open_dataset, training_batches
from sparse_lm.errors import UserError


def oracle_streams(folder, fraction, tokenizer):
  """Token streams of training and validation as flat lists."""
  texts = [file.read_text() for file in sorted(folder.glob("*.txt"))]
  salt = b"sparse-lm validation split 1"
  rank = {text: hashlib.sha256(salt + hashlib.sha256(text.encode()).digest()).hexdigest() for text in texts}
  held_out = sorted(texts, key=rank.__getitem__)[: math.ceil(fraction * len(texts))]
  streams = {True: [], False: []}
  for text in texts:
    streams[text in held_out] += [*tokenizer.encode(text), tokenizer.eos_id]
  return streams[False], streams[True]


@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_blocks_hold_the_documents_of_their_side_in_order(config, corpus_folder, lines, fraction):
  config.data.validation_fraction = fraction
  dataset = open_dataset(config, report=lines.append)
  training, validation = oracle_streams(corpus_folder, fraction, dataset.tokenizer)
  for blocks, stream in ((dataset.train, training), (dataset.validation, validation)):
    if blocks is None:
      assert fraction == 0
      continue
    assert blocks.num_tokens == len(stream)
    assert len(blocks) == (len(stream) - 1) // 8
    batch = blocks.gather(np.arange(len(blocks)))
    assert batch["inputs_BL"].reshape(-1).tolist() == stream[: 8 * len(blocks)]
    assert batch["targets_BL"].reshape(-1).tolist() == stream[1 : 8 * len(blocks) + 1]
    assert batch["weights_BL"].all()


def test_the_last_line_gives_the_counts(config, lines):
  dataset = open_dataset(config, report=lines.append)
  train, validation = dataset.train, dataset.validation
  assert lines[-1] == (
    f"data: 16 training documents, {train.num_tokens:,} tokens, {len(train):,} blocks of 8;"
    f" 4 validation documents, {validation.num_tokens:,} tokens, {len(validation):,} blocks of 8"
  )
  config.data.validation_fraction = 0.0
  open_dataset(config, report=lines.append)
  assert lines[-1].endswith("blocks of 8; no validation")


def test_document_mask_takes_the_first_target_of_each_document_out(config, lines):
  config.data.document_mask = True
  blocks = open_dataset(config, report=lines.append).train
  weights_BL = blocks.gather(np.arange(len(blocks)))["weights_BL"]
  starts = [int(start) for start in blocks.store.starts_N[1:-1] if start <= 8 * len(blocks)]
  assert np.flatnonzero(weights_BL.reshape(-1) == 0).tolist() == [start - 1 for start in starts]
  assert len(starts) >= 14


def test_a_second_start_builds_nothing_and_gives_the_same(config, lines):
  first = open_dataset(config, report=lines.append)
  counts = lines[-1]
  assert sum("tokenising" in line for line in lines) == 2
  lines.clear()
  second = open_dataset(config, report=lines.append)
  assert lines == [f"data: reading {config.data.path}", counts]
  assert second.fingerprint == first.fingerprint


@pytest.mark.parametrize("how", ["cut", "delete", "flip"])
@pytest.mark.parametrize("name", ["tokens-00001.bin", "starts.npy", "index.json"])
def test_a_damaged_cache_is_said_and_rebuilt_and_the_counts_are_the_first_runs(
  config, lines, tmp_path, monkeypatch, name, how
):  # F35
  monkeypatch.setattr("sparse_lm.data.shards.SHARD_TOKENS", 100)
  first = open_dataset(config, report=lines.append)
  counts = lines[-1]
  blocks = first.train.gather(np.arange(len(first.train)))
  file = max(tmp_path.glob(f"cache/tokens/*/{name}"), key=lambda path: len(list(path.parent.iterdir())))  # training
  raw = file.read_bytes()
  file.unlink()
  if how != "delete":
    place = raw.rindex(b"100") if name == "index.json" else len(raw) // 2
    file.write_bytes(raw[:-10] if how == "cut" else raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
  lines.clear()
  second = open_dataset(config, report=lines.append)
  assert sum(f"cached training tokens damaged: {file}" in line for line in lines) == 1
  assert sum("building anew" in line for line in lines) == 1  # validation was not damaged
  assert lines[-1] == counts
  assert file.read_bytes() == raw
  for key, array in second.train.gather(np.arange(len(second.train))).items():
    np.testing.assert_array_equal(array, blocks[key])


def test_the_fingerprint_follows_everything_that_changes_blocks_and_nothing_else(
  config, corpus_folder, lines, tmp_path
):
  fingerprints = [open_dataset(config, report=lines.append).fingerprint]
  for section, field, value in (
    ("data", "document_mask", True),
    ("model", "context_length", 9),
    ("model", "vocab_size", 280),
    ("data", "validation_fraction", 0.3),
    ("data", "validation_fraction", 0.0),
  ):
    setattr(getattr(config, section), field, value)
    fingerprints.append(open_dataset(config, report=lines.append).fingerprint)
  (corpus_folder / "03.txt").write_text("one document is another")
  fingerprints.append(open_dataset(config, report=lines.append).fingerprint)
  assert len(set(fingerprints)) == 7
  corpus_folder.rename(tmp_path / "moved")
  config.data.path, config.data.cache_dir = str(tmp_path / "moved"), str(tmp_path / "other cache")
  config.data.loader, config.seed, config.training.batch_size = "numpy", 5, 3
  assert open_dataset(config, report=lines.append).fingerprint == fingerprints[-1]


def test_an_edited_document_is_tokenised_again_and_not_taken_from_the_cache(config, corpus_folder, lines):
  config.data.validation_fraction = 0.0
  before = open_dataset(config, report=lines.append)
  (corpus_folder / "05.txt").write_text("entirely different")
  after = open_dataset(config, report=lines.append)
  assert after.train.num_tokens != before.train.num_tokens


def test_a_tokenizer_swapped_for_another_does_not_meet_the_old_tokens(config, lines):
  first = open_dataset(config, report=lines.append)
  config.model.vocab_size = 270
  second = open_dataset(config, report=lines.append)
  assert second.train.num_tokens > first.train.num_tokens
  assert "Document 0 counts: 0".startswith(second.tokenizer.decode(second.train.gather([0])["inputs_BL"][0]))


def test_a_corpus_shorter_than_a_block_is_refused_with_its_counts(config, corpus_folder, lines):
  tokens = open_dataset(config, report=lines.append).validation.num_tokens
  config.model.context_length = tokens - 1  # inputs and targets together take one token more
  open_dataset(config, report=lines.append)
  config.model.context_length = tokens
  message = (
    rf"validation part holds {tokens} tokens in 4 documents, .*context_length={tokens} needs {tokens + 1}; .*0: no"
  )
  with pytest.raises(UserError, match=message):
    open_dataset(config, report=lines.append)
  for file in corpus_folder.iterdir():
    file.write_text("same")
  config.data.validation_fraction = 0.0
  with pytest.raises(
    UserError, match=rf"training part holds \d+ tokens in 20 documents, .* needs {tokens + 1}; give more"
  ):
    open_dataset(config, report=lines.append)


def test_one_unreadable_file_of_two_stops_the_run(config, corpus_folder, lines):  # F35
  (corpus_folder / "21.txt").write_bytes(b"caf\xe9")
  with pytest.raises(UserError, match=r"21\.txt: not UTF-8 text: byte 3 is 0xe9"):
    open_dataset(config, report=lines.append)


def test_the_same_texts_as_files_lines_or_rows_are_the_same_data(config, corpus_folder, lines, tmp_path):
  import json

  import pyarrow as pa
  import pyarrow.parquet as pq

  texts = [file.read_text() for file in sorted(corpus_folder.iterdir())]
  (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
  found = set()
  for path in (corpus_folder, tmp_path / "a.jsonl", tmp_path / "a.parquet"):
    config.data.path = str(path)
    found.add(open_dataset(config, report=lines.append).fingerprint)
  assert len(found) == 1


def test_long_steps_report_on_their_way(config, lines, monkeypatch):
  monkeypatch.setattr("sparse_lm.data.progress._SECONDS_BETWEEN_LINES", 0.0)
  open_dataset(config, report=lines.append)
  for step in ("reading", "counting words", "tokenising training documents", "tokenising validation documents"):
    assert any(line.startswith(f"data: {step}, ") and line.endswith("M characters so far") for line in lines), step


@pytest.mark.slow  # 10 s alone on two cores, 30 s beside other work
def test_sotu_end_to_end(tmp_path, lines):
  config = LmConfig()
  config.data.cache_dir = str(tmp_path)
  dataset = open_dataset(config, report=lines.append)
  assert (dataset.train.num_documents, dataset.validation.num_documents) == (236, 13)
  assert dataset.tokenizer.vocab_size == 4096
  assert 2.6e6 < dataset.train.num_tokens + dataset.validation.num_tokens < 3.1e6
  batch = next(training_batches(dataset.train, batch_size=16, seed=0, loader="numpy"))
  assert batch["inputs_BL"].shape == (16, 128)
  assert batch["inputs_BL"].max() < 4096
  assert " the " in dataset.tokenizer.decode(batch["inputs_BL"].reshape(-1))
