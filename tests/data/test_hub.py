"""Streaming from a folder that stands for the hub: the blocks of a corpus, resumed anywhere, shared by processes."""

import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from sparse_lm.config import LmConfig
from sparse_lm.data import open_dataset
from sparse_lm.data.packing import Blocks
from sparse_lm.data.shards import load_store, write_store
from sparse_lm.data.tokenizer import given_tokenizer
from sparse_lm.errors import UserError

WORDS, EOS = 90, 90
# Files of documents by their number of words: empty ones in a row, at both ends of a file, and one longer than a batch.
FILES = [[5, 0, 0, 3, 11], [0, 100, 0, 0], [1, 7], [0, 23, 2, 0]]
LENGTHS = [length for file in FILES for length in file]
BATCH, LENGTH = 4, 6  # 24 tokens a batch; an epoch has 167


def ids_of(number):
  """Ids of document `number`, all documents different."""
  return np.random.default_rng(number).integers(0, WORDS, LENGTHS[number]).tolist()


def text_of(number):
  return " ".join(f"w{n}" for n in ids_of(number))


def write_files(folder, texts, suffix=".parquet"):
  """`texts` in files like FILES; two rows a row group."""
  folder.mkdir(exist_ok=True)
  texts = iter(texts)
  for number, file in enumerate(FILES):
    rows = list(itertools.islice(texts, len(file)))
    path = folder / f"train-{number}{suffix}"
    if suffix == ".parquet":
      pq.write_table(pa.table({"id": range(len(rows)), "text": rows}), path, row_group_size=2)
    else:
      path.write_text("".join(json.dumps({"id": n, "text": row}) + "\n" for n, row in enumerate(rows)))
  return folder


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
  """Words w0 to w89 are ids 0 to 89; end of text is 90."""
  vocabulary = {f"w{n}": n for n in range(WORDS)} | {"<|endoftext|>": EOS}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
  tokenizer.save(str(path))
  return str(path)


@pytest.fixture
def config(tmp_path, tokenizer_path):
  """Streams FILES."""
  result = LmConfig()
  result.model.vocab_size, result.model.context_length, result.training.batch_size = 91, LENGTH, BATCH
  data = result.data
  data.source, data.path = "hub", str(write_files(tmp_path / "hub", map(text_of, range(len(LENGTHS)))))
  data.tokenizer, data.cache_dir, data.validation_fraction = tokenizer_path, str(tmp_path / "cache"), 0.0
  result.validate()
  return result


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
  """Seconds that would have been waited."""
  pauses = []
  sleep = time.sleep
  monkeypatch.setattr("sparse_lm.data.hub.time.sleep", lambda s: pauses.append(s) if s >= 1 else sleep(s))
  return pauses


@pytest.fixture
def open_batches(config, lines):
  """Opens the config's batches; all are closed at the end."""
  opened = []

  def open_batches(dataset=None, **share):
    opened.append((dataset or open_dataset(config, report=lines.append)).training_batches(**share))
    return opened[-1]

  yield open_batches
  for batches in opened:
    batches.close()


def take(batches, count):
  return [next(batches) for _ in range(count)]


def same(left, right):
  assert len(left) == len(right)
  for one, two in zip(left, right, strict=True):
    assert one.keys() == two.keys()
    for name in one:
      assert (one[name].dtype, one[name].shape) == (two[name].dtype, two[name].shape)
      np.testing.assert_array_equal(one[name], two[name])


def expected(folder, count, *, document_mask=False, held_out=0):
  """The first batches, as Blocks gives them for the stream that was written out by hand, epoch after epoch."""
  epoch = [np.array([*ids_of(number), EOS]) for number in range(held_out, len(LENGTHS))]
  documents = list(itertools.islice(itertools.cycle(epoch), 40 * len(epoch)))
  folder.mkdir(exist_ok=True)
  write_store(folder, documents, vocab_size=91, made_from={}, shard_tokens=1000)
  blocks = Blocks(load_store(folder, made_from={}), LENGTH, document_mask)
  return [blocks.gather(np.arange(t * BATCH, (t + 1) * BATCH)) for t in range(count)]


