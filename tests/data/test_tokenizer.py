"""Training, reading and using a tokenizer."""

import os
import subprocess
import sys

import pytest

from sparse_lm.data import open_dataset
from sparse_lm.data.corpus import read_corpus
from sparse_lm.data.tokenizer import EOS, Tokenizer, open_tokenizer
from sparse_lm.errors import UserError

SAMPLES = [
  "",
  "plain",
  "a\r\nb\rc\n\n",
  "é 漢 \U0001f600 e\u0301\u200d",
  "\x01\t\x7f",
  " lead and trail ",
  EOS,
  f"x{EOS}y",
  "a" * 20_000,
]


def tokenizer_of(config, lines):
  return open_tokenizer(config, read_corpus(config.data, lines.append), lines.append)


def tokenizer_file(tmp_path, *, tokens=("a", "b", EOS), truncate=False, template=False):
  """A word tokenizer as someone else might have saved it."""
  import tokenizers

  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="a")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  if EOS in tokens:
    tokenizer.add_special_tokens([EOS])
  if truncate:
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
  if template:
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
      single=f"{EOS} $A", special_tokens=[(EOS, tokens.index(EOS))]
    )
  path = tmp_path / "given.json"
  tokenizer.save(str(path))
  return str(path)


def test_any_text_survives_a_round_trip_though_training_never_saw_it(config, lines):
  tokenizer = tokenizer_of(config, lines)
  for text in SAMPLES:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_end_of_text_mark_spelled_out_in_a_document_is_not_the_end_of_text(config, lines):
  tokenizer = tokenizer_of(config, lines)
  for document in tokenizer.encode_documents(SAMPLES):
    assert list(document).count(tokenizer.eos_id) == 1
    assert document[-1] == tokenizer.eos_id


def test_encoding_many_documents_equals_encoding_each(config, lines, monkeypatch):
  tokenizer = tokenizer_of(config, lines)
  monkeypatch.setattr("sparse_lm.data.tokenizer._BATCH_CHARACTERS", 1000)  # so that there are many batches
  texts = [*SAMPLES, *[f"document {n}" for n in range(500)], "b " * 60_000, "", *[""] * 100]
  encoded = [list(document) for document in tokenizer.encode_documents(texts)]
  assert encoded == [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]


def test_the_vocabulary_has_the_size_asked_for_or_fewer_if_the_corpus_is_small(config, lines):
  assert tokenizer_of(config, lines).vocab_size == 300
  config.model.vocab_size = 257  # bytes only
  assert tokenizer_of(config, lines).vocab_size == 257
  config.model.vocab_size = 50_000
  assert 300 < tokenizer_of(config, lines).vocab_size < 1000


def test_a_vocabulary_below_the_bytes_is_refused(config, lines):
  config.model.vocab_size = 256
  with pytest.raises(UserError, match=r"vocab_size=256 is too small .* at least 257"):
    tokenizer_of(config, lines)


def test_validation_documents_do_not_shape_the_tokenizer(config, corpus_folder, lines):
  with_held_out = tokenizer_of(config, lines)
  training = set(read_corpus(config.data, lines.append).texts("training"))
  for file in corpus_folder.iterdir():
    if file.read_text() not in training:
      file.unlink()
  config.data.validation_fraction = 0.0
  assert len(list(corpus_folder.iterdir())) == 16
  assert tokenizer_of(config, lines).json_text == with_held_out.json_text


def test_training_gives_the_same_bytes_in_another_process_with_other_hash_seeds_and_thread_counts(config, lines):
  script = (
    "import sys; from sparse_lm.config import LmConfig; from sparse_lm.data import open_dataset; c = LmConfig();"
    "c.model.vocab_size, c.model.context_length, c.data.source = 300, 8, 'text';"
    "c.data.path, c.data.cache_dir, c.data.validation_fraction = sys.argv[1], sys.argv[2], 0.2;"
    "d = open_dataset(c, report=lambda s: None); print(d.tokenizer.fingerprint, d.fingerprint, 'jax' in sys.modules)"
  )
  here = open_dataset(config, report=lines.append)
  for seed, threads in (("1", "1"), ("2", "3")):
    environment = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
    command = [sys.executable, "-c", script, config.data.path, config.data.cache_dir + seed]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert out == [here.tokenizer.fingerprint, here.fingerprint, "False"]


def test_a_second_start_reads_the_cached_tokenizer(config, lines):
  first = tokenizer_of(config, lines)
  assert any("training a byte-level BPE of 300 tokens on 16 documents" in line for line in lines)
  lines.clear()
  assert tokenizer_of(config, lines).fingerprint == first.fingerprint
  assert lines == []


