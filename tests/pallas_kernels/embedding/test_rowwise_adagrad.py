"""embedding.rowwise_adagrad against a float64 loop; odd structures first.

Dimension key: V table rows, D row width, T ids, B bags.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import embedding

V, D, T, B = 6, 3, 9, 4
LEARNING_RATE, EPS = 0.3, 1e-3


def loop_oracle(table_VD, m_V, ids_T, offsets, weights_T, d_out_BD, mode="sum"):
  table_VD, m_V, g = np.array(table_VD, np.float64), np.array(m_V, np.float64), {}
  for b in range(len(offsets) - 1):
    divisor = offsets[b + 1] - offsets[b] if mode == "mean" else 1
    for t in range(offsets[b], offsets[b + 1]):
      if 0 <= ids_T[t] < len(table_VD):
        weight = 1.0 if weights_T is None else float(weights_T[t])
        g[ids_T[t]] = g.get(ids_T[t], 0) + weight * np.asarray(d_out_BD[b], np.float64) / divisor
  for row, gradient in g.items():
    m_V[row] += np.mean(gradient**2)
    table_VD[row] -= LEARNING_RATE * gradient / (np.sqrt(m_V[row]) + EPS)
  return table_VD, m_V


@functools.cache
def jitted(mode="sum"):
  """One compilation for all structures; offsets are traced, hence unchecked."""
  return jax.jit(functools.partial(embedding.rowwise_adagrad, learning_rate=LEARNING_RATE, eps=EPS, mode=mode))


def draw(seed=0):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  ids_T = rng.integers(0, V, T).astype(np.int32)
  return normal(V, D), np.abs(normal(V)), ids_T, normal(T), normal(B, D)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
  "offsets",
  [[0, 0, 0, 0, 0], [0, 0, 3, 9, 9], [0, 9, 9, 9, 9], [0, 1, 2, 3, 4], [0, 3, 5, 7, 9]],
)
def test_equals_the_loop(offsets, weighted, mode):
  table_VD, m_V, ids_T, weights_T, d_out_BD = draw()
  offsets = np.array(offsets, np.int32)
  weights_T = weights_T if weighted else None
  found = jitted(mode)(table_VD, m_V, ids_T, offsets, weights_T, d_out_BD)
  expected = loop_oracle(table_VD, m_V, ids_T, offsets, weights_T, d_out_BD, mode)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@hypothesis.given(
  ids=st.lists(st.sampled_from([*range(V), -1, V, -(2**31), 2**31 - 1]), min_size=T, max_size=T),
  cuts=st.lists(st.integers(0, T), min_size=B, max_size=B),
)
@hypothesis.settings(max_examples=50, deadline=None)
def test_any_ids_and_bags_equal_the_loop_and_padding_is_never_read(ids, cuts):
  table_VD, m_V, _, weights_T, d_out_BD = draw(1)
  ids_T, offsets = np.array(ids, np.int32), np.array([0, *sorted(cuts)], np.int32)
  weights_T[offsets[-1] :] = np.nan
  found = jitted()(table_VD, m_V, ids_T, offsets, weights_T, d_out_BD)
  expected = loop_oracle(table_VD, m_V, ids_T, offsets, weights_T, d_out_BD)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  untouched = ~np.isin(np.arange(V), ids_T[: offsets[-1]])
  np.testing.assert_array_equal(np.asarray(found[0])[untouched], table_VD[untouched])


def hot_problem(width, seed=5):
  """300 ids in bags of any length, of which four in five are one: its sum goes over several pieces."""
  rng = np.random.default_rng(seed)
  ids_T = np.where(rng.random(300) < 0.8, 2, rng.integers(0, V, 300)).astype(np.int32)
  offsets = np.array([0, *sorted(rng.integers(0, 301, 39)), 300], np.int32)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return normal(V, width), np.abs(normal(V)), ids_T, offsets, normal(300), normal(40, width)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
  ("width", "implementation"),
  [(D, "reference"), (128, "interpret"), pytest.param(256, "hopper", marks=pytest.mark.gpu)],
)
def test_an_id_that_is_nearly_everywhere_equals_the_loop(width, implementation, mode):
  problem = hot_problem(width)
  update = functools.partial(embedding.rowwise_adagrad, learning_rate=LEARNING_RATE, eps=EPS, mode=mode)
  found = jax.jit(functools.partial(update, implementation=implementation))(*problem)
  for a, b in zip(found, loop_oracle(*problem, mode), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_many_updates_of_skewed_ids_give_the_same_bits():
  rng = np.random.default_rng(0)
  rows, tokens, bags = 100_000, 200_000, 3000
  ids_T = np.minimum(rng.zipf(1.2, tokens) - 1, rows - 1).astype(np.int32)
  offsets = np.array([0, *sorted(rng.integers(0, tokens, bags - 1)), tokens], np.int32)
  arrays = (
    jnp.zeros((rows, 128)),
    jnp.zeros(rows),
    ids_T,
    offsets,
    None,
    rng.normal(size=(bags, 128)).astype(np.float32),
  )
  update = jax.jit(functools.partial(embedding.rowwise_adagrad, learning_rate=0.1, eps=EPS, mode="mean"))
  first = update(*arrays)
  table_VD, m_V = loop_free_oracle(*arrays)
  np.testing.assert_allclose(first[1], m_V, rtol=1e-3, atol=1e-9)
  np.testing.assert_allclose(first[0], table_VD, rtol=1e-3, atol=1e-5)
  for _ in range(20):
    jax.tree.map(np.testing.assert_array_equal, update(*arrays), first)


def loop_free_oracle(table_VD, m_V, ids_T, offsets, _, d_out_BD):
  """In float64, of mean bags from zeros."""
  lengths_B = np.diff(offsets)
  terms_TD = np.repeat(d_out_BD.astype(np.float64) / np.maximum(lengths_B, 1)[:, None], lengths_B, axis=0)
  g_VD = np.zeros(table_VD.shape)
  np.add.at(g_VD, ids_T, terms_TD)
  m_V = (g_VD**2).mean(axis=1)
  return -0.1 * g_VD / (np.sqrt(m_V) + EPS)[:, None], m_V


def test_a_repeated_id_takes_one_step_on_the_sum_of_its_gradients():
  """Two steps would take (1, 1), and then as much again, less 1 / sqrt(2)."""
  table_VD, m_V = jnp.zeros((1, 2)), jnp.zeros(1)
  ids, offsets, d_out_BD = jnp.zeros(2, jnp.int32), jnp.array([0, 1, 2], jnp.int32), jnp.array([[3.0, 3.0], [1.0, 1.0]])
  table_VD, m_V = embedding.rowwise_adagrad(table_VD, m_V, ids, offsets, None, d_out_BD, learning_rate=1.0, eps=1e-9)
  np.testing.assert_allclose(m_V, [16.0])
  np.testing.assert_allclose(table_VD, [[-1.0, -1.0]], rtol=1e-6)


def test_gradients_of_a_bag_s_sink_lower_its_loss():
  table_VD, m_V, ids_T, weights_T, target_BD = map(jnp.asarray, draw(2))
  offsets = jnp.array([0, 2, 4, 7, 9], jnp.int32)

  def loss(sink, table_VD):
    return jnp.sum((embedding.bag(table_VD, ids_T, offsets, weights_T, sink=sink) - target_BD) ** 2)

  losses, m_V = [], jnp.zeros_like(m_V)
  for _ in range(300):
    value, d_out_BD = jax.value_and_grad(loss)(jnp.zeros((B, D)), table_VD)
    losses.append(float(value))
    table_VD, m_V = jitted()(table_VD, m_V, ids_T, offsets, weights_T, d_out_BD)
  assert losses[-1] < 0.05 * losses[0]


def test_nan_in_one_bag_reaches_the_rows_of_that_bag_alone():
  table_VD, m_V, _, _, d_out_BD = draw()
  ids_T, offsets = np.array([0, 1, 2, 3, 4, 5, 0, 1, 2], np.int32), np.array([0, 2, 4, 6, 6], np.int32)
  d_out_BD[1] = np.nan
  table_VD, m_V = jitted()(table_VD, m_V, ids_T, offsets, None, d_out_BD)
  assert np.flatnonzero(np.isnan(m_V)).tolist() == [2, 3]
  assert np.flatnonzero(np.isnan(table_VD).any(axis=1)).tolist() == [2, 3]


def test_a_bfloat16_row_is_rounded_once():
  table_VD, m_V, ids_T, _, d_out_BD = draw()
  offsets = np.array([0, 2, 4, 7, 9], np.int32)
  table_VD = jnp.asarray(table_VD, jnp.bfloat16)
  found_VD, _ = jitted()(table_VD, m_V, ids_T, offsets, None, d_out_BD)
  expected_VD, _ = loop_oracle(table_VD.astype(jnp.float32), m_V, ids_T, offsets, None, d_out_BD)
  assert found_VD.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found_VD, jnp.asarray(expected_VD, jnp.float32).astype(jnp.bfloat16))


@pytest.mark.parametrize(("rows", "tokens", "bags"), [(0, 2, 1), (3, 0, 1), (3, 0, 0)])
def test_nothing_to_update(rows, tokens, bags):
  table_VD, m_V = jnp.ones((rows, 2)), jnp.ones(rows)
  offsets = jnp.zeros(bags + 1, jnp.int32)
  found = embedding.rowwise_adagrad(
    table_VD, m_V, jnp.zeros(tokens, jnp.int32), offsets, None, jnp.ones((bags, 2)), learning_rate=1.0, eps=1.0
  )
  assert found[0] is table_VD
  assert found[1] is m_V


def test_a_donated_table_is_updated_in_place_and_no_other_array_is_as_large():
  shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)
  rows = 1 << 20
  arguments = shape(rows, 16), shape(rows), shape(64, dtype=jnp.int32), shape(9, dtype=jnp.int32), None, shape(8, 16)
  step = functools.partial(embedding.rowwise_adagrad, learning_rate=0.1, eps=1e-8)
  memory = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile().memory_analysis()
  assert memory.alias_size_in_bytes == 4 * rows * 17
  assert memory.temp_size_in_bytes < 4 * rows


@pytest.mark.parametrize(
  ("change", "error", "said"),
  [
    (dict(ids=jnp.zeros(2, jnp.int16)), TypeError, r"ids must be int32\[T\], got int16\(2,\)"),
    (dict(table_VD=jnp.zeros((3, 2), jnp.int32)), TypeError, r"table_VD must be floating \[V, D\], got int32\(3, 2\)"),
    (dict(m_V=jnp.zeros(2)), ValueError, r"m_V must be float32\(3,\), got float32\(2,\)"),
    (dict(d_out_BD=jnp.zeros((2, 2))), ValueError, r"d_out_BD must be float32\(1, 2\), got float32\(2, 2\)"),
    (dict(weights=jnp.zeros(3)), ValueError, r"weights must be float32\(2,\), got float32\(3,\)"),
    (dict(mode="max"), ValueError, r"mode='max' must be one of \('sum', 'mean'\)"),
    (dict(eps=0.0), ValueError, r"eps=0.0 must be positive"),
    (dict(offsets=jnp.array([0, 3], jnp.int32)), ValueError, "offsets"),
  ],
)
def test_what_does_not_fit_is_refused(change, error, said):
  arguments = dict(table_VD=jnp.zeros((3, 2)), m_V=jnp.zeros(3), ids=jnp.zeros(2, jnp.int32), weights=None)
  arguments |= dict(offsets=jnp.array([0, 2], jnp.int32), d_out_BD=jnp.zeros((1, 2)), learning_rate=1.0, eps=1e-8)
  with pytest.raises(error, match=rf"embedding\.rowwise_adagrad: .*{said}"):
    embedding.rowwise_adagrad(**arguments | change)
