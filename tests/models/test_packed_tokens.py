"""Helpers of packed tokens and norms, against lists of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import offsets_of, tokens_of

from sparse_lm.models.dropout import dropout
from sparse_lm.models.packed import clear_padding, first_tokens, last_tokens, places, prepend, spread, total
from sparse_lm.models.rms_norm import rms_norm

LENGTHS = {"empty_rows_around": [0, 3, 0, 1, 2, 0], "one_token": [1], "no_tokens": [0, 0], "no_rows": []}
each = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def rows_of(x, lengths):
  return [x[end - length : end] for length, end in zip(lengths, offsets_of(lengths)[1:])]


@each
def test_first_and_last_tokens_equal_slices_of_each_row(lengths):
  x, offsets = jnp.asarray(tokens_of(lengths, 2)), jnp.asarray(offsets_of(lengths))
  first, last, late = first_tokens(x, offsets, 2), last_tokens(x, offsets, 2), last_tokens(x, offsets, 2, after=2)
  assert first.shape == last.shape == (len(lengths), 2, 2)
  for b, row in enumerate(rows_of(x, lengths)):
    nothing = np.zeros((2, 2), np.float32)
    np.testing.assert_array_equal(first[b], np.concatenate([row, nothing])[:2])
    np.testing.assert_array_equal(last[b], np.concatenate([nothing, row])[-2:])
    np.testing.assert_array_equal(late[b], np.concatenate([nothing, row[2:]])[-2:])


@each
def test_prepended_tokens_stand_before_each_row_and_padding_stays_behind(lengths):
  x, offsets = jnp.asarray(tokens_of(lengths, 2)), jnp.asarray(offsets_of(lengths))
  first = np.random.default_rng(1).normal(size=(len(lengths), 3, 2)).astype(np.float32)
  longer, longer_offsets = prepend(first, x, offsets)
  assert len(longer) == len(x) + 3 * len(lengths)
  np.testing.assert_array_equal(longer_offsets, offsets_of([n + 3 for n in lengths]))
  expected = [part for b, row in enumerate(rows_of(x, lengths)) for part in (first[b], row)]
  np.testing.assert_array_equal(longer[: longer_offsets[-1]], np.concatenate([*expected, np.zeros((0, 2))]))
  assert np.isfinite(longer).all()


def test_prepending_returns_each_gradient_to_its_token():
  lengths, first = [2, 0, 1], np.zeros((3, 2), np.float32)
  x, offsets = tokens_of(lengths), jnp.asarray(offsets_of(lengths))
  weights = jnp.arange(1.0, 1 + len(x) + 6)
  loss = lambda first, x: jnp.sum(prepend(first, x, offsets)[0] * weights)
  d_first, d_x = jax.grad(loss, (0, 1))(first, x)
  np.testing.assert_array_equal(d_first, [[1, 2], [5, 6], [7, 8]])
  np.testing.assert_array_equal(d_x, [3, 4, 9, 0, 0, 0])


@each
def test_places_count_from_the_start_of_each_row(lengths):
  row, position = places(jnp.asarray(offsets_of(lengths)), sum(lengths) + 1)
  expected = [(b, i) for b, length in enumerate(lengths) for i in range(length)] + [(len(lengths), 0)]
  np.testing.assert_array_equal(np.stack([row, position], axis=1), expected)


def test_cleared_padding_is_zero_and_gets_no_gradient():
  x, offsets = tokens_of([2, 1], 2), jnp.array([0, 2, 3])
  np.testing.assert_array_equal(clear_padding(x, offsets), np.nan_to_num(x))
  gradient = jax.grad(lambda x: jnp.sum(clear_padding(x, offsets)))(x)
  np.testing.assert_array_equal(gradient, np.repeat([1.0, 0.0], 3)[:, None] * np.ones((6, 2)))


def test_rms_norm_equals_numpy_and_of_zeros_has_a_finite_gradient():
  x = tokens_of([4], 8)[:4]
  np.testing.assert_allclose(rms_norm(x, 0.5), x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 0.5), rtol=1e-5)
  np.testing.assert_array_equal(rms_norm(jnp.zeros((1, 4))), np.zeros((1, 4)))
  assert np.isfinite(jax.grad(lambda x: jnp.sum(rms_norm(x)))(jnp.zeros((1, 4)))).all()
  assert rms_norm(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_dropout_keeps_the_mean_and_without_a_key_everything():
  x = jnp.full((4000,), 2.0, jnp.bfloat16)
  dropped = dropout(x, 0.25, jax.random.key(0))
  assert dropped.dtype == x.dtype
  assert set(np.unique(np.asarray(dropped, np.float32))) == {0.0, np.float32(jnp.bfloat16(2 / 0.75))}
  assert abs(np.mean(np.asarray(dropped) == 0) - 0.25) < 0.03
  assert dropout(x, 0.25, None) is x
  assert dropout(x, 0.0, jax.random.key(0)) is x


@each
def test_a_row_s_vector_goes_to_its_tokens_and_their_sum_comes_back(lengths):
  """Each is the other's derivative, and what lies behind the last row is NaN."""
  x_TD, offsets = tokens_of(lengths, 2), jnp.asarray(offsets_of(lengths))
  x_BD = np.random.default_rng(1).normal(size=(len(lengths), 2)).astype(np.float32)
  spread_TD, transposed = jax.vjp(lambda x: spread(x, offsets, len(x_TD)), jnp.asarray(x_BD))
  expected = np.concatenate([np.repeat(x_BD, lengths, axis=0), np.zeros((len(x_TD) - sum(lengths), 2), np.float32)])
  np.testing.assert_array_equal(spread_TD, expected)
  total_BD, spread_back = jax.vjp(lambda x: total(x, offsets), jnp.asarray(x_TD))
  expected_BD = np.array([row.sum(axis=0) for row in rows_of(x_TD, lengths)]).reshape(len(lengths), 2)
  np.testing.assert_allclose(total_BD, expected_BD, rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(transposed(jnp.asarray(x_TD))[0], total_BD)
  np.testing.assert_array_equal(spread_back(jnp.asarray(x_BD))[0], spread_TD)