# The stream -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_batches_are_those_of_blocks_over_the_same_tokens(config, open_batches, tmp_path, suffix, document_mask):
  config.data.path = str(write_files(tmp_path / suffix, map(text_of, range(len(LENGTHS))), suffix))
  config.data.document_mask = document_mask
  same(take(open_batches(), 25), expected(tmp_path / "store", 25, document_mask=document_mask))


def test_every_token_of_an_epoch_is_a_target_once_and_epochs_follow_without_a_gap(open_batches):
  targets = np.concatenate([batch["targets_BL"].reshape(-1) for batch in take(open_batches(), 14)])
  epoch = [token for number in range(len(LENGTHS)) for token in [*ids_of(number), EOS]]
  assert targets.tolist() == (epoch * 3)[1 : 14 * BATCH * LENGTH + 1]


def test_epochs_are_counted_and_said(open_batches, lines):
  batches = open_batches()
  epochs = [(next(batches), batches.state()["epoch"])[1] for _ in range(15)]
  size = sum(LENGTHS) + len(LENGTHS)
  assert epochs == [1 + (t + 1) * BATCH * LENGTH // size for t in range(15)]
  assert any(line.endswith("ends after 15 documents; epoch 2 starts over") for line in lines)


def test_validation_is_the_first_documents_and_training_never_sees_them(config, lines, open_batches, tmp_path):
  config.data.validation_documents = 5
  dataset = open_dataset(config, report=lines.append)
  validation = dataset.validation
  assert (validation.num_documents, validation.num_tokens) == (5, sum(LENGTHS[:5]) + 5)
  stream = [token for number in range(5) for token in [*ids_of(number), EOS]]
  batch = validation.gather(np.arange(len(validation)))
  assert batch["inputs_BL"].reshape(-1).tolist() == stream[: LENGTH * len(validation)]
  assert lines[-1] == "data: training documents are streamed; 5 validation documents, 24 tokens, 3 blocks of 6"
  same(take(open_batches(dataset), 25), expected(tmp_path / "store", 25, held_out=5))
  config.data.validation_documents = 0
  assert open_dataset(config, report=lines.append).validation is None
  assert lines[-1] == "data: training documents are streamed; no validation"


def test_few_documents_are_read_ahead(config, lines, monkeypatch):
  monkeypatch.setattr("sparse_lm.data.tokenizer._BATCH_CHARACTERS", 1)
  monkeypatch.setattr("sparse_lm.data.stream._BATCHES_AHEAD", 1)
  dataset = open_dataset(config, report=lines.append)
  read, plain = [], dataset.source.read

  def spy(position):
    for place, text in plain(position):
      read.append(place["document"])
      yield place, text

  monkeypatch.setattr(dataset.source, "read", spy)
  batches = dataset.training_batches()
  next(batches)
  time.sleep(0.2)
  assert max(read) <= 6  # the seventh document alone fills four batches
  batches.close()


# Resuming -------------------------------------------------------------------------------------------------------------


def test_resumed_after_any_batch_the_stream_goes_on_bit_for_bit(config, lines, open_batches):
  config.data.validation_documents, config.data.document_mask = 2, True
  dataset = open_dataset(config, report=lines.append)
  whole, states = open_batches(dataset), []
  batches = []
  for _ in range(60):
    states.append(json.loads(json.dumps(whole.state())))
    batches.append(next(whole))
  places = [(s["epoch"], s["position"]["document"], s["skip"]) for s in states]
  assert sum(document == 6 and skip > 0 for _, document, skip in places) >= 12, "cut in the middle of a long document"
  assert any(skip == 0 and document > 2 for _, document, skip in places), "cut at a border of documents"
  assert any(LENGTHS[document] == 0 for _, document, _ in places), "cut in front of an empty document"
  assert places[-1][0] >= 8, "many epochs"
  for cut, state in enumerate(states):
    resumed = open_batches(dataset)
    resumed.restore(state)
    assert resumed.state() == state
    same(take(resumed, 2), batches[cut : cut + 2] if cut < 59 else [batches[cut], next(whole)])
    if cut + 2 < 60:
      assert resumed.state() == states[cut + 2]
    resumed.close()


def test_resumed_in_one_process_and_opened_in_another_is_the_same(config, lines, open_batches):
  first = open_batches()
  take(first, 7)
  state = json.loads(json.dumps(first.state()))
  resumed = open_batches(open_dataset(config, report=lines.append))
  resumed.restore(state)
  same(take(resumed, 9), take(first, 9))


def test_one_iterator_goes_back(open_batches):
  batches = open_batches()
  start = batches.state()
  first = take(batches, 5)
  batches.restore(start)
  same(take(batches, 5), first)


def test_what_was_made_ahead_does_not_count(open_batches):
  batches = open_batches()
  assert batches.state()["batches"] == 0
  take(batches, 3)
  time.sleep(0.2)
  assert batches.state()["batches"] == 3


def test_a_resumed_stream_does_not_start_again_with_the_first_file(config, lines, open_batches, tmp_path):
  texts = [" ".join(f"w{(n + k) % WORDS}" for k in range(60)) for n in range(8)]
  for number in range(4):
    table = pa.table({"text": texts[2 * number :][:2]})
    pq.write_table(table, tmp_path / "hub" / f"train-{number}.parquet", row_group_size=1)
  dataset = open_dataset(config, report=lines.append)
  first = open_batches(dataset)
  while first.state()["position"]["document"] < 7:  # in the last file
    next(first)
  first.close()
  whole = open_batches(dataset)
  whole.restore(first.state())
  batch = next(whole)
  whole.close()
  for number in (0, 1):
    (tmp_path / "hub" / f"train-{number}.parquet").write_bytes(b"no parquet")
  resumed = open_batches(dataset)
  resumed.restore(first.state())
  same([next(resumed)], [batch])


def test_a_stream_that_changed_under_a_checkpoint_is_refused(config, lines, open_batches, tmp_path):
  first = open_batches()
  take(first, 3)
  assert first.state()["position"]["document"] == 6
  texts = [text_of(number) for number in range(len(LENGTHS))]
  texts[6] = " ".join(reversed(texts[6].split()))
  write_files(tmp_path / "hub", texts)
  resumed = open_batches()
  resumed.restore(first.state())
  with pytest.raises(UserError, match=r"document 6, where the checkpoint goes on, is another one than when it was"):
    next(resumed)


# Several processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_processes_hold_disjoint_rows_of_the_batches_that_one_process_sees(config, lines, open_batches, count):  # F39
  dataset = open_dataset(config, report=lines.append)
  shares = [take(open_batches(dataset, process_index=p, process_count=count), 12) for p in range(count)]
  joined = [{name: np.concatenate([s[t][name] for s in shares]) for name in shares[0][0]} for t in range(12)]
  same(joined, take(open_batches(dataset), 12))


def test_a_batch_that_processes_cannot_share_evenly_is_refused(open_batches):
  with pytest.raises(UserError, match=r"training\.batch_size=4 is not divisible by the number of processes, 3"):
    open_batches(process_index=0, process_count=3)


# Failures -------------------------------------------------------------------------------------------------------------


class Flaky:
  """A stream that breaks in front of some rows, each as often as `breaks` says."""

  def __init__(self, stream, breaks, error):
    self._stream, self._breaks, self._error, self._row = stream, breaks, error, 0
    self.state_dict = stream.state_dict

  def load_state_dict(self, state):
    self._stream.load_state_dict(state)
    self._row = state["examples_iterable"]["batch_idx"]  # rows yielded

  def __iter__(self):
    for row in self._stream:
      if self._breaks.get(self._row, 0):
        self._breaks[self._row] -= 1
        raise self._error
      self._row += 1
      yield row


def break_stream(dataset, monkeypatch, breaks, error):
  plain = dataset.source._open
  monkeypatch.setattr(dataset.source, "_open", lambda: Flaky(plain(), breaks, error))


def test_a_broken_connection_is_said_and_the_stream_goes_on_where_it_broke(
  config, lines, open_batches, monkeypatch, no_pauses, tmp_path
):
  dataset = open_dataset(config, report=lines.append)
  break_stream(dataset, monkeypatch, {0: 1, 4: 3, 10: 2, 14: 1}, ConnectionError("the line\nis dead"))
  same(take(open_batches(dataset), 25), expected(tmp_path / "store", 25))
  assert no_pauses == [1, 1, 5, 25, 1, 5, 1]
  said = f"data: data.path={config.data.path!r}: document 4 cannot be read (the line); trying again in 25 s"
  assert said in lines


def test_a_connection_that_stays_broken_ends_the_run_with_what_to_do(
  config, lines, open_batches, monkeypatch, no_pauses
):
  monkeypatch.setattr("sparse_lm.data.tokenizer._BATCH_CHARACTERS", 1)
  dataset = open_dataset(config, report=lines.append)
  break_stream(dataset, monkeypatch, {12: 99}, OSError("unplugged"))
  batches = open_batches(dataset)
  with pytest.raises(UserError, match=r"document 12 cannot be read \(unplugged\), tried 4 times; the same command"):
    take(batches, 9)
  assert no_pauses == [1, 5, 25]
  assert 0 < batches.state()["batches"] < 9


def test_without_the_datasets_package_the_extra_is_named(config, lines, monkeypatch):
  monkeypatch.setitem(sys.modules, "datasets", None)
  with pytest.raises(UserError, match=r"^data\.source='hub' needs the package datasets: pip install -e '\.\[hf\]'$"):
    open_dataset(config, report=lines.append)


def test_a_hub_that_cannot_be_reached_is_said(config, lines, monkeypatch):
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
  config.data.path = "nobody/nothing"
  with pytest.raises(
    UserError, match=r"^data\.path='nobody/nothing': the hub cannot be reached \(.+\); check the netw"
  ):
    open_dataset(config, report=lines.append)


def test_a_name_that_the_hub_does_not_have_is_said(config, lines, monkeypatch):
  import datasets

  def missing(*_, **__):
    raise datasets.exceptions.DatasetNotFoundError("Dataset 'nobody/nothing' doesn't exist on the Hub\nmore")

  monkeypatch.setattr(datasets, "load_dataset_builder", missing)
  config.data.path = "nobody/nothing"
  with pytest.raises(
    UserError, match=r"nobody/nothing': cannot be opened \(Dataset .* on the Hub\); check data\.path,"
  ):
    open_dataset(config, report=lines.append)


@pytest.mark.parametrize("path", ["nowhere", "./a/b", "a/b/c", "/a"])
def test_a_path_that_is_neither_a_folder_nor_a_name_is_refused_without_asking_the_hub(config, lines, path):
  config.data.path = path
  with pytest.raises(UserError, match=rf"data\.path='{path}': is neither a folder on this machine nor OWNER/NAME"):
    open_dataset(config, report=lines.append)


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("hub_split", "test", r"cannot be opened \(Bad split: test.*data\.hub_split='test'"),
    ("hub_subset", "german", r"cannot be opened \(BuilderConfig 'german' not found.*data\.hub_subset='german'"),
    ("hub_revision", "v1", r"^data\.hub_revision='v1' is given but data\.path='.*' is a folder on this machine"),
  ],
)
def test_a_part_that_is_not_there_is_named(config, lines, field, value, message):
  setattr(config.data, field, value)
  with pytest.raises(UserError, match=message):
    open_dataset(config, report=lines.append)


