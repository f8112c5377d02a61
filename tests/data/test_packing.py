"""Blocks, segments and weights against plain loops."""

import itertools

import numpy as np
import pytest

from sparse_lm.data.packing import Blocks
from sparse_lm.data.shards import load_store, write_store

EOS = 0


def blocks_of(tmp_path, documents, *, length, document_mask=True, shard_tokens=1 << 20):
  """`documents` are lists of ids without EOS."""
  stream = [np.array([*ids, EOS], np.uint32) for ids in documents]
  write_store(tmp_path, stream, vocab_size=1000, made_from={}, shard_tokens=shard_tokens)
  return Blocks(load_store(tmp_path, made_from={}), length, document_mask)


def oracle(documents, length, document_mask):
  """Every block as four lists, by walking over single tokens."""
  stream = []
  for number, ids in enumerate(documents):
    stream += [(token, number) for token in ids] + [(EOS, number)]
  blocks = []
  while len(stream) >= length + 1:
    inputs, targets, segments, weights = [], [], [], []
    for (token, document), (next_token, next_document) in itertools.pairwise(stream[: length + 1]):
      inputs.append(token)
      targets.append(next_token)
      segments.append(document - stream[0][1] + 1)
      weights.append(0.0 if document_mask and document != next_document else 1.0)
    blocks.append((inputs, targets, segments, weights))
    stream = stream[length:]
  return blocks


def ids(*lengths):
  """Documents of these lengths whose tokens are all different."""
  numbers = iter(range(1, 1000))
  return [[next(numbers) for _ in range(length)] for length in lengths]


CASES = {
  "one_token": [0],
  "one_token_short_of_a_block": [3],
  "exactly_one_block": [4],
  "one_block_and_a_token": [5],
  "two_blocks_less_a_token": [7],
  "exactly_two_blocks": [8],
  "a_document_ends_where_a_block_ends": [3, 4, 4, 9],
  "a_document_starts_at_the_last_target_only": [3, 6],
  "many_empty_documents": [0] * 23,
  "empty_documents_between": [5, 0, 0, 3, 0, 11, 0],
  "one_huge_document": [400],
  "single_tokens": [1] * 17,
}


@pytest.mark.parametrize("shard_tokens", [1, 3, 4, 5, 1 << 20])
@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_equals_a_walk_over_single_tokens(tmp_path, lengths, document_mask, shard_tokens):
  documents = ids(*lengths)
  blocks = blocks_of(tmp_path, documents, length=4, document_mask=document_mask, shard_tokens=shard_tokens)
  expected = oracle(documents, 4, document_mask)
  assert len(blocks) == len(expected)
  assert blocks.num_documents == len(lengths)
  assert blocks.num_tokens == sum(lengths) + len(lengths)
  batch = blocks.gather(np.arange(len(expected)))
  for number, block in enumerate(expected):
    for name, values in zip(("inputs_BL", "targets_BL", "segments_BL", "weights_BL"), block, strict=True):
      assert batch[name][number].tolist() == values, name


def test_every_token_but_the_first_is_predicted_exactly_once(tmp_path):
  blocks = blocks_of(tmp_path, ids(7, 0, 8, 2), length=4)
  targets_BL = blocks.gather(np.arange(len(blocks)))["targets_BL"]
  stream = [token for document in ids(7, 0, 8, 2) for token in [*document, EOS]]
  assert targets_BL.reshape(-1).tolist() == stream[1:21]


def test_rows_come_in_the_order_asked_for_and_may_repeat(tmp_path):
  blocks = blocks_of(tmp_path, ids(40, 3), length=4)
  every = blocks.gather(np.arange(len(blocks)))
  chosen = [9, 0, 9, 3]
  for name, array in blocks.gather(np.array(chosen)).items():
    np.testing.assert_array_equal(array, every[name][chosen])


def test_dtypes_and_memory_are_what_a_device_takes(tmp_path):
  batch = blocks_of(tmp_path, ids(40), length=4).gather(np.array([1, 2]))
  assert {name: array.dtype.name for name, array in batch.items()} == {
    "inputs_BL": "int32",
    "targets_BL": "int32",
    "segments_BL": "int32",
    "weights_BL": "float32",
  }
  assert all(array.flags.c_contiguous and array.flags.writeable for array in batch.values())


@pytest.mark.parametrize("bad", [[-1], [0, 10], [10]])
def test_a_block_that_does_not_exist_is_refused(tmp_path, bad):
  blocks = blocks_of(tmp_path, ids(40), length=4)
  with pytest.raises(IndexError, match=rf"block numbers {min(bad)} to {max(bad)} reach outside \[0, 10\)"):
    blocks.gather(np.array(bad))


def test_no_block_is_a_batch_of_no_rows(tmp_path):
  batch = blocks_of(tmp_path, ids(40), length=4).gather(np.array([], np.int64))
  assert {array.shape for array in batch.values()} == {(0, 4)}
