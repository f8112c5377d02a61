"""Packed rows and dense arrays, against loops over rows in float64; gradients against those of the loops' formulas."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import jagged

ROWS = {
  "usual": [3, 1, 4],
  "empty_ones": [0, 2, 0, 0, 3, 0],
  "one_token": [1],
  "all_empty": [0, 0],
  "none": [],
}
rows = pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)


def draw(lengths, width=5, padding=2):
  rng = np.random.default_rng(len(lengths))
  offsets = np.cumsum([0, *lengths]).astype(np.int32)
  x = rng.normal(size=(offsets[-1] + padding, width)).astype(np.float32)
  x[offsets[-1] :] = np.nan  # padding is never read
  return x, offsets, rng


def gradient(function, *arrays, up):
  d = jax.grad(lambda *arrays: jnp.sum(function(*arrays) * up), argnums=tuple(range(len(arrays))))
  return jax.jit(d)(*map(jnp.asarray, arrays))


@rows
def test_to_dense_and_back(lengths):
  x, offsets, rng = draw(lengths)
  longest = max(lengths, default=0) + 1
  dense, left_out = jagged.jagged_to_dense(x, offsets, longest, fill=-1)
  expected = np.full((len(lengths), longest, 5), -1, np.float32)
  for b, length in enumerate(lengths):
    expected[b, :length] = x[offsets[b] : offsets[b + 1]]
  np.testing.assert_array_equal(dense, expected)
  assert left_out == 0
  back = np.nan_to_num(x, nan=0)
  np.testing.assert_array_equal(jagged.dense_to_jagged(dense, offsets, len(x)), back)

  up = rng.normal(size=expected.shape).astype(np.float32)
  (d_x,) = gradient(lambda x: jagged.jagged_to_dense(x, offsets, longest)[0], x, up=up)
  packed = np.zeros_like(x)
  for b, length in enumerate(lengths):
    packed[offsets[b] : offsets[b + 1]] = up[b, :length]
  np.testing.assert_array_equal(d_x, packed)
  (d_dense,) = gradient(lambda dense: jagged.dense_to_jagged(dense, offsets, len(x)), dense, up=back)
  for b, length in enumerate(lengths):
    np.testing.assert_array_equal(d_dense[b, :length], back[offsets[b] : offsets[b + 1]])
    assert not np.any(np.asarray(d_dense)[b, length:])


def test_integers_and_other_ranks():
  offsets = np.array([0, 2, 3], np.int32)
  dense, _ = jagged.jagged_to_dense(np.array([5, 6, 7], np.int32), offsets, 2)
  np.testing.assert_array_equal(dense, [[5, 6], [7, 0]])
  dense, _ = jagged.jagged_to_dense(np.arange(12).reshape(3, 2, 2), offsets, 2)
  assert dense.shape == (2, 2, 2, 2)


def test_what_does_not_fit_is_refused_or_counted():
  """F16."""
  x, offsets = np.arange(8, dtype=np.float32), np.array([0, 2, 8], np.int32)
  with pytest.raises(ValueError, match="row 1 has 6 tokens and max_length=4; give the longest row's"):
    jagged.jagged_to_dense(x, offsets, 4)
  dense, left_out = jax.jit(lambda x, offsets: jagged.jagged_to_dense(x, offsets, 4))(x, offsets)
  np.testing.assert_array_equal(dense, [[0, 1, 0, 0], [2, 3, 4, 5]])
  assert left_out == 2
  with pytest.raises(ValueError, match="a row has 6 tokens, and x_BLD only L=4 of each"):
    jagged.dense_to_jagged(dense, offsets, 8)
  packed = jax.jit(lambda dense, offsets: jagged.dense_to_jagged(dense, offsets, 8))(dense, offsets)
  np.testing.assert_array_equal(packed, [0, 1, 2, 3, 4, 5, 0, 0])


@rows
def test_softmax(lengths):
  x, offsets, rng = draw(lengths)
  up = rng.normal(size=x.shape).astype(np.float32)
  expected, d_expected = np.zeros(x.shape), np.zeros(x.shape)
  for b in range(len(lengths)):
    own = slice(offsets[b], offsets[b + 1])
    e = np.exp(x[own].astype(np.float64))
    p = e / e.sum(axis=0)
    expected[own], d_expected[own] = p, p * (up[own] - np.sum(p * up[own], axis=0))
  np.testing.assert_allclose(jagged.jagged_softmax(x, offsets), expected, atol=1e-6)
  (d_x,) = gradient(lambda x: jagged.jagged_softmax(x, offsets), x, up=up)
  np.testing.assert_allclose(d_x, d_expected, atol=1e-6)


def test_softmax_of_large_and_of_infinite_values():
  offsets = np.array([0, 2, 4], np.int32)
  x = np.array([1e30, 1e30, -np.inf, 3], np.float32)
  np.testing.assert_array_equal(jagged.jagged_softmax(x, offsets), [0.5, 0.5, 0, 1])


@rows
def test_a_product_with_each_rows_own_matrix(lengths):
  x, offsets, rng = draw(lengths)
  w = rng.normal(size=(len(lengths), 5, 3)).astype(np.float32)
  up = rng.normal(size=(len(x), 3)).astype(np.float32)
  expected, d_x, d_w = np.zeros((len(x), 3)), np.zeros(x.shape), np.zeros(w.shape)
  for b in range(len(lengths)):
    own = slice(offsets[b], offsets[b + 1])
    expected[own] = x[own].astype(np.float64) @ w[b]
    d_x[own] = up[own].astype(np.float64) @ w[b].T
    d_w[b] = x[own].T.astype(np.float64) @ up[own]
  np.testing.assert_allclose(jagged.jagged_dense_matmul(x, w, offsets), expected, atol=1e-5)
  found = gradient(lambda x, w: jagged.jagged_dense_matmul(x, w, offsets), x, w, up=up)
  for a, b in zip(found, (d_x, d_w), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_what_is_not_finite_stays_in_its_row():
  x, offsets, rng = draw([2, 70, 3])
  w = rng.normal(size=(3, 5, 4)).astype(np.float32)
  others = np.r_[0:2, 72 : len(x)]
  clean = np.asarray(jagged.jagged_dense_matmul(x, w, offsets))
  spoilt_x, spoilt_w = x.copy(), w.copy()
  spoilt_x[2], spoilt_w[1] = np.nan, np.inf
  for a, b in ((spoilt_x, w), (x, spoilt_w)):
    found = np.asarray(jagged.jagged_dense_matmul(a, b, offsets))
    np.testing.assert_array_equal(found[others], clean[others])
    assert not np.isfinite(found[2]).any()
    for d in gradient(lambda a, b: jagged.jagged_dense_matmul(a, b, offsets), a, b, up=np.ones_like(clean)):
      rows = others if len(d) == len(x) else [0, 2]
      assert np.isfinite(np.asarray(d)[rows]).all()
  softmax = np.asarray(jagged.jagged_softmax(spoilt_x, offsets))
  np.testing.assert_array_equal(softmax[others], np.asarray(jagged.jagged_softmax(x, offsets))[others])
  assert np.isnan(softmax[2:72]).all()


def test_refusals():
  x, offsets = np.zeros((4, 3), np.float32), np.array([0, 4], np.int32)
  for said, error, call in (
    ("jagged_to_dense: offsets[1] = 4 points past the T = 3", ValueError,
     lambda: jagged.jagged_to_dense(x[:3], offsets, 4)),
    ("x_TD must be [T, ...], got a number", ValueError, lambda: jagged.jagged_softmax(1.0, offsets)),
    ("x_TD must be floating, got int32(4,)", TypeError, lambda: jagged.jagged_softmax(np.zeros(4, np.int32), offsets)),
    ("x_BLD must be [B, L, ...], got shape (4,)", ValueError, lambda: jagged.dense_to_jagged(x[:, 0], offsets, 4)),
    ("offsets have 1 rows and x_BLD has 4", ValueError, lambda: jagged.dense_to_jagged(x, offsets, 4)),
    ("x_TD is float32 and w_BDE is float16", TypeError,
     lambda: jagged.jagged_dense_matmul(x, np.zeros((1, 3, 2), np.float16), offsets)),
    ("w_BDE must be [B, D, E] with B=1 of the offsets and D of x_TD(4, 3), got shape (2, 3, 2)", ValueError,
     lambda: jagged.jagged_dense_matmul(x, np.zeros((2, 3, 2), np.float32), offsets)),
  ):  # fmt: skip
    with pytest.raises(error, match=re.escape(said)):
      call()