@pytest.mark.parametrize(
  ("columns", "message"),
  [
    ({"body": ["a"], "id": [1]}, r'has no column "text"; its columns: body, id$'),
    ({"text": [1]}, r'column "text" must hold strings, but that of document 0 is int; nothing'),
  ],
)
def test_rows_that_are_no_documents_are_refused_at_the_start(config, lines, tmp_path, columns, message):
  (tmp_path / "bad").mkdir()
  pq.write_table(pa.table(columns), tmp_path / "bad" / "a.parquet")
  config.data.path = str(tmp_path / "bad")
  with pytest.raises(UserError, match=message):
    open_dataset(config, report=lines.append)


def test_a_null_is_named_by_its_document(config, open_batches, tmp_path):
  texts = [text_of(number) for number in range(len(LENGTHS))]
  texts[12] = None
  write_files(tmp_path / "hub", texts)
  with pytest.raises(UserError, match=r'column "text" must hold strings, but that of document 12 is null; nothing'):
    take(open_batches(), 9)


def test_an_empty_stream_is_refused(config, lines, tmp_path):
  (tmp_path / "empty").mkdir()
  (tmp_path / "empty" / "a.jsonl").write_text("\n\n")
  config.data.path = str(tmp_path / "empty")
  with pytest.raises(UserError, match=r"holds 0 documents, and data\.validation_documents=0 leaves none to train on"):
    open_dataset(config, report=lines.append)


