"""Masks and schedules against brute force over all pairs of a few rows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import jagged
from pallas_kernels.jagged import schedule
from pallas_kernels.jagged.geometry import Mask, Tiles
from pallas_kernels.jagged.schedule import Field

MASKS = {
  "all": {},
  "causal": dict(causal=True),
  "window": dict(window=5),
  "causal_window": dict(causal=True, window=5),
  "no_window": dict(window=0),
  "block": dict(block=4),
  "causal_block_window": dict(causal=True, block=6, window=3),
}
masks = pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)


def seen(mask, num_q, num_k, history=None):
  """bool[Q, K], pair by pair."""
  return np.array(
    [
      [
        (not mask.causal or j <= i)
        and (mask.window is None or abs(i - j) <= mask.window)
        and (mask.block is None or i // mask.block == j // mask.block)
        and (not mask.targets or j < history or i == j)
        for j in range(num_k)
      ]
      for i in range(num_q)
    ]
  ).reshape(num_q, num_k)


@masks
@pytest.mark.parametrize("history", [None, 7])
def test_visible_pairs(options, history):
  mask = Mask(**options, targets=history is not None)
  i, j = np.arange(11, dtype=np.int32)[:, None], np.arange(13, dtype=np.int32)[None, :]
  found = mask.visible(jnp.asarray(i), jnp.asarray(j), history)
  expected = seen(mask, 11, 13, history)
  np.testing.assert_array_equal(np.ones((11, 13), bool) if found is None else found, expected)


@masks
@pytest.mark.parametrize("history", [None, 7])
def test_ranges_hold_what_is_seen_and_no_more_than_the_mask_allows(options, history):
  mask = Mask(**options, targets=history is not None)
  for num_q, num_k in ((11, 13), (13, 11), (11, 11)):
    if history is not None and num_q != num_k:
      continue
    pairs = seen(mask, num_q, num_k, history)
    for by_query, (own, other) in ((True, (num_q, num_k)), (False, (num_k, num_q))):
      table = pairs if by_query else pairs.T
      reach, common = (mask.keys_of, mask.common_keys_of) if by_query else (mask.queries_of, mask.common_queries_of)
      for first, last in itertools.combinations_with_replacement(range(own), 2):
        begin, end = map(int, reach(jnp.int32(first), jnp.int32(last), other))
        any_seen = np.flatnonzero(table[first : last + 1].any(axis=0))
        assert not any_seen.size or begin <= any_seen.min() <= any_seen.max() < end
        if history is None and any_seen.size:  # targets bound less tightly
          assert (begin, end) == (any_seen.min(), any_seen.max() + 1)
        begin, end = map(int, common(jnp.int32(first), jnp.int32(last), other, history))
        assert table[first : last + 1, max(begin, 0) : max(end, 0)].all()
        if history is None:
          assert max(end - begin, 0) == table[first : last + 1].all(axis=0).sum()


@pytest.mark.parametrize("lengths", [[], [0], [5], [4, 4], [0, 9, 0, 1, 0], [1] * 7, [30]])
def test_tiles_are_those_of_each_row(lengths):
  tiles = Tiles.of(jnp.asarray(lengths, jnp.int32), sum(lengths), 4)
  expected = [(row, block) for row, length in enumerate(lengths) for block in range(-(-length // 4))]
  assert tiles.number == len(expected) <= len(tiles.row)
  found = [(int(row), int(block)) for row, block in zip(tiles.row, tiles.block)]
  assert found[: len(expected)] == expected


ROWS = {
  "usual": ([5, 130, 0, 300], None),
  "other_keys": ([5, 130, 0, 300], [200, 0, 7, 129]),
  "far_keys": ([8, 512], [512, 8]),
  "nothing": ([], None),
  "only_empty": ([0, 0], [3, 0]),
}


@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [64], [65, 0, 63, 128], [500, 1, 2]])
def test_blocks_are_those_of_each_row(lengths):
  offsets = np.cumsum([0, *lengths]).astype(np.int32)
  made = jagged.make_schedule(offsets, num_queries=int(offsets[-1]) + 70, block=64)
  number, used = map(int, made.blocks.counts)
  assert used == offsets[-1]
  expected = [(t, end) for begin, end in itertools.pairwise(offsets.tolist()) for t in range(begin, end, 64)]
  entries = np.asarray(made.blocks.tiles_NF)[:number]
  assert [tuple(entry) for entry in entries[:, [Field.TOKEN, Field.END]].tolist()] == expected


@pytest.mark.parametrize("options", [{}, dict(block=32), dict(block=64, causal=True), dict(block=64, window=3)])
def test_no_blocks_for_other_masks_and_for_keys_of_their_own(options):
  offsets = np.array([0, 3, 70], np.int32)
  assert jagged.make_schedule(offsets, num_queries=70, **options).blocks is None
  assert jagged.make_schedule(offsets, offsets, num_queries=70, block=64).blocks is None


@pytest.mark.parametrize(("lengths", "k_lengths"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
  "options", [{}, dict(causal=True), dict(window=70), dict(block=64), dict(causal=True, targets=True)], ids=str
)
def test_every_token_has_a_tile_and_its_steps_reach_what_it_sees(lengths, k_lengths, options):
  mask = Mask(**options)
  if mask.targets and k_lengths is not None:
    return
  q_offsets, k_offsets = (
    np.cumsum([0, *rows]).astype(np.int32) for rows in (lengths, lengths if k_lengths is None else k_lengths)
  )
  history = np.maximum(np.diff(q_offsets) - 20, 0) if mask.targets else None
  made = schedule.make(
    jnp.asarray(q_offsets), jnp.asarray(k_offsets), None if history is None else jnp.asarray(history), mask,
    int(q_offsets[-1]) + 9, int(k_offsets[-1]) + 9, same_tokens=False,
  )  # fmt: skip
  lists = (made.forward, 128, True), (made.query_gradient, 64, True), (made.key_gradients, 64, False)
  for tiles, step, by_query in lists:
    own, other = (q_offsets, k_offsets) if by_query else (k_offsets, q_offsets)
    number, used = map(int, tiles.counts)
    assert used == own[-1]
    entries = np.asarray(tiles.tiles_NF)[:number]
    assert (np.diff(entries[:, Field.STEPS]) <= 0).all()  # longest first
    covered = np.zeros(own[-1], int)
    for entry in entries:
      token, begin, end = entry[[Field.TOKEN, Field.BEGIN, Field.END]]
      row = int(np.flatnonzero((own[:-1] == begin) & (own[1:] == end))[0])
      assert (entry[Field.OTHER_BEGIN], entry[Field.OTHER_END]) == (other[row], other[row + 1])
      assert token % 8 == 0
      assert entry[Field.OTHER_TOKEN] % 8 == 0
      assert entry[Field.OTHER_BEGIN] - 8 < entry[Field.OTHER_TOKEN] <= entry[Field.OTHER_END]
      tokens = np.arange(max(token, begin), min(token + 128, end))
      covered[tokens] += 1
      lengths_of_row = (int(np.diff(offsets)[row]) for offsets in (q_offsets, k_offsets))
      pairs = seen(mask, *lengths_of_row, None if history is None else history[row])
      mine = (pairs if by_query else pairs.T)[tokens - begin]
      first = entry[Field.OTHER_TOKEN] - entry[Field.OTHER_BEGIN]
      columns = np.flatnonzero(mine.any(axis=0))
      assert not columns.size or first <= columns.min() <= columns.max() < first + entry[Field.STEPS] * step
      for t in range(entry[Field.PLAIN_FROM], entry[Field.PLAIN_TO]):
        plain = mine[:, max(first + t * step, 0) : first + (t + 1) * step]
        assert plain.shape[1] == step
        assert plain.all()
      assert entry[Field.STEPS] >= 1
    np.testing.assert_array_equal(covered, 1)


def test_plain_steps_are_most_of_a_long_row():
  made = jagged.make_schedule(np.array([0, 1024], np.int32), num_queries=1024)
  plain = made.forward.tiles_NF[:8, Field.PLAIN_TO] - made.forward.tiles_NF[:8, Field.PLAIN_FROM]
  np.testing.assert_array_equal(plain, 8)
  made = jagged.make_schedule(np.array([0, 1024], np.int32), num_queries=1024, causal=True)
  np.testing.assert_array_equal(made.forward.tiles_NF[:8, Field.STEPS], np.arange(8, 0, -1))
  np.testing.assert_array_equal(made.forward.tiles_NF[:8, Field.PLAIN_TO], np.arange(7, -1, -1))


@pytest.mark.parametrize(("total", "num_sms"), [(0, 4), (3, 4), (8, 4), (9, 4), (15, 4), (5, 1)])
def test_every_item_has_one_sm(total, num_sms):
  places = [
    int(schedule.nth(jnp.int32(n), jnp.int32(sm), num_sms))
    for sm in range(num_sms)
    for n in range(int(schedule.items_of(jnp.int32(sm), jnp.int32(total), num_sms)))
  ]
  assert sorted(places) == list(range(total))


def test_the_zigzag_is_even_where_turns_are_not():
  """Tiles of 4, 3, 2 and 1 steps on two SMs: 4 + 1 and 3 + 2."""
  offsets = np.cumsum([0, 512, 384, 256, 128]).astype(np.int32)
  made = jagged.make_schedule(np.cumsum([0, 8, 8, 8, 8]).astype(np.int32), offsets, num_queries=32, num_keys=1280)
  assert made.imbalance(1, 2) == 1
  assert made.imbalance(1, 3) == pytest.approx(4 * 3 / 10)
  assert jagged.make_schedule(np.array([0], np.int32), num_queries=0).imbalance(2, 4) == 1


def test_a_schedule_of_another_call_is_refused():
  q, offsets = jnp.zeros((8, 1, 64)), np.array([0, 8], np.int32)
  made = jagged.make_schedule(offsets, num_queries=8)
  jagged.attention(q, q, q, offsets, schedule=made)
  with pytest.raises(ValueError, match=r"schedule is for .*causal=False.* and this call has .*causal=True"):
    jagged.attention(q, q, q, offsets, schedule=made, causal=True)
  with pytest.raises(ValueError, match=r"'num_queries': 8.* and this call has .*'num_queries': 9"):
    jagged.attention(*[jnp.zeros((9, 1, 64))] * 3, offsets, schedule=made)


def test_a_schedule_is_made_under_jit_and_handed_on():
  q, offsets = jnp.ones((8, 1, 64)), np.array([0, 3, 8], np.int32)
  made = jax.jit(lambda offsets: jagged.make_schedule(offsets, num_queries=8, causal=True))(offsets)
  call = jax.jit(jax.grad(lambda q, made: jnp.sum(jagged.attention(q, q, q, offsets, causal=True, schedule=made))))
  assert call(q, made).shape == q.shape


@pytest.mark.parametrize("offsets", [[0, 5, 99], [0, 9, 3], [0, 2**31 - 1, -7], [4, 2, 1]])
def test_wrong_offsets_under_jit_leave_no_array(offsets):
  """Nobody can check them there."""
  made = jax.jit(lambda offsets: jagged.make_schedule(offsets, num_queries=16))(np.array(offsets, np.int32))
  number, used = map(int, made.forward.counts)
  assert number <= len(made.forward.tiles_NF)
  assert 0 <= used <= 16
  entries = np.asarray(made.forward.tiles_NF)[:number]
  for field in (Field.TOKEN, Field.BEGIN, Field.END, Field.OTHER_TOKEN, Field.OTHER_END):
    assert ((entries[:, field] >= 0) & (entries[:, field] <= 16)).all()
