"""Next-item models: the equation row by row, what a user vector may know, and the sampled loss against a loop."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packed_rows import assert_close, jit, offsets_of

from sparse_lm.data.sequences import Batch
from sparse_lm.models.next_item import NextItemModel, next_items, sampled_softmax
from sparse_lm.next_item_config import MODEL_KINDS, NextItemModelConfig
from sparse_lm.precision.recipes import RECIPES

D, ITEMS, LONGEST, ROOM = 6, 9, 5, 12
LENGTHS = [2, 0, 5, 2]
each = pytest.mark.parametrize("kind", MODEL_KINDS)


@functools.cache
def model_of(kind):
  """With weights so large that everything in it shows."""
  config = NextItemModelConfig(kind=kind, width=D, num_layers=2, num_heads=2, head_width=5, dropout=0.5)
  module = jit(lambda: NextItemModel(config, ITEMS, LONGEST, RECIPES["fp32"], rngs=nnx.Rngs(0)))()
  return jax.tree.map(lambda w: 5 * w, module)


def batch_of(lengths=LENGTHS, seed=0):
  """Behind the rows there are items and times that mean nothing."""
  rng = np.random.default_rng(seed)
  items, seconds = rng.integers(0, ITEMS, ROOM), np.cumsum(rng.integers(0, 1000, ROOM))
  return Batch(items.astype(np.int32), seconds.astype(np.int32), offsets_of(lengths))


run = jit(lambda model, batch, key=None: model(batch, key=key))


@each
def test_a_user_vector_is_what_the_blocks_make_of_the_row_at_length_1(kind):
  model, batch = model_of(kind), batch_of()
  found = run(model, batch)

  @jit
  def row_of(model, items, seconds):
    x, offsets = (
      model.item_VD[...][items] * np.sqrt(D) + model.position_LD[...][: len(items)],
      jnp.array([0, len(items)]),
    )
    for block in model.blocks:
      x = block(x, offsets, *([seconds] if kind == "hstu" else []))
    return x

  for start, end in itertools.pairwise(batch.offsets):
    x = np.asarray(row_of(model, batch.item_T[start:end], batch.time_T[start:end]), np.float64)
    assert_close(found[start:end], x / np.linalg.norm(x, axis=1, keepdims=True))
  np.testing.assert_array_equal(found[batch.offsets[-1] :], 0)


@each
def test_no_later_item_no_other_row_and_no_padding_changes_a_user_vector(kind):
  model, batch = model_of(kind), batch_of()
  before = run(model, batch)
  for changed in range(ROOM):
    item_T = batch.item_T.copy()
    item_T[changed] = (item_T[changed] + 1) % ITEMS
    differs_T = np.any(run(model, batch._replace(item_T=item_T)) != before, axis=1)
    row = int(np.searchsorted(batch.offsets, changed, side="right")) - 1
    end = batch.offsets[row + 1] if row < len(LENGTHS) else changed
    np.testing.assert_array_equal(np.flatnonzero(differs_T), np.arange(changed, end))


@each
def test_scores_are_those_of_the_token_before_the_last(kind):
  model, batch = model_of(kind), batch_of([2, 5, 3])
  users, table = np.asarray(run(model, batch), np.float64), np.asarray(model.item_VD[...], np.float64)
  expected = users[[0, 5, 8]] @ (table / np.linalg.norm(table, axis=1, keepdims=True)).T
  assert_close(jit(lambda model, batch: model.scores(batch))(model, batch), expected)


@each
def test_padding_gives_the_table_no_gradient_and_empty_batches_a_finite_one(kind):
  batch = Batch(np.array([1, 2, 3, 3], np.int32), np.zeros(4, np.int32), np.array([0, 2, 2], np.int32))
  empty = batch._replace(offsets=np.zeros(3, np.int32))
  grad = jit(jax.grad(lambda model, batch: jnp.sum(model(batch) * jnp.arange(1.0, D + 1)[None])))
  moved = lambda batch: np.flatnonzero(np.any(grad(model_of(kind), batch).item_VD[...] != 0, axis=1)).tolist()
  assert moved(batch) == [1, 2]
  assert moved(empty) == []


@each
def test_dropout_needs_a_key_and_the_same_key_drops_the_same(kind):
  model, batch = model_of(kind), batch_of()
  plain, a, again, b = (run(model, batch, k and jax.random.key(k)) for k in (None, 1, 1, 2))
  np.testing.assert_array_equal(a, again)
  assert not np.allclose(a, plain)
  assert not np.allclose(a, b)


@each
def test_a_row_longer_than_the_table_of_positions_is_nan_and_no_guess(kind):
  users = run(model_of(kind), batch_of([LONGEST + 1]))
  assert np.isnan(users[LONGEST]).all()


@each
def test_bf16_is_within_its_precision_and_gives_float32(kind):
  model, batch = model_of(kind), batch_of()
  rounded = nnx.clone(model)
  for module in (rounded, *rounded.blocks):
    module.recipe = RECIPES["bf16"]
  exact, found = run(model, batch), jit(lambda: NextItemModel.__call__(rounded, batch))()
  assert found.dtype == jnp.float32
  assert np.linalg.norm(found - exact) < 0.1 * np.linalg.norm(exact)


def test_what_follows_a_token_lies_in_its_own_row():
  item_T, exists_T = next_items(Batch(np.arange(8, dtype=np.int32), np.zeros(8, np.int32), offsets_of([0, 3, 1, 2])))
  np.testing.assert_array_equal(exists_T, [1, 1, 0, 0, 1, 0, 0, 0])
  np.testing.assert_array_equal(item_T[np.asarray(exists_T)], [1, 2, 5])


def test_no_token_has_a_next_one_where_rows_have_one_at_most_and_a_full_batch_has_no_tail():
  exists = lambda *lengths: next_items(Batch(np.zeros(4, np.int32), np.zeros(4, np.int32), offsets_of(lengths)))[1]
  np.testing.assert_array_equal(exists(1, 0, 1), [0, 0, 0, 0])
  np.testing.assert_array_equal(exists(4), [1, 1, 1, 0])


def loop_loss(users, items, right, exists, negative, temperature):
  """In float64, over items instead of logits: a negative that is the right item is left out."""
  losses = []
  for t in np.flatnonzero(exists):
    drawn = [right[t], *(v for v in negative[t] if v != right[t])]
    logits = items[drawn] @ users[t] / temperature
    losses.append(np.log(np.sum(np.exp(logits - logits[0]))))
  return np.mean(losses) if losses else 0.0


@pytest.mark.parametrize("exists", [[1, 1, 0, 1], [0, 0, 0, 0]], ids=str)
def test_the_sampled_loss_equals_a_loop(exists):
  rng = np.random.default_rng(0)
  users, items = rng.normal(size=(4, D)), rng.normal(size=(ITEMS, D))
  right, negative = np.array([3, 0, 2, 8]), rng.integers(0, ITEMS, (4, 7))
  negative[0] = 3  # nothing but the right item: no loss at all
  negative[1, :3] = 0, 5, 5  # the right one once, another twice, which counts twice
  arrays = users.astype(np.float32), items.astype(np.float32), right, np.array(exists, bool), negative
  found = sampled_softmax(*map(jnp.asarray, arrays), temperature=0.3)
  assert float(found) == pytest.approx(loop_loss(users, items, right, exists, negative, 0.3), rel=1e-5, abs=1e-7)
