"""The packed layout: the authors' bytes, odd counts and values, and what is refused.

Dimension key: M rows, F columns.
"""

import functools
import struct

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import twell_oracle

from pallas_kernels import twell
from pallas_kernels.twell import format

BFLOAT16 = np.dtype(jnp.bfloat16)


to_dense = jax.jit(twell.to_dense)


@functools.cache
def from_dense(spec=None):
  """Compiled: as single operations it takes a second for every new shape."""
  return jax.jit(functools.partial(twell.from_dense, spec=spec))


def row_of(columns, **values):
  """A bfloat16 row with values at `c<column>`."""
  h_MF = np.zeros((1, columns), BFLOAT16)
  for column, value in values.items():
    h_MF[0, int(column[1:])] = value
  return h_MF


def assert_holds(packed, h_MF):
  """Count and entries equal the oracle's; what lies behind them is free."""
  words = np.asarray(packed.words)
  expected = twell_oracle.pack(h_MF, packed.spec.tile, packed.spec.words)
  assert words.dtype == np.uint32
  assert words.shape == (len(h_MF), -(-h_MF.shape[1] // packed.spec.tile), packed.spec.words)
  for m, row in enumerate(expected):
    for t, tile in enumerate(row):
      assert words[m, t, : len(tile)].tolist() == tile


def assert_round_trip(h_MF, spec=None):
  """Same bits back, but for -0, which is no entry and comes back as 0."""
  packed = from_dense(spec)(h_MF)
  assert_holds(packed, h_MF)
  format.check(packed)
  back_MF = np.asarray(to_dense(packed))
  assert back_MF.dtype == h_MF.dtype
  assert back_MF.tobytes() == np.where(h_MF == 0, np.zeros_like(h_MF), h_MF).tobytes()
  return packed


class TestAuthorsLayout:
  def test_the_bytes_of_a_hand_worked_example(self):
    """Of every eight columns, lanes 0..3 of a quad hold two each; the words of lane 0 come first."""
    values = dict(c0=1.0, c2=2.0, c7=0.5, c8=3.0, c9=-1.5, c255=1.5, c256=-2.0, c299=1.0)
    words = np.asarray(from_dense()(row_of(300, **values)).words)
    lane_0 = [0x3F80_0000, 0x4040_0008, 0xBFC0_0009]
    lane_1, lane_3 = [0x4000_0002], [0x3F00_0007, 0x3FC0_00FF]
    assert words.shape == (1, 2, 32)
    assert words[0, 0, :7].tobytes() == struct.pack("<7I", 6, *lane_0, *lane_1, *lane_3)
    # 256 is the first column of its tile; 299 = 0x12B has the place 43, and 43 mod 8 = 3 is of lane 1.
    assert words[0, 1, :3].tobytes() == struct.pack("<3I", 2, 0xC000_0100, 0x3F80_012B)

  def test_a_row_is_a_quarter_of_its_dense_bytes(self):
    packed = from_dense()(jnp.zeros((3, 5632), jnp.bfloat16))
    assert packed.words.nbytes == 3 * 5632 * 2 // 4

  def test_float16_values_take_the_same_place(self):
    h_MF = jnp.zeros((1, 256), jnp.float16).at[0, 5].set(-1.5)
    packed = from_dense()(h_MF)
    assert packed.spec.value_dtype == np.float16
    assert packed.words[0, 0, :2].tolist() == [1, 0xBE00_0005]

  def test_float32_is_rounded_to_bfloat16(self):
    packed = from_dense()(jnp.full((1, 256), 1 + 2**-8 + 2**-12))
    assert packed.spec.value_dtype == BFLOAT16
    assert int(packed.words[0, 0, 1]) >> 16 == 0x3F81


class TestCounts:
  @pytest.mark.parametrize("count", [0, 1, 2, 30, 31])
  @pytest.mark.parametrize("last", [False, True])
  def test_what_fits_comes_back(self, count, last):
    h_MF = np.zeros((2, 512), BFLOAT16)
    columns = np.random.default_rng(count).permutation(256)[:count] + 256 * last
    h_MF[1, columns] = np.arange(1, count + 1)
    packed = assert_round_trip(h_MF)
    assert packed.counts.tolist() == [[0, 0], [0, count] if last else [count, 0]]
    assert packed.overflows.tolist() == [False, False]

  @pytest.mark.parametrize("count", [32, 33, 64, 256])
  def test_what_does_not_fit_keeps_its_true_count_and_its_first_entries(self, count):
    h_MF = np.zeros((2, 512), BFLOAT16)
    h_MF[1, 256 + np.random.default_rng(count).permutation(256)[:count]] = 3
    packed = from_dense()(h_MF)
    assert_holds(packed, h_MF)
    assert packed.counts.tolist() == [[0, 0], [0, count]]
    assert packed.overflows.tolist() == [False, True]

  def test_a_dense_row_overflows_every_tile_and_no_other_row(self):
    h_MF = np.zeros((3, 640), BFLOAT16)
    h_MF[1] = np.arange(1, 641)
    packed = from_dense()(h_MF)
    assert_holds(packed, h_MF)
    assert packed.counts.tolist() == [[0] * 3, [256, 256, 128], [0] * 3]
    assert packed.overflows.tolist() == [False, True, False]

  @pytest.mark.parametrize("columns", [1, 7, 255, 257, 300])
  def test_columns_need_not_fill_the_last_tile(self, columns):
    h_MF = np.zeros((2, columns), BFLOAT16)
    h_MF[:, [0, -1]] = [[1, 2], [3, 4]]
    assert_round_trip(h_MF)

  @pytest.mark.parametrize("shape", [(0, 256), (3, 0), (0, 0)])
  def test_nothing_at_all(self, shape):
    packed = assert_round_trip(np.zeros(shape, BFLOAT16))
    assert packed.overflows.tolist() == [False] * shape[0]


class TestValues:
  @pytest.mark.parametrize(
    "value", [np.nan, np.inf, -np.inf, -1.0, 2.0**-133, -(2.0**-126), 3.3895e38], ids=lambda value: f"{value:g}"
  )
  def test_a_value_that_is_not_zero_is_an_entry(self, value):
    assert assert_round_trip(row_of(256, c3=1, c17=value)).counts.tolist() == [[2]]

  @pytest.mark.parametrize("bits", [0x7FC1, 0xFF81])
  def test_a_nan_keeps_its_bits(self, bits):
    h_MF = np.zeros((1, 256), BFLOAT16)
    h_MF.view(np.uint16)[0, 9] = bits
    assert_round_trip(h_MF)

  def test_zero_is_no_entry_whatever_its_sign(self):
    packed = assert_round_trip(row_of(256, c3=1, c17=-0.0))
    assert packed.counts.tolist() == [[1]]

  def test_what_rounds_to_zero_in_float16_is_no_entry(self):
    h_MF = jnp.zeros((1, 256)).at[0, :3].set([2.0**-26, -(2.0**-30), 2.0**-24])
    packed = from_dense(twell.Spec(value_dtype=jnp.float16))(h_MF)
    assert packed.words[0, 0, :2].tolist() == [1, 0x0001_0002]

  def test_what_float16_does_not_hold_becomes_infinite_and_not_a_number_of_its_own(self):
    h_MF = jnp.zeros((1, 256)).at[0, 4].set(-1e6)
    packed = from_dense(twell.Spec(value_dtype=jnp.float16))(h_MF)
    assert packed.words[0, 0, :2].tolist() == [1, 0xFC00_0004]

  def test_the_last_column_that_a_word_can_name(self):
    packed = assert_round_trip(row_of(65536, c65535=1, c32768=2))
    assert int(packed.words[0, 255, 1]) == 0x3F80_FFFF


LAYOUTS = {
  "half": (256, 2, jnp.bfloat16),
  "quarter": (256, 4, jnp.bfloat16),
  "eighth_of_float16": (256, 8, jnp.float16),
  "as_many_words_as_columns": (256, 1, jnp.float16),
  "one_entry": (8, 4, jnp.bfloat16),
  "narrow": (128, 8, jnp.bfloat16),
  "wide": (512, 16, jnp.bfloat16),
  "not_a_power_of_two": (24, 3, jnp.float16),
}


class TestSpec:
  @pytest.mark.parametrize(("tile", "compression", "dtype"), LAYOUTS.values(), ids=LAYOUTS)
  def test_other_layouts_hold_as_much_as_they_say(self, tile, compression, dtype):
    spec = twell.Spec(tile=tile, compression=compression, value_dtype=dtype)
    assert spec.words == tile // compression
    assert spec.capacity == spec.words - 1
    columns = 2 * tile + 5
    h_MF = np.zeros((3, columns), dtype)
    h_MF[1, tile : tile + spec.capacity] = np.arange(1, spec.capacity + 1)
    h_MF[2, [tile - 1, columns - 1]] = -1
    assert_round_trip(h_MF, spec)

  @pytest.mark.parametrize("dtype", ["float32", "int16"])
  def test_values_are_of_16_bits(self, dtype):
    with pytest.raises(ValueError, match=rf"value_dtype={dtype} must be bfloat16 or float16"):
      twell.Spec(value_dtype=dtype)

  @pytest.mark.parametrize("tile", [0, -8, 100])
  def test_a_tile_is_whole_groups_of_eight(self, tile):
    with pytest.raises(ValueError, match=rf"tile={tile} must be a positive multiple of 8"):
      twell.Spec(tile=tile)

  @pytest.mark.parametrize("compression", [0, -2, 3, 256, 512])
  def test_a_tile_has_room_for_a_count_and_an_entry(self, compression):
    with pytest.raises(ValueError, match=rf"compression={compression} must divide tile=256 into two words or more"):
      twell.Spec(compression=compression)

  def test_equal_specs_are_one_key(self):
    """Otherwise jit would compile again for every call."""
    assert len({twell.Spec(), twell.Spec(value_dtype="bfloat16"), twell.Spec(value_dtype=jnp.bfloat16)}) == 1


class TestRoundTrip:
  @hypothesis.settings(derandomize=True, deadline=None, max_examples=100)
  @hypothesis.given(data=st.data())
  def test_random_rows_equal_the_loops(self, data):
    """Rows that fit come back, those that do not are NaN, and counts are true in either case."""
    tile, compression = data.draw(st.sampled_from([(8, 2), (16, 4), (256, 8)]))
    spec = twell.Spec(
      tile=tile, compression=compression, value_dtype=data.draw(st.sampled_from(["bfloat16", "float16"]))
    )
    h_MF = np.zeros((2, 2 * tile + 3), spec.value_dtype)
    places = st.tuples(st.integers(0, 1), st.integers(0, h_MF.shape[1] - 1), st.integers(0, 0xFFFF))
    for row, column, bits in data.draw(st.lists(places, max_size=12)):
      h_MF.view(np.uint16)[row, column] = bits
    if data.draw(st.booleans()):
      h_MF[1, data.draw(st.integers(0, h_MF.shape[1])) :] = 1
    packed = from_dense(spec)(h_MF)
    assert_holds(packed, h_MF)
    loops = twell_oracle.pack(h_MF, tile, spec.words)
    overflows = [any(tile[0] > spec.capacity for tile in row) for row in loops]
    assert packed.overflows.tolist() == overflows
    back_MF = np.asarray(to_dense(packed))
    for row, (loop, overflow) in enumerate(zip(loops, overflows)):
      if overflow:
        assert np.isnan(back_MF[row].astype(np.float32)).all()
      else:
        expected_F = twell_oracle.unpack([loop], h_MF.shape[1], spec.value_dtype)[0]
        assert back_MF[row].tobytes() == expected_F.tobytes()

  def test_words_behind_the_last_entry_are_never_read(self):
    h_MF = row_of(512, c3=1, c500=-2)
    packed = from_dense()(h_MF)
    stale = np.array(packed.words)
    stale[0, 0, 2:], stale[0, 1, 2:] = 0xFFFF_FFFF, 0x3F80_0003
    back_MF = twell.to_dense(twell.Twell(jnp.asarray(stale), packed.spec, 512))
    np.testing.assert_array_equal(back_MF, h_MF)


class TestTransformations:
  def test_rows_that_overflow_are_nan_under_jit_and_others_intact(self):
    h_MF = np.zeros((3, 512), BFLOAT16)
    h_MF[:, [1, 300]] = [[1, 2], [3, 4], [5, 6]]
    h_MF[1, :32] = 7
    back_MF = np.asarray(to_dense(from_dense()(h_MF)))
    assert np.isnan(back_MF[1].astype(np.float32)).all()
    assert back_MF[[0, 2]].tobytes() == h_MF[[0, 2]].tobytes()

  def test_a_damaged_count_is_nan_under_jit_not_an_empty_row(self):
    """2**31 and more are negative as int32."""
    packed = from_dense()(row_of(256, c3=1))
    words = packed.words.at[0, 0, 0].set(jnp.uint32(0xFFFF_FFFF))
    back_MF = to_dense(twell.Twell(words, packed.spec, 256))
    assert np.isnan(np.asarray(back_MF, np.float32)).all()

  def test_jit_scan_and_vmap_carry_it(self):
    h_BMF = np.zeros((2, 3, 256), BFLOAT16)
    h_BMF[:, 1, 4] = 5
    packed = jax.jit(jax.vmap(twell.from_dense))(h_BMF)
    assert isinstance(packed, twell.Twell)
    assert packed.words.shape == (2, 3, 1, 32)
    _, back_BMF = jax.lax.scan(lambda _, layer: (None, twell.to_dense(layer)), None, packed)
    np.testing.assert_array_equal(back_BMF, h_BMF)

  def test_tree_map_keeps_the_layout(self):
    packed = from_dense(twell.Spec(compression=4))(row_of(256, c3=1))
    doubled = jax.tree.map(lambda words: jnp.concatenate([words, words]), packed)
    assert (doubled.spec, doubled.columns) == (packed.spec, 256)
    assert twell.to_dense(doubled).shape == (2, 256)

  def test_eval_shape_allocates_nothing(self):
    many = jax.ShapeDtypeStruct((1 << 30, 65536), jnp.bfloat16)
    packed = jax.eval_shape(twell.from_dense, many)
    assert (packed.words.shape, packed.words.dtype) == ((1 << 30, 256, 32), jnp.uint32)
    assert jax.eval_shape(twell.to_dense, packed) == many


class TestRefusals:
  def packed(self, **changes):
    packed = from_dense()(row_of(300, c3=1, c299=2))
    given = {"words": packed.words, "spec": packed.spec, "columns": 300} | changes
    return twell.Twell(**given)

  def test_the_array_they_are_made_from_is_accepted(self):
    assert twell.to_dense(self.packed()).shape == (1, 300)

  def test_words_of_another_dtype(self):
    with pytest.raises(ValueError, match=r"must be uint32\[M, 2, 32\], got int32\(1, 2, 32\)"):
      twell.to_dense(self.packed(words=jnp.zeros((1, 2, 32), jnp.int32)))

  @pytest.mark.parametrize("shape", [(1, 64), (1, 1, 2, 32), (1, 3, 32), (1, 2, 64)], ids=str)
  def test_words_of_another_shape(self, shape):
    said = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(
      ValueError, match=rf"words of 300 columns under .* must be uint32\[M, 2, 32\], got uint32{said}"
    ):
      twell.to_dense(self.packed(words=jnp.zeros(shape, jnp.uint32)))

  def test_words_of_another_spec(self):
    with pytest.raises(ValueError, match=r"compression=4.* must be uint32\[M, 2, 64\], got uint32\(1, 2, 32\)"):
      twell.to_dense(self.packed(spec=twell.Spec(compression=4)))
    with pytest.raises(ValueError, match=r"tile=128.* must be uint32\[M, 3, 32\], got uint32\(1, 2, 32\)"):
      to_dense(self.packed(spec=twell.Spec(tile=128, compression=4)))

  @pytest.mark.parametrize("count", [32, 256, 2**32 - 1])
  def test_more_than_a_tile_holds(self, count):
    words = self.packed().words.at[0, 1, 0].set(jnp.uint32(count))
    with pytest.raises(ValueError, match=rf"row 0 has {count} non-zeros in tile 1, which holds 31; .* smaller compre"):
      twell.to_dense(self.packed(words=words))

  @pytest.mark.parametrize(("tile", "column"), [(0, 256), (0, 65535), (1, 255), (1, 300)])
  def test_a_column_of_another_tile_or_of_none(self, tile, column):
    words = self.packed().words.at[0, tile, 1].set(jnp.uint32(0x3F80_0000 | column))
    said = rf"entry 0 of row 0, tile {tile} names column {column}, which lies in no or another tile of 300 columns"
    with pytest.raises(ValueError, match=said):
      twell.to_dense(self.packed(words=words))

  @pytest.mark.parametrize("h", [jnp.zeros(256), jnp.zeros((1, 1, 256)), jnp.zeros((1, 256), jnp.int32)], ids=str)
  def test_what_is_no_matrix_of_floating_values(self, h):
    said = f"{h.dtype}{h.shape}".replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=rf"from_dense: h_MF must be floating \[M, F\], got {said}"):
      twell.from_dense(h)

  def test_more_columns_than_16_bits_can_name(self):
    with pytest.raises(
      ValueError, match=r"F=65537 columns, but a word has 16 bits .* 65536 at most; use route='dense'"
    ):
      twell.from_dense(jnp.zeros((1, 65537), jnp.bfloat16))


@pytest.mark.parametrize("sizes", [{"tile": 256.0}, {"compression": 8.0}, {"compression": True}])
def test_sizes_of_a_spec_are_integers(sizes):
  with pytest.raises(TypeError, match=r"tile=.* and compression=.* must be integers"):
    twell.Spec(**sizes)
