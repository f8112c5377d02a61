"""Order, shares and resumption of batches, for both loaders and between them."""

import os
import subprocess
import sys

import numpy as np
import pytest

from sparse_lm.data import training_batches, validation_batches
from sparse_lm.data.packing import Blocks
from sparse_lm.data.shards import load_store, write_store
from sparse_lm.errors import UserError

LOADERS = ("numpy", "grain")
NUM_BLOCKS, LENGTH = 23, 4


@pytest.fixture
def blocks(tmp_path):
  """23 blocks; the first input of block i is token 4 i, so that a batch tells which blocks it holds."""
  tokens = np.arange(NUM_BLOCKS * LENGTH + 1, dtype=np.uint32)
  write_store(tmp_path, [tokens[:50], tokens[50:]], vocab_size=1000, made_from={}, shard_tokens=32)
  return Blocks(load_store(tmp_path, made_from={}), LENGTH, True)


def numbers(batch):
  """Which blocks a batch holds."""
  return [int(token) // LENGTH for token in batch["inputs_BL"][:, 0]]


def take(iterator, count):
  return [next(iterator) for _ in range(count)]


def same(left, right):
  assert len(left) == len(right)
  for one, two in zip(left, right, strict=True):
    assert one.keys() == two.keys()
    for name in one:
      assert one[name].dtype == two[name].dtype
      np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.parametrize("loader", LOADERS)
def test_each_epoch_holds_every_block_once_though_batches_cross_its_border(blocks, loader):
  batches = take(training_batches(blocks, batch_size=5, seed=3, loader=loader), 23)
  samples = [number for batch in batches for number in numbers(batch)]
  epochs = [samples[e * NUM_BLOCKS : (e + 1) * NUM_BLOCKS] for e in range(5)]
  assert all(sorted(epoch) == list(range(NUM_BLOCKS)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 5  # each in an order of its own
  assert all(epoch != sorted(epoch) for epoch in epochs)


def test_the_order_is_the_documented_one(blocks):
  samples = [n for batch in take(training_batches(blocks, batch_size=6, seed=7), 10) for n in numbers(batch)]
  for k, number in enumerate(samples):
    epoch, place = k // NUM_BLOCKS, k % NUM_BLOCKS
    words = np.random.Philox(np.random.SeedSequence([7, epoch])).random_raw(NUM_BLOCKS).tolist()
    assert number == sorted(range(NUM_BLOCKS), key=words.__getitem__)[place]


def test_the_order_does_not_change_between_versions(blocks):
  """If you meant to change the order, every checkpoint resumes elsewhere: say so in the changelog, then update here."""
  assert numbers(next(training_batches(blocks, batch_size=8, seed=0))) == [0, 8, 19, 9, 3, 18, 21, 14]


def test_another_seed_gives_another_order(blocks):
  orders = {tuple(numbers(next(training_batches(blocks, batch_size=23, seed=seed)))) for seed in range(20)}
  assert len(orders) == 20


def test_both_loaders_give_the_same_bytes(blocks):
  numpy, grain = (training_batches(blocks, batch_size=6, seed=1, loader=loader) for loader in LOADERS)
  same(take(numpy, 20), take(grain, 20))


def test_a_batch_may_be_larger_than_an_epoch(blocks):
  samples = numbers(next(training_batches(blocks, batch_size=2 * NUM_BLOCKS + 1, seed=1)))
  assert sorted(samples[:NUM_BLOCKS]) == sorted(samples[NUM_BLOCKS : 2 * NUM_BLOCKS]) == list(range(NUM_BLOCKS))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("count", [2, 3, 6])
def test_processes_hold_disjoint_shares_of_the_batches_that_one_process_sees(blocks, loader, count):  # F39
  alone = take(training_batches(blocks, batch_size=6, seed=5, loader=loader), 12)
  shares = [
    take(training_batches(blocks, batch_size=6, seed=5, process_index=p, process_count=count, loader=loader), 12)
    for p in range(count)
  ]
  joined = [{name: np.concatenate([s[t][name] for s in shares]) for name in alone[0]} for t in range(12)]
  same(joined, alone)
  for t in range(3):  # within one epoch a block is in one share only
    held = [set(numbers(share[t])) for share in shares]
    assert sum(map(len, held)) == len(set.union(*held)) == 6


def test_the_union_of_two_processes_is_the_epoch(blocks):
  seen = [
    [
      n
      for batch in take(training_batches(blocks, batch_size=2, seed=5, process_index=p, process_count=2), 23)
      for n in numbers(batch)
    ]
    for p in range(2)
  ]
  assert sorted(seen[0] + seen[1]) == sorted(2 * list(range(NUM_BLOCKS)))


def test_hash_seeds_do_not_matter(blocks, tmp_path):
  script = (
    "import sys; from pathlib import Path; from sparse_lm.data.packing import Blocks\n"
    "from sparse_lm.data.shards import load_store; from sparse_lm.data import training_batches\n"
    "blocks = Blocks(load_store(Path(sys.argv[1]), made_from={}), 4, True)\n"
    "b = training_batches(blocks, batch_size=6, seed=5, loader='numpy')\n"
    "print([next(b)['inputs_BL'][:, 0].tolist() for _ in range(9)])"
  )
  expected = str([b["inputs_BL"][:, 0].tolist() for b in take(training_batches(blocks, batch_size=6, seed=5), 9)])
  for seed in ("0", "12345"):
    command = [sys.executable, "-c", script, str(tmp_path)]
    out = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == expected


@pytest.mark.parametrize("writer", LOADERS)
@pytest.mark.parametrize("reader", LOADERS)
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 11])  # 23 blocks in batches of 6: the border lies in batch 3
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(blocks, writer, reader, stop):
  whole = take(training_batches(blocks, batch_size=6, seed=9), 16)
  first = training_batches(blocks, batch_size=6, seed=9, loader=writer)
  same(take(first, stop), whole[:stop])
  state = first.state()
  assert state == {"batches": stop}  # what grain has built ahead does not count
  first.close()
  second = training_batches(blocks, batch_size=6, seed=9, loader=reader)
  take(second, 2)  # restoring must forget these, and what was built after them
  second.restore(state)
  assert second.state() == state
  same(take(second, 16 - stop), whole[stop:])
  second.close()


@pytest.mark.parametrize("loader", LOADERS)
def test_one_iterator_can_go_back_and_far_ahead(blocks, loader):
  batches = training_batches(blocks, batch_size=6, seed=9, loader=loader)
  start = take(batches, 5)
  batches.restore({"batches": 10**12})
  far = take(batches, 2)
  assert batches.state() == {"batches": 10**12 + 2}
  batches.restore({"batches": 0})
  same(take(batches, 5), start)
  other = training_batches(blocks, batch_size=6, seed=9, loader="numpy")
  other.restore({"batches": 10**12})
  same(take(other, 2), far)


@pytest.mark.parametrize("loader", LOADERS)
def test_changing_a_batch_in_place_does_not_change_a_later_one(blocks, loader):
  batches = training_batches(blocks, batch_size=6, seed=9, loader=loader)
  for batch in take(batches, 4):
    for array in batch.values():
      array[:] = -1
  batches.restore({"batches": 0})
  same(take(batches, 4), take(training_batches(blocks, batch_size=6, seed=9), 4))


def test_auto_takes_grain_where_it_is_installed_and_numpy_elsewhere(blocks, monkeypatch):
  assert "Grain" in type(training_batches(blocks, batch_size=1, seed=0, loader="auto")).__name__
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  assert "Numpy" in type(training_batches(blocks, batch_size=1, seed=0, loader="auto")).__name__


def test_grain_that_was_asked_for_and_is_missing_is_an_error(blocks, monkeypatch):
  monkeypatch.setitem(sys.modules, "grain", None)
  with pytest.raises(UserError, match=r"data\.loader='grain' needs the package grain: pip install -e '\.\[demo\]'"):
    training_batches(blocks, batch_size=1, seed=0, loader="grain")


def test_an_unknown_loader_is_refused(blocks):
  with pytest.raises(ValueError, match="loader='torch' is unknown; allowed: auto, grain, numpy"):
    training_batches(blocks, batch_size=1, seed=0, loader="torch")


def test_a_batch_that_processes_cannot_share_evenly_is_refused(blocks):
  message = r"training\.batch_size=6 is not divisible by the number of processes, 4"
  with pytest.raises(UserError, match=message):
    training_batches(blocks, batch_size=6, seed=0, process_count=4)
  with pytest.raises(UserError, match=message):
    next(validation_batches(blocks, batch_size=6, process_count=4))


def test_no_blocks_is_an_error_and_not_an_endless_wait(tmp_path):
  write_store(tmp_path, [np.array([1, 2, 3])], vocab_size=9, made_from={}, shard_tokens=32)
  with pytest.raises(ValueError, match="there is nothing to draw from"):
    training_batches(Blocks(load_store(tmp_path, made_from={}), 4, True), batch_size=1, seed=0)


# Validation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [4, 8, 20, 24, 40])
def test_validation_sees_each_block_once_in_order_and_pads_the_last_batch(blocks, batch_size, count):  # F37
  shares = [
    list(validation_batches(blocks, batch_size=batch_size, process_index=p, process_count=count)) for p in range(count)
  ]
  assert {len(share) for share in shares} == {-(-NUM_BLOCKS // batch_size)}
  assert {a.shape for share in shares for b in share for a in b.values()} == {(batch_size // count, LENGTH)}
  rows = [
    {name: batch[name][row] for name in batch}
    for step in zip(*shares, strict=True)
    for batch in step
    for row in range(batch_size // count)
  ]
  whole = blocks.gather(np.arange(NUM_BLOCKS))
  for number, row in enumerate(rows):
    for name, values in row.items():
      np.testing.assert_array_equal(values, whole[name][number] if number < NUM_BLOCKS else 0)
      assert values.dtype == whole[name].dtype


def test_a_process_may_hold_padding_only(blocks):  # F37
  *_, last = validation_batches(blocks, batch_size=20, process_index=3, process_count=4)
  assert not last["weights_BL"].any()
  assert not last["segments_BL"].any()