def test_an_empty_folder_is_refused(config, lines, tmp_path):
  (tmp_path / "empty").mkdir()
  config.data.path = str(tmp_path / "empty")
  with pytest.raises(UserError, match=r"cannot be opened \(The directory at .* doesn't contain any data files\)"):
    open_dataset(config, report=lines.append)


def test_a_stream_with_fewer_tokens_than_a_batch_is_refused_with_both_numbers(config, open_batches):
  size = sum(LENGTHS) + len(LENGTHS)
  config.model.context_length, config.training.batch_size = (size - 1) // 2, 2
  next(open_batches())
  config.model.context_length += 1
  with pytest.raises(UserError, match=rf"holds {size} tokens in 15 training documents, but a batch needs {size + 2} "):
    next(open_batches())


def test_validation_may_not_take_every_document_nor_less_than_a_block(config, lines):
  config.data.validation_documents = 15
  with pytest.raises(UserError, match=r"holds 15 documents, and data\.validation_documents=15 leaves none to train on"):
    open_dataset(config, report=lines.append)
  config.data.validation_documents, config.model.context_length = 1, 6
  with pytest.raises(UserError, match=r"validation part holds 6 tokens in 1 documents, .* needs 7; raise data\.valid"):
    open_dataset(config, report=lines.append)


