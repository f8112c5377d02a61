"""embedding.bag, every implementation against a float64 loop; odd structures first.

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
from pallas_kernels.embedding import shapes

V, D, T, B = 6, 256, 14, 4  # one shape for all structures: it is compiled once
NOWHERE = [-1, V, -(2**31), 2**31 - 1]  # ids that do not exist


def loop_oracle(table_VD, ids_T, offsets, weights_T=None, mode="sum"):
  table_VD = np.asarray(table_VD, np.float64)
  out_BD = np.zeros((len(offsets) - 1, table_VD.shape[1]))
  for b in range(len(offsets) - 1):
    for t in range(offsets[b], offsets[b + 1]):
      if 0 <= ids_T[t] < len(table_VD):
        out_BD[b] += (1.0 if weights_T is None else float(weights_T[t])) * table_VD[ids_T[t]]
    if mode == "mean" and offsets[b + 1] > offsets[b]:
      out_BD[b] /= offsets[b + 1] - offsets[b]
  return out_BD


def draw(seed, *, num_rows=V, width=D, num_ids=T, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  table_VD = rng.normal(size=(num_rows, width))
  table_VD[0] = 1e4  # one large row: a wrong id shows far above the tolerance
  ids_T = rng.integers(0, num_rows, num_ids).astype(np.int32)
  return jnp.asarray(table_VD, dtype), ids_T, rng.normal(size=num_ids).astype(np.float32)


@functools.cache
def jitted(mode, implementation):
  """One compilation for all structures; offsets are traced, hence unchecked."""
  return jax.jit(functools.partial(embedding.bag, mode=mode, implementation=implementation))


def assert_equals_loop(run, implementation, table_VD, ids_T, offsets, weights_T=None, mode="sum"):
  offsets = np.asarray(offsets, np.int32)
  out_BD = run(jitted(mode, implementation), table_VD, ids_T, offsets, weights_T)
  assert out_BD.dtype == table_VD.dtype
  # A bfloat16 result is one rounding away from the float32 sum.
  rtol = 2**-8 if table_VD.dtype == jnp.bfloat16 else 1e-5
  expected_BD = loop_oracle(table_VD, ids_T, offsets, weights_T, mode)
  np.testing.assert_allclose(np.asarray(out_BD, np.float64), expected_BD, rtol=rtol, atol=1e-4)


STRUCTURES = {
  "all_bags_empty": [0, 0, 0, 0, 0],
  "empty_first_and_last": [0, 0, 5, 14, 14],
  "all_ids_in_one_bag": [0, 0, 14, 14, 14],
  "one_id": [0, 0, 0, 1, 1],
  "one_id_in_each": [0, 1, 2, 3, 4],
  "group_of_rows_and_one_less_and_one_more": [0, 7, 7, 8, 14],
  "exactly_one_group": [0, 8, 8, 14, 14],
  "one_more_than_a_group": [0, 9, 9, 9, 9],
}


class TestStructure:
  @pytest.mark.parametrize("offsets", STRUCTURES.values(), ids=STRUCTURES)
  @pytest.mark.parametrize("mode", ["sum", "mean"])
  def test_equals_the_loop(self, run, implementation, offsets, mode):
    table_VD, ids_T, weights_T = draw(sum(offsets))
    assert_equals_loop(run, implementation, table_VD, ids_T, offsets, weights_T, mode)

  def test_equals_the_loop_without_weights(self, run, implementation):
    table_VD, ids_T, _ = draw(1)
    assert_equals_loop(run, implementation, table_VD, ids_T, [0, 2, 2, 11, 13])

  def test_a_repeated_id_counts_each_time(self, run, implementation):
    table_VD, ids_T, weights_T = draw(2)
    ids_T[:] = 3
    assert_equals_loop(run, implementation, table_VD, ids_T, [0, 9, 10, 13, 14], weights_T)

  @pytest.mark.parametrize("sizes", [(0, 3, 5), (4, 0, 5), (0, 0, 5), (4, 3, 0)], ids=["bags", "ids", "both", "rows"])
  def test_nothing_of_a_kind_gives_zeros_of_the_right_shape(self, run, implementation, sizes):
    num_bags, num_ids, num_rows = sizes
    offsets = np.asarray([0] * num_bags + [num_ids if num_bags else 0], np.int32)
    args = jnp.ones((num_rows, D)), np.zeros(num_ids, np.int32), offsets
    out_BD = run(jitted("sum", implementation), *args)
    np.testing.assert_array_equal(out_BD, np.zeros((num_bags, D), np.float32))

  def test_lists_are_accepted(self):
    out_BD = embedding.bag(jnp.ones((2, 3)), [0, 1, 1], [0, 1, 3])
    np.testing.assert_array_equal(out_BD, [[1.0] * 3, [2.0] * 3])

  @hypothesis.settings(derandomize=True, deadline=None, max_examples=60)
  @hypothesis.given(data=st.data())
  def test_random_structures_equal_the_loop(self, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, T), min_size=B, max_size=B)))
    ids = data.draw(st.lists(st.sampled_from([*range(V), *NOWHERE]), min_size=T, max_size=T))
    table_VD, _, weights_T = draw(3)
    ids_T, mode = np.asarray(ids, np.int32), data.draw(st.sampled_from(["sum", "mean"]))
    run = lambda function, *args: np.asarray(function(*args))
    assert_equals_loop(run, "reference", table_VD, ids_T, [0, *cuts], weights_T, mode)


class TestWhatMustNotBeRead:
  offsets = (0, 3, 3, 9, 12)  # two tokens of padding

  @pytest.mark.parametrize("mode", ["sum", "mean"])
  def test_ids_that_do_not_exist_add_nothing(self, run, implementation, mode):
    table_VD, ids_T, weights_T = draw(4)
    ids_T[[0, 1, 5, 8]] = NOWHERE
    weights_T[[0, 1, 5, 8]] = np.nan
    # Rows 0 and V - 1 are where a clamped or wrapped id would land.
    table_VD = table_VD.at[jnp.asarray([0, V - 1])].set(np.nan)
    ids_T = np.where((ids_T == 0) | (ids_T == V - 1), 2, ids_T)
    assert_equals_loop(run, implementation, table_VD, ids_T, self.offsets, np.nan_to_num(weights_T), mode)
    out_BD = run(jitted(mode, implementation), table_VD, ids_T, np.asarray(self.offsets, np.int32), weights_T)
    expected_BD = loop_oracle(table_VD, ids_T, self.offsets, weights_T, mode)
    np.testing.assert_allclose(out_BD, expected_BD, rtol=1e-5, atol=1e-4)

  @pytest.mark.parametrize("wild", [0, *NOWHERE])
  def test_tokens_after_the_last_offset_are_never_read(self, run, implementation, wild):
    table_VD, ids_T, weights_T = draw(5)
    table_VD = table_VD.at[0].set(np.nan)
    ids_T[ids_T == 0] = 1
    ids_T[12:], weights_T[12:] = wild, np.nan
    out_BD = run(jitted("sum", implementation), table_VD, ids_T, np.asarray(self.offsets, np.int32), weights_T)
    expected_BD = loop_oracle(table_VD, ids_T, self.offsets, weights_T)
    np.testing.assert_allclose(out_BD, expected_BD, rtol=1e-5, atol=1e-4)

  @pytest.mark.parametrize("poison", [np.nan, np.inf])
  def test_a_row_that_is_not_finite_reaches_only_bags_that_use_it(self, run, implementation, poison):
    table_VD, ids_T, _ = draw(6)
    table_VD, ids_T = table_VD.at[4, 7].set(poison), np.where(ids_T == 4, 1, ids_T).astype(np.int32)
    ids_T[4] = 4  # in bag 2
    out_BD = run(jitted("sum", implementation), table_VD, ids_T, np.asarray(self.offsets, np.int32))
    assert np.argwhere(~np.isfinite(out_BD)).tolist() == [[2, 7]]

  @pytest.mark.parametrize("offsets", [[0, 14, 0, 14, 0], [-4, 2, 2, 99, 14], [3, 2, 1, 0, -1]], ids=str)
  def test_wrong_offsets_that_were_traced_stay_inside_memory(self, run, implementation, offsets):
    """What comes out is not defined; the interpreter raises on a read outside, a GPU may fault."""
    table_VD, ids_T, weights_T = draw(7)
    run(jitted("mean", implementation), table_VD, ids_T, np.asarray(offsets, np.int32), weights_T)


@pytest.mark.parametrize("shape", shapes.TEST.values(), ids=shapes.TEST)
def test_named_shapes_equal_the_loop(run, implementation, shape):
  table_VD, _, weights_T = draw(8, num_rows=shape.V, width=shape.D, num_ids=shape.T, dtype=shape.dtype)
  rng = np.random.default_rng(8)
  ids_T, offsets = shape.draw_ids(rng), shape.draw_offsets(rng)
  assert_equals_loop(run, implementation, table_VD, ids_T, offsets, weights_T, "mean")


@pytest.mark.parametrize("width", [1, 129])
def test_the_reference_serves_any_width(run, width):
  table_VD, ids_T, weights_T = draw(9, width=width)
  assert_equals_loop(run, None, table_VD, ids_T, [0, 2, 2, 11, 13], weights_T)


def test_sums_of_bfloat16_rows_are_float32(run, implementation):
  """300 times 1 in bfloat16 would stop at 256."""
  table_VD = jnp.ones((1, 128), jnp.bfloat16)
  args = table_VD, np.zeros(300, np.int32), np.asarray([0, 300], np.int32)
  out_BD = run(jitted("sum", implementation), *args)
  np.testing.assert_array_equal(out_BD.astype(np.float32), np.full((1, 128), 300.0, np.float32))


def test_the_same_call_gives_the_same_bits(run, implementation):
  table_VD, ids_T, weights_T = draw(10)
  args = jitted("sum", implementation), table_VD, ids_T, np.asarray([0, 1, 12, 12, 14], np.int32), weights_T
  if implementation == "reference" and jax.default_backend() != "cpu":
    pytest.skip("reference: XLA sums with atomics on this GPU")
  assert run(*args).tobytes() == run(*args).tobytes()


class TestDerivatives:
  offsets = np.asarray([0, 3, 3, 9, 12], np.int32)

  def test_the_sink_receives_d_out_in_float32(self, run, implementation):
    table_VD, ids_T, weights_T = draw(11, dtype=jnp.bfloat16)
    d_out_BD = np.random.default_rng(0).integers(-8, 8, (B, D)).astype(np.float32)

    def loss(sink_BD):
      out_BD = embedding.bag(table_VD, ids_T, self.offsets, weights_T, sink=sink_BD, implementation=implementation)
      return jnp.sum(out_BD.astype(jnp.float32) * d_out_BD)

    d_sink_BD = run(jax.jit(jax.grad(loss)), jnp.zeros((B, D)))
    assert d_sink_BD.dtype == np.float32
    np.testing.assert_array_equal(d_sink_BD, d_out_BD)

  def test_weights_have_the_gradient_of_the_loop(self, run, implementation):
    table_VD, ids_T, weights_T = draw(12)
    ids_T[[1, 4]] = -1, V
    d_out_BD = np.random.default_rng(1).normal(size=(B, D)).astype(np.float32)

    def loss(weights_T):
      out_BD = embedding.bag(table_VD, ids_T, self.offsets, weights_T, mode="mean", implementation=implementation)
      return jnp.sum(out_BD * d_out_BD)

    # The bag is linear in the weights: its derivative is its value at each unit vector.
    units = np.eye(T, dtype=np.float32)
    expected_T = [(loop_oracle(table_VD, ids_T, self.offsets, e, "mean") * d_out_BD).sum() for e in units]
    np.testing.assert_allclose(run(jax.jit(jax.grad(loss)), weights_T), expected_T, rtol=1e-5, atol=1e-3)

  def test_a_gradient_that_is_not_finite_stays_in_its_bag(self, run):
    table_VD, ids_T, weights_T = draw(13)
    ids_T[1] = -1  # in bag 0, the poisoned one: it reads nothing, so it has no gradient either
    d_out_BD = jnp.zeros((B, D)).at[0].set(np.nan)
    bag = lambda weights_T: embedding.bag(table_VD, ids_T, self.offsets, weights_T)
    d_weights_T = run(jax.jit(lambda w, d: jax.vjp(bag, w)[1](d)[0]), weights_T, d_out_BD)
    assert np.flatnonzero(~np.isfinite(d_weights_T)).tolist() == [0, 2]

  def test_an_empty_bags_mean_is_zero_and_so_is_its_gradient(self, run):
    """F18."""
    grad = jax.value_and_grad(lambda w: embedding.bag(jnp.ones((2, 3)), [0, 1], [0, 0, 2], w, mode="mean")[0].sum())
    value, d_weights_T = run(jax.jit(grad), jnp.ones(2))
    assert value == 0
    np.testing.assert_array_equal(d_weights_T, [0, 0])

  def test_the_table_has_no_gradient_and_the_error_says_what_to_do(self):
    table_VD, ids_T, _ = draw(14)
    loss = lambda params: embedding.bag(params["table"], ids_T, self.offsets, sink=params["sink"]).sum()
    params = {"table": table_VD, "sink": jnp.zeros((B, D))}
    with pytest.raises(TypeError, match=r"table_VD\(6, 256\) has no dense gradient; differentiate with .* `sink`"):
      jax.jit(jax.grad(loss))(params)
    held = lambda params: loss(params | {"table": jax.lax.stop_gradient(params["table"])})
    np.testing.assert_array_equal(jax.grad(held)(params)["sink"], np.ones((B, D), np.float32))

  def test_the_sink_works_under_scan_and_remat(self):
    table_VD, ids_T, _ = draw(15)

    def loss(sink_BD):
      layer = jax.checkpoint(lambda c, _: (c + embedding.bag(table_VD, ids_T, self.offsets, sink=sink_BD).sum(), None))
      return jax.lax.scan(layer, 0.0, None, length=3)[0]

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.zeros((B, D))), np.full((B, D), 3.0, np.float32))


class TestRefusals:
  table_VD, ids_T, offsets = jnp.zeros((4, 128)), np.zeros(5, np.int32), np.asarray([0, 2, 5], np.int32)

  def test_decreasing_offsets(self):
    with pytest.raises(ValueError, match=r"embedding\.bag: offsets\[2\] = 2 is below offsets\[1\] = 3"):
      embedding.bag(self.table_VD, self.ids_T, np.asarray([0, 3, 2, 5], np.int32))

  def test_offsets_past_the_ids(self):
    with pytest.raises(ValueError, match=r"offsets\[1\] = 6 points past the T = 5 tokens"):
      embedding.bag(self.table_VD, self.ids_T, np.asarray([0, 6], np.int32))

  def test_wide_ids(self):
    with pytest.raises(TypeError, match="ids must be int32, got int64"):
      embedding.bag(self.table_VD, np.asarray([2**32 + 3]), self.offsets)

  def test_ids_in_two_dimensions(self):
    with pytest.raises(ValueError, match=r"ids must be one row of T ids, got shape \(5, 1\)"):
      embedding.bag(self.table_VD, self.ids_T[:, None], self.offsets)

  def test_an_integer_table(self):
    with pytest.raises(TypeError, match=r"table_VD must be floating \[V, D\], got int32\(4, 128\)"):
      embedding.bag(self.table_VD.astype(jnp.int32), self.ids_T, self.offsets)

  def test_weights_of_another_length(self):
    with pytest.raises(ValueError, match=r"weights must be float32\(5,\), .* got float32\(4,\)"):
      embedding.bag(self.table_VD, self.ids_T, self.offsets, np.ones(4, np.float32))

  def test_a_sink_of_another_shape(self):
    with pytest.raises(ValueError, match=r"sink must be float32\(2, 128\) like the result, got bfloat16\(2, 128\)"):
      embedding.bag(self.table_VD, self.ids_T, self.offsets, sink=jnp.zeros((2, 128), jnp.bfloat16))

  def test_an_unknown_mode(self):
    with pytest.raises(ValueError, match=r"mode='max' must be one of \('sum', 'mean'\)"):
      embedding.bag(self.table_VD, self.ids_T, self.offsets, mode="max")

  @pytest.mark.parametrize("implementation", ["interpret", "hopper"])
  def test_a_width_that_the_kernel_cannot_do(self, implementation):
    with pytest.raises(
      NotImplementedError, match=r"cannot serve this call: row width D=100 is no multiple of 128; pad"
    ):
      embedding.bag(jnp.zeros((4, 100)), self.ids_T, self.offsets, implementation=implementation)

  def test_a_dtype_that_the_kernel_cannot_do(self):
    with pytest.raises(NotImplementedError, match="a table of float16 is not float32 or bfloat16"):
      embedding.bag(self.table_VD.astype(jnp.float16), self.ids_T, self.offsets, implementation="interpret")