@pytest.mark.parametrize("damage", ["cut", "flip", "delete", "no_sum", "empty"])
def test_a_damaged_cached_tokenizer_is_said_and_rebuilt(config, lines, tmp_path, damage):  # F35
  first = tokenizer_of(config, lines)
  (file,) = tmp_path.glob("cache/tokenizers/*/tokenizer.json")
  raw = file.read_bytes()
  if damage == "delete":
    file.unlink()
  elif damage == "no_sum":
    (file.parent / "sha256").unlink()
  else:
    file.write_bytes({"cut": raw[:-10], "flip": raw.replace(b'"a"', b'"b"', 1), "empty": b""}[damage])
  lines.clear()
  assert tokenizer_of(config, lines).fingerprint == first.fingerprint
  assert "cached tokenizer damaged" in lines[0]
  assert str(file) in lines[0]
  assert file.read_bytes() == raw


def test_a_given_tokenizer_is_used_without_what_it_would_cut_pad_or_add(config, lines, tmp_path):
  config.data.tokenizer = tokenizer_file(tmp_path, truncate=True, template=True)
  tokenizer = tokenizer_of(config, lines)
  assert tokenizer.encode("b a b a") == [1, 0, 1, 0]
  assert [list(d) for d in tokenizer.encode_documents(["b a b a", "b"])] == [[1, 0, 1, 0, 2], [1, 2]]
  assert (tokenizer.eos_id, tokenizer.vocab_size) == (2, 3)


def test_a_tokenizer_that_this_library_trained_can_be_given(config, lines, tmp_path):
  trained = tokenizer_of(config, lines)
  (file,) = tmp_path.glob("cache/tokenizers/*/tokenizer.json")
  config.data.tokenizer = str(file)
  assert tokenizer_of(config, lines).fingerprint == trained.fingerprint


@pytest.mark.parametrize("eos", ["</s>", "<|end_of_text|>", "<eos>", "<|im_end|>"])
def test_other_names_of_the_end_of_text_are_known(config, lines, tmp_path, eos):
  config.data.tokenizer = tokenizer_file(tmp_path, tokens=("a", eos, "b"))
  assert tokenizer_of(config, lines).eos_id == 1


def test_a_tokenizer_without_end_of_text_is_refused_with_what_was_looked_for(config, lines, tmp_path):
  config.data.tokenizer = tokenizer_file(tmp_path, tokens=("a", "b"))
  looked_for = r"<\|endoftext\|>, </s>, <\|end_of_text\|>, <eos>, <\|im_end\|>"
  with pytest.raises(UserError, match=rf"given\.json'.* no end-of-text token; looked for {looked_for}"):
    tokenizer_of(config, lines)


def test_a_given_vocabulary_larger_than_the_models_is_refused_with_both_numbers(config, lines, tmp_path):
  config.data.tokenizer = tokenizer_file(tmp_path, tokens=(*map(str, range(300)), EOS))
  with pytest.raises(UserError, match=r"has 301 ids but model\.vocab_size=300; set model\.vocab_size=301"):
    tokenizer_of(config, lines)
  config.model.vocab_size = 301
  assert tokenizer_of(config, lines).vocab_size == 301


def test_the_largest_id_counts_not_the_number_of_tokens(tmp_path):
  path = tokenizer_file(tmp_path)
  with open(path) as file:
    text = file.read().replace('"b": 1', '"b": 500')
  assert Tokenizer(text, name="x").vocab_size == 501


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"version": "1.0"}', b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_named(config, lines, tmp_path, content):
  config.data.tokenizer = str(tmp_path / "bad.json")
  (tmp_path / "bad.json").write_bytes(content)
  with pytest.raises(UserError, match=r"data\.tokenizer='.*bad\.json': is not a tokenizer\.json"):
    tokenizer_of(config, lines)


def test_a_tokenizer_file_that_does_not_exist_is_named(config, lines, tmp_path):
  config.data.tokenizer = str(tmp_path / "gone.json")
  with pytest.raises(UserError, match=r"data\.tokenizer='.*gone\.json': cannot be read \(No such file"):
    tokenizer_of(config, lines)


def test_without_the_tokenizers_package_the_extra_is_named(config, lines, monkeypatch):
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  with pytest.raises(UserError, match=r"needs the package tokenizers: pip install -e '\.\[demo\]'"):
    tokenizer_of(config, lines)