# Names ----------------------------------------------------------------------------------------------------------------


def test_files_on_the_hub_are_known_by_their_commit(config, lines, monkeypatch):
  import datasets

  local = datasets.load_dataset_builder(config.data.path, cache_dir=config.data.cache_dir)
  asked = []

  class Builder:
    as_streaming_dataset = local.as_streaming_dataset

    def __init__(self, *args, **options):
      asked.append((args, options["revision"]))
      files = [f"hf://datasets/some/thing@{options['revision']}/data/train-{n}.parquet" for n in range(2)]
      self.config = type("Config", (), {"data_files": {"train": files}})

  monkeypatch.setattr(datasets, "load_dataset_builder", Builder)
  config.data.path, config.data.hub_subset = "some/thing", "english"
  found = []
  for commit in ("a1b2", "c3d4"):
    config.data.hub_revision = commit
    found.append(open_dataset(config, report=lines.append).fingerprint)
    assert lines[-2] == f"data: streaming 2 file(s) of some/thing at commit {commit}"
  assert asked == [(("some/thing", "english"), "a1b2"), (("some/thing", "english"), "c3d4")]
  assert found[0] != found[1]


def test_the_fingerprint_follows_everything_that_changes_blocks_and_nothing_else(config, lines, tmp_path):
  fingerprints = [open_dataset(config, report=lines.append).fingerprint]
  for section, field, value in (
    ("data", "document_mask", True),
    ("model", "context_length", 5),
    ("data", "validation_documents", 5),
  ):
    setattr(getattr(config, section), field, value)
    fingerprints.append(open_dataset(config, report=lines.append).fingerprint)
  write_files(tmp_path / "hub", ["w1", *map(text_of, range(1, len(LENGTHS)))])
  fingerprints.append(open_dataset(config, report=lines.append).fingerprint)
  assert len(set(fingerprints)) == 5
  os.rename(tmp_path / "hub", tmp_path / "moved")
  config.data.path, config.data.cache_dir, config.seed = str(tmp_path / "moved"), str(tmp_path / "other"), 5
  assert open_dataset(config, report=lines.append).fingerprint == fingerprints[-1]


def test_a_tokenizer_is_found_under_its_name_in_the_cache_of_the_hub(config, tokenizer_path, monkeypatch):
  content, commit = Path(tokenizer_path).read_text(), "0123456789abcdef0123456789abcdef01234567"
  repository = Path(config.data.cache_dir) / "hub" / "models--Some-One--tok.2"
  (repository / "snapshots" / commit).mkdir(parents=True)
  (repository / "snapshots" / commit / "tokenizer.json").write_text(content)
  (repository / "refs").mkdir()
  (repository / "refs" / "main").write_text(commit)
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
  config.data.tokenizer = "Some-One/tok.2"
  assert given_tokenizer(config).fingerprint == hashlib.sha256(content.encode()).hexdigest()
  config.model.vocab_size = 90
  with pytest.raises(UserError, match=r"data\.tokenizer='Some-One/tok\.2' has 91 ids but model\.vocab_size=90"):
    given_tokenizer(config)


def test_a_tokenizer_that_cannot_be_fetched_is_said(config, monkeypatch):
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
  config.data.tokenizer = "nobody/nothing"
  with pytest.raises(
    UserError, match=r"^data\.tokenizer='nobody/nothing': is no file here, and its tokenizer\.json can"
  ):
    given_tokenizer(config)
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(UserError, match=r"needs the package huggingface_hub: pip install -e '\.\[hf\]'$"):
    given_tokenizer(config)


@pytest.mark.parametrize("name", ["folder/tokenizer.json", "a/b/c", "alone", "/a/b"])
def test_what_is_no_name_is_a_file_that_is_missing(config, monkeypatch, name):
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  config.data.tokenizer = name
  with pytest.raises(UserError, match=rf"^data\.tokenizer='{name}': cannot be read \(No such file"):
    given_tokenizer(config)


def test_a_file_here_goes_before_a_name_on_the_hub(config, tokenizer_path, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  (tmp_path / "some").mkdir()
  os.link(tokenizer_path, tmp_path / "some" / "one")
  config.data.tokenizer = "some/one"
  assert given_tokenizer(config).vocab_size == 91


# Config ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("path", None, r"data\.source='hub' needs data\.path: OWNER/NAME on the hub, or a local folder"),
    ("tokenizer", None, r"data\.source='hub' needs data\.tokenizer"),
    ("validation_fraction", 0.05, r"data\.validation_fraction=0\.05 .* set data\.validation_fraction=0, and data\.val"),
    ("validation_documents", -1, r"data\.validation_documents=-1 must be at least 0"),
    ("loader", "grain", r"data\.loader='grain' is given but data\.source='hub' has its own"),
  ],
)
def test_a_field_that_the_hub_lacks_or_ignores_is_refused(config, field, value, message):
  setattr(config.data, field, value)
  with pytest.raises(UserError, match=message):
    config.validate()


@pytest.mark.parametrize(
  ("field", "value", "default"),
  [
    ("validation_documents", 9, "0"),
    ("hub_subset", "x", "None"),
    ("hub_split", "test", "'train'"),
    ("hub_revision", "v1", "None"),
  ],
)
def test_a_field_of_the_hub_is_refused_for_every_other_source(field, value, default):
  config = LmConfig()
  setattr(config.data, field, value)
  message = (
    rf"data\.{field}={value!r} is given but is for data\.source=hub, and data\.source='sotu'; leave it at {default}"
  )
  with pytest.raises(UserError, match=message):
    config.validate()
