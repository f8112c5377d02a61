"""Each TwELL kernel alone, below the public functions, against loops and float64 in NumPy.

Inputs are small integers, so that sums in float32 are exact in any order and results have to agree to the last bit.
What a kernel must not use is poison: a word behind the entries of a tile is a NaN of column 65535, a hidden value that
is not listed is NaN.

Dimension key: M tokens (P: padded to a multiple of 8), D model width, F neurons, S words of a tile, W words of 32 bits.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import twell_oracle

from pallas_kernels import compile_cases, compile_check, mosaic
from pallas_kernels.twell import Spec, active_hopper, decode_hopper, gather_hopper, hopper, kept, pack_hopper, routing

TILE, ROW_CAPACITY = 256, 256
BLOCK = 64  # neurons of a block of `hidden`
POISON = np.uint32(0xFFFFFFFF)
LARGE = 31  # times up to 199, not all products have 16 bits
CASES = {name: case for name, case in compile_cases.cases().items() if name.startswith("twell_")}
# These differ from other sizes of pack in what they spill, and take seconds.
LOWERED = {name: case for name, case in CASES.items() if not name.startswith("twell_pack/paper/")}


@pytest.mark.parametrize("case", LOWERED.values(), ids=LOWERED)
def test_lowers_for_cuda(case):
  assert len(compile_check.kernel_modules(compile_check.lower(case))) == 1


class TestConfigs:
  @pytest.mark.parametrize("stages", [0, 1])
  def test_a_pack_without_two_stages_is_refused(self, stages):
    with pytest.raises(ValueError, match=rf"Config\.stages={stages} must be at least 2"):
      pack_hopper.Config(words=32, stages=stages)

  def test_a_pack_without_a_group_of_rows_is_refused(self):
    with pytest.raises(ValueError, match=r"Config\.group=0 must be positive"):
      pack_hopper.Config(words=32, stages=4, group=0)

  @pytest.mark.parametrize(("words", "stages", "needed"), [(32, 5, 262224), (128, 4, 262208)])
  def test_a_pack_that_does_not_fit_is_refused_with_both_numbers(self, words, stages, needed):
    said = rf"Config\(words={words}, stages={stages}, group=8\) needs {needed} bytes of shared memory, .* has 232448"
    with pytest.raises(ValueError, match=said):
      pack_hopper.Config(words=words, stages=stages)

  @pytest.mark.parametrize(("compression", "stages"), [(8, 4), (4, 4), (2, 3)])
  def test_a_pack_has_as_many_stages_as_fit(self, compression, stages):
    assert pack_hopper.Config.for_spec(Spec(compression=compression)).stages == stages

  def test_tiles_that_leave_no_room_are_refused(self):
    with pytest.raises(ValueError, match=r"a tile of Spec\(tile=512, .* does not fit into shared memory beside two"):
      pack_hopper.Config.for_spec(Spec(tile=512, compression=1))

  @pytest.mark.parametrize("unroll", [0, 5])
  @pytest.mark.parametrize("name", ["dots_unroll", "sums_unroll"])
  def test_rows_that_no_registers_hold_are_refused(self, name, unroll):
    with pytest.raises(ValueError, match=rf"Config\.{name}={unroll} must be in 1\.\.4"):
      gather_hopper.Config(**{name: unroll})


class TestSharedMemory:
  """Of every shape that `hopper.unsupported` lets through."""

  @pytest.fixture
  def needed(self, monkeypatch):
    """`needed(kernel, *arrays)`: its bytes, as Mosaic lays them out: each array from a multiple of 1024."""
    found = []

    def launch(body, *, out_type, scratch_types, **options):
      arrays = [s for s in scratch_types if hasattr(s, "dtype")]
      sizes = [math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in arrays]
      barriers = sum(math.prod(s.num_barriers) for s in scratch_types if s not in arrays)
      found.append(sum(-(-size // 1024) * 1024 for size in sizes) + 8 * barriers)
      return lambda *operands: jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_type)

    def call(kernel, *arrays, **options):
      jax.eval_shape(functools.partial(kernel.__wrapped__, **options), *arrays)
      return found[-1]

    monkeypatch.setattr(mosaic, "kernel", launch)
    return call

  widths = (*range(128, 2048, 128), 2048, 2176, 4096, 8064, 8192)

  def array(self, *shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)

  def test_widths_and_neurons_end_here(self):
    for width, neurons in ((8320, 256), (8192, 65536 + 128)):
      said = hopper.unsupported(jnp.bfloat16, neurons, width, Spec())
      assert (said is None) == (width <= 8192)
    with pytest.raises(ValueError, match="65536 at most"):
      Spec().tiles(65536 + 128)

  @pytest.mark.parametrize("tokens", range(8, routing.FEW_TOKENS + 1, 8))
  def test_hidden_fits(self, needed, tokens):
    for width in self.widths:
      x_PD, w_FD = self.array(tokens, width), self.array(65536, width)
      assert needed(decode_hopper.hidden, x_PD, w_FD, w_FD, w_FD, interpret=False) <= mosaic.SMEM_BYTES

  @pytest.mark.parametrize("tokens", [8, routing.FEW_TOKENS])
  def test_combine_fits(self, needed, tokens):
    operands = self.array(tokens, 65536, dtype=jnp.float32), self.array(tokens, 2048, dtype=jnp.uint32)
    for width in self.widths:
      options = dict(num_tokens=tokens, interpret=False)
      assert needed(decode_hopper.combine, *operands, self.array(65536, width), **options) <= mosaic.SMEM_BYTES

  @pytest.mark.parametrize("compression", [2, 4, 8])
  def test_pack_gather_and_active_fit(self, needed, compression):
    spec = Spec(compression=compression)
    words = self.array(70, 256, spec.words, dtype=jnp.uint32)
    x_MD, w_FD = self.array(70, 8192), self.array(65536, 8192)
    assert needed(pack_hopper.pack, x_MD, w_FD, spec=spec, num_sms=132) <= mosaic.SMEM_BYTES
    assert needed(gather_hopper.gather, x_MD, words, w_FD, w_FD) <= mosaic.SMEM_BYTES
    assert needed(active_hopper.active, words, num_neurons=65536, interpret=False) <= mosaic.SMEM_BYTES


@pytest.fixture
def interpret(request):
  if request.param == "hopper":
    request.getfixturevalue("hopper")
  return request.param == "interpret"


def everywhere(cases, larger=None):
  """Runs a test on the GPU for all cases, and for the first ones in the interpreter, which takes seconds for each."""
  params = [pytest.param("interpret", case, id=f"{name}-interpret") for name, case in cases.items()]
  for name, case in (cases | (larger or {})).items():
    params.append(pytest.param("hopper", case, id=f"{name}-hopper", marks=pytest.mark.gpu))
  return pytest.mark.parametrize(("interpret", "case"), params, indirect=["interpret"])


on_the_gpu = pytest.mark.parametrize("interpret", [pytest.param("hopper", marks=pytest.mark.gpu)], indirect=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """A call of one of the kernels; each uses what it knows."""

  M: int
  D: int = 128
  F: int
  dtype: type = jnp.bfloat16
  compression: int = 8
  first: int = 0
  stages: int | None = None
  group: int | None = None  # of pack
  gated: bool = True
  started: bool = False
  unroll: int = 1
  poisoned: bool = False

  @property
  def spec(self):
    return Spec(compression=self.compression, value_dtype=self.dtype)

  @property
  def rng(self):
    return np.random.default_rng(self.M + self.D + self.F)

  def pack(self, run, interpret, x_MD, w_FD):
    given = {name: value for name in ("stages", "group") if (value := getattr(self, name)) is not None}
    config = dataclasses.replace(pack_hopper.Config.for_spec(self.spec), **given)
    options = dict(spec=self.spec, first=self.first, config=config, interpret=interpret)
    return run(functools.partial(pack_hopper.pack, **options), x_MD, w_FD)

  def gather(self, run, interpret, x_MD, words, w_up_FD, w_down_FD, start_MD):
    config = gather_hopper.Config(dots_unroll=self.unroll, sums_unroll=self.unroll)
    arrays = x_MD, words, w_up_FD if self.gated else None, w_down_FD, start_MD if self.started else None
    return run(functools.partial(gather_hopper.gather, config=config, interpret=interpret), *arrays)[:3]


def integers(rng, *shape, low=-2, high=2):
  return rng.integers(low, high + 1, shape).astype(np.float64)


def product(a_MD, b_FD):
  """a @ b.T in float64; NaN and infinities as they come."""
  with np.errstate(invalid="ignore"):
    return np.asarray(a_MD, np.float64) @ np.asarray(b_FD, np.float64).T


def relu(a):
  return np.where(a <= 0, 0, a)  # NaN is not below zero


def rounded(a, dtype):
  return a.astype(np.float32).astype(dtype)


def words_of(h_MF, spec, first=0):
  """A packed matrix, with poison behind the entries."""
  lists = twell_oracle.pack(h_MF, spec.tile, spec.words, first)
  words = np.full((len(lists), len(lists[0]), spec.words), POISON)
  for m, row in enumerate(lists):
    for t, tile in enumerate(row):
      words[m, t, : len(tile)] = tile
  return words


def assert_same_words(words, expected, dtype):
  """Where `expected` is not poison; one NaN is as good as another."""

  def canonical(words):
    values = (words >> 16).astype(np.uint16).view(dtype)
    return np.where(np.isnan(values), words | 0xFFFF0000, words)

  np.testing.assert_array_equal(canonical(np.where(expected == POISON, POISON, words)), canonical(expected))


def set_bits(words):
  """bool[..., 32 W], from the lowest bit of the first word."""
  return (words[..., None] >> np.arange(32, dtype=np.uint32) & 1).reshape(*words.shape[:-1], -1) != 0


def words_of_bits(mask):
  """uint32[..., W] of bool[..., 32 W]."""
  return np.packbits(mask, axis=-1, bitorder="little").view(np.uint32)


# Two clusters work in the interpreter: they get two tiles each, and two and one. A step has 64 features.
PACKS = {
  "two_steps_in_four_stages": Call(M=300, F=384),
  "three_pairs_of_rows_in_groups_of_two": Call(M=600, F=384, group=2),
  "six_steps_in_three_stages": Call(M=1, D=384, F=768, first=128, compression=2, dtype=np.float16),
}
LARGER_PACKS = {
  "two_steps_in_two_stages": Call(M=1, F=640, stages=2),
  "four_steps_in_four_stages": Call(M=131, D=256, F=384, compression=4),
  "ten_steps_in_three_stages": Call(M=257, D=640, F=1408, first=256, compression=2, dtype=np.float16),
}


class TestPack:
  def draw(self, case, exact=()):
    """x and w. Tokens fire for 5 % of the neurons, the last ones for as many of a tile as `exact` says; one is NaN."""
    rng = case.rng
    x_MD, w_FD = integers(rng, case.M, case.D), integers(rng, case.F, case.D)
    x_MD[:, :8], w_FD[:, :8] = 0, -1
    x_MD[:, 0], w_FD[:, 0] = 8, -np.round(0.4 * np.sqrt(case.D))
    for feature, number in enumerate(exact, 1):
      x_MD[-feature] = LARGE * (np.arange(case.D) == feature)  # these neurons and no other
      for start in range(case.first, case.F, TILE):
        neurons = rng.permutation(np.arange(start, min(start + TILE, case.F)))[:number]
        w_FD[neurons, feature] = rng.integers(1, 200, len(neurons))
    if exact:
      x_MD[0, 20] = np.nan  # fires for all neurons, and for none behind the last: 0 * NaN is NaN too
    return x_MD.astype(case.dtype), w_FD.astype(case.dtype)

  @everywhere(PACKS, LARGER_PACKS)
  def test_words_equal_the_loops(self, run, interpret, case):
    capacity = case.spec.capacity
    exact = [capacity - 1, capacity, capacity + 1, TILE, 0] if case.M > 1 else []
    x_MD, w_FD = self.draw(case, exact)
    words = case.pack(run, interpret, x_MD, w_FD)
    expected = words_of(rounded(relu(product(x_MD, w_FD)), case.dtype), case.spec, case.first)
    in_first_tile = min(TILE, case.F - case.first)
    assert expected[::-1, 0, 0].tolist()[: len(exact)] == [min(number, in_first_tile) for number in exact]
    assert_same_words(words, expected, case.dtype)

  @on_the_gpu
  @pytest.mark.parametrize("row_blocks", [1, 7, 131, 132, 133])
  def test_every_tile_is_packed_whatever_a_cluster_gets(self, run, interpret, row_blocks):
    """Of the 66 clusters of an H200 one or seven work, all but one get two tiles, all do, one gets three."""
    case = Call(M=256 * row_blocks, F=256)
    x_MD, w_FD = self.draw(case)
    words = case.pack(run, interpret, x_MD, w_FD)
    h_MF = rounded(relu(product(x_MD, w_FD)), case.dtype)
    np.testing.assert_array_equal(words[:, 0, 0], (h_MF != 0).sum(axis=1))
    rows = np.arange(0, case.M, 61)  # all would take the loops too long
    expected = words_of(h_MF[rows], case.spec)
    assert_same_words(words[rows], expected, case.dtype)


GATHERS = {
  "gated": Call(M=9, F=768, compression=2),
  "non_gated_of_float16": Call(M=9, F=768, compression=2, gated=False, started=True, dtype=np.float16),
  "two_warps_a_token": Call(M=9, D=2176, F=768, compression=2, started=True),
}
LARGER_GATHERS = {
  "one_token": Call(M=1, D=384, F=2560, started=True),
  "a_full_warp": Call(M=11, D=2048, F=2560, gated=False),
  "four_warps_a_token": Call(M=9, D=8192, F=2560, started=True, unroll=4),
  "most_tiles": Call(M=10, F=65536),  # a lane has eight
}


class TestGather:
  def draw(self, case):
    """x, h, w_up, w_down, start: h has rows of every kind."""
    rng, capacity, tiles = case.rng, case.spec.capacity, case.F // TILE
    spread = lambda number: [number // tiles + (t < number % tiles) for t in range(tiles)]
    kinds = [
      spread(ROW_CAPACITY),
      spread(ROW_CAPACITY + 1),  # a misfit
      [0] * tiles,
      [capacity, *spread(5)[1:]],
      [*spread(5)[:-1], capacity + 1],  # a misfit
      *[spread(tiles // 2 + 20)] * 6,
    ]
    h_MF = np.zeros((case.M, case.F), case.dtype)
    for row, counts in zip(h_MF, kinds):
      for tile, number in enumerate(counts):
        row[tile * TILE + rng.permutation(TILE)[:number]] = rng.integers(1, 9, number)
    x_MD, start_MD = integers(rng, case.M, case.D), integers(rng, case.M, case.D, low=-9, high=9)
    x_MD[6:7, -1], x_MD[7:8, 0], x_MD[8:9, case.D // 2] = np.nan, np.inf, -np.inf  # one of a token's warps sees it
    weights = (integers(rng, case.F, case.D) for _ in range(2))
    return h_MF, *(a.astype(case.dtype) for a in (x_MD, *weights, start_MD))

  @everywhere(GATHERS, LARGER_GATHERS)
  def test_sums_equal_float64(self, run, interpret, case):
    h_MF, x_MD, w_up_FD, w_down_FD, start_MD = self.draw(case)
    words = words_of(h_MF, case.spec)
    y_MD, l1_M, counts_M = case.gather(run, interpret, x_MD, words, w_up_FD, w_down_FD, start_MD)

    expected_M = (h_MF != 0).sum(axis=1)
    misfits = [1, 4, *(6, 7, 8) * case.gated]
    expected_M[[m for m in misfits if m < case.M]] = -1
    assert counts_M.tolist() == expected_M.tolist()
    fits = expected_M >= 0
    hidden_MF = h_MF[fits].astype(np.float64)
    if case.gated:
      hidden_MF *= product(x_MD[fits], w_up_FD)
    expected_MD = product(hidden_MF, w_down_FD.T) + case.started * start_MD[fits].astype(np.float64)
    np.testing.assert_array_equal(y_MD[fits], rounded(expected_MD, case.dtype))
    np.testing.assert_array_equal(l1_M[fits], np.abs(hidden_MF).sum(axis=1))

  @everywhere(GATHERS, LARGER_GATHERS)
  def test_entries_are_kept_at_their_places(self, run, interpret, case):
    """Misfits have none, and there is room for all entries but one."""
    h_MF, x_MD, w_up_FD, w_down_FD, start_MD = self.draw(case)
    words = words_of(h_MF, case.spec)
    counts_M = (h_MF != 0).sum(axis=1)
    counts_M[[m for m in (1, 4) if m < case.M]] = 0
    upto_M = np.cumsum(counts_M)
    room = int(upto_M[-1]) - 1
    fits_M = upto_M <= room
    fits_M[[m for m in (1, 4) if m < case.M]] = False
    first_M, kept_M = kept.places(jnp.asarray(words), room)
    assert first_M.tolist() == np.where(fits_M, upto_M - counts_M, -1).tolist()
    assert kept_M.tolist() == counts_M.tolist()

    gather = functools.partial(gather_hopper.gather, room=room, interpret=interpret)
    weights = w_up_FD if case.gated else None, w_down_FD, start_MD if case.started else None
    y_MD, _, found_M, lists = run(gather, x_MD, words, *weights, np.asarray(first_M))
    same_MD, _, same_M = case.gather(run, interpret, x_MD, words, w_up_FD, w_down_FD, start_MD)
    np.testing.assert_array_equal(found_M, same_M)
    np.testing.assert_array_equal(y_MD[found_M >= 0], same_MD[found_M >= 0])
    dots_MF = product(x_MD, w_up_FD)
    for m in np.flatnonzero(fits_M):
      place = slice(first_M[m], first_M[m] + counts_M[m])
      entries = np.concatenate([tile[1 : 1 + tile[0]] for tile in words[m]])
      np.testing.assert_array_equal(lists.entries_E[place], entries)
      if case.gated:
        np.testing.assert_array_equal(lists.up_E[place], dots_MF[m, entries & 0xFFFF].astype(np.float32))
    assert (lists.up_E is None) == (not case.gated)


class TestActive:
  @everywhere({"one_block": Call(M=9, F=384)}, {"two_blocks_of_most_neurons": Call(M=17, F=65536)})
  def test_neurons_with_an_entry(self, run, interpret, case):
    """Half of them never fire; one token has more than a tile holds."""
    rng = case.rng
    h_MF = integers(rng, case.M, case.F, low=1) * (rng.random((case.M, case.F)) < 0.05) * (np.arange(case.F) % 2)
    h_MF[1] = np.arange(case.F) >= case.F - 100
    words = words_of(h_MF.astype(case.dtype), case.spec)
    active_F = run(functools.partial(active_hopper.active, num_neurons=case.F, interpret=interpret), words)
    held = (words[:, :, 1:] & 0xFFFF)[words[:, :, 1:] != POISON]
    np.testing.assert_array_equal(active_F, np.isin(np.arange(case.F), held))
    assert active_F.sum() < (h_MF != 0).any(axis=0).sum()


# Three steps, of 128 features and of 256; of the latter two at most are on their way.
HIDDENS = {
  "eight_tokens": Call(M=8, D=384, F=256),
  "sixty_four_tokens": Call(M=64, D=768, F=128, poisoned=True),
  "non_gated_of_float16": Call(M=16, F=128, gated=False, poisoned=True, dtype=np.float16),
}
LARGER_HIDDENS = {
  "widest": Call(M=56, D=8192, F=512),
  "most_neurons": Call(M=24, F=65536, dtype=np.float16),
}


class TestHidden:
  def draw(self, case):
    """Tokens fire for 1 % of the neurons. Token 0 is padding, 1 fires for the first block, 2 and 3 may be poison."""
    rng = case.rng
    x_PD, w_gate_FD, w_up_FD, w_down_FD = (integers(rng, n, case.D) for n in (case.M, case.F, case.F, case.F))
    x_PD[:, :8] = 0
    x_PD[:, 0], w_gate_FD[:, 0] = 8, -np.round(0.6 * np.sqrt(case.D))
    x_PD[0], x_PD[1] = 0, LARGE * (np.arange(case.D) == 1)
    w_gate_FD[:, 1] = np.where(np.arange(case.F) < BLOCK, rng.integers(1, 200, case.F), -1)
    if case.poisoned:
      x_PD[2, 2], x_PD[3, 3] = np.inf, np.nan
    return [a.astype(case.dtype) for a in (x_PD, w_gate_FD, w_up_FD, w_down_FD)]

  @pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # the interpreter's, of infinity
  @everywhere(HIDDENS, LARGER_HIDDENS)
  def test_hidden_values_equal_float64(self, run, interpret, case):
    x_PD, w_gate_FD, w_up_FD, w_down_FD = self.draw(case)
    weights = (w_gate_FD, w_up_FD, w_down_FD) if case.gated else (None, w_gate_FD, w_down_FD)
    h_PF, *words = run(functools.partial(decode_hopper.hidden, interpret=interpret), x_PD, *weights)
    listed_PF, fires_PF = map(set_bits, words)

    gate_PF = product(x_PD, w_gate_FD)
    value_PF = rounded(relu(gate_PF), case.dtype).astype(np.float64)
    sunk_PF = gate_PF == -np.inf  # listed, since 0 * (x . w_up) is NaN
    np.testing.assert_array_equal(fires_PF, value_PF != 0)
    np.testing.assert_array_equal(listed_PF, (value_PF != 0) | sunk_PF)
    assert sunk_PF.any() == case.poisoned
    pairs_of_a_block = listed_PF.reshape(case.M, -1, BLOCK).sum(axis=(0, 2))
    many = pairs_of_a_block > decode_hopper._MANY_PAIRS  # such a block multiplies again
    assert many.any()
    assert many.all() == case.poisoned
    with np.errstate(invalid="ignore"):
      expected_PF = value_PF * product(x_PD, w_up_FD) if case.gated else value_PF
    np.testing.assert_array_equal(h_PF[listed_PF], expected_PF[listed_PF])


# 264 blocks of 128 columns are many, and then have fewer warps each.
COMBINES = {"few_blocks": Call(M=4, F=256)}
LARGER_COMBINES = {"most_neurons": Call(M=8, F=65536), "many_blocks": Call(M=64, D=640, F=5632, dtype=np.float16)}


class TestCombine:
  def check(self, run, interpret, case):
    """Tokens with none, all, one, and a tenth of the neurons."""
    rng = case.rng
    listed_PF = rng.random((case.M, case.F)) < 0.1
    listed_PF[:3] = np.stack([np.zeros(case.F), np.ones(case.F), np.arange(case.F) == case.F - 1]) != 0
    h_PF = np.where(listed_PF, integers(rng, case.M, case.F, low=-8, high=8), np.nan).astype(np.float32)
    w_down_FD = integers(rng, case.F, case.D).astype(case.dtype)
    num_tokens = case.M - 1  # the last one is padding
    combine = functools.partial(decode_hopper.combine, num_tokens=num_tokens, interpret=interpret)
    y_MD = run(combine, h_PF, words_of_bits(listed_PF), w_down_FD)
    expected_PD = product(np.where(listed_PF, h_PF, 0), w_down_FD.T)
    np.testing.assert_array_equal(y_MD, rounded(expected_PD, case.dtype)[:num_tokens])

  @everywhere(COMBINES, LARGER_COMBINES)
  def test_sums_of_the_listed_equal_float64(self, run, interpret, case):
    self.check(run, interpret, case)

  @everywhere({"two_blocks": Call(M=4, D=256, F=384)})
  def test_blocks_of_few_warps(self, run, interpret, case, monkeypatch):
    """The interpreter would take long for many."""
    monkeypatch.setattr(decode_hopper, "_MANY_BLOCKS", 0)
    self.check(run, interpret, case)


# A call, and one of another shape; both are compiled for other tests too.
REPEATED = {
  "pack": (PACKS["two_steps_in_four_stages"], LARGER_PACKS["four_steps_in_four_stages"]),
  "gather": (GATHERS["gated"], LARGER_GATHERS["one_token"]),
  "hidden": (HIDDENS["eight_tokens"], LARGER_HIDDENS["widest"]),
  "combine": (COMBINES["few_blocks"], LARGER_COMBINES["many_blocks"]),
}


class TestSameBits:
  """Normal numbers, whose sums depend on their order."""

  def call(self, run, interpret, name, case):
    """Returns a function of no arguments that calls the kernel; what is not defined is 0 in its result."""
    rng = case.rng
    draw = lambda *shape: rng.normal(size=shape).astype(case.dtype)
    x_MD, *weights = (draw(rows, case.D) for rows in (case.M, case.F, case.F, case.F))
    x_MD[:, 0], weights[0][BLOCK:, 0] = 1, -2.5 * np.sqrt(case.D)  # the first neurons fire often, the others seldom
    some_MF = rng.random((case.M, case.F)) < 0.1

    def pack():
      words = case.pack(run, interpret, x_MD, weights[0])
      return np.where(np.arange(case.spec.words) <= words[:, :, :1], words, 0)

    def gather():
      return case.gather(run, interpret, x_MD, packed, *weights[1:], x_MD)

    def hidden():
      h_PF, *words = run(functools.partial(decode_hopper.hidden, interpret=interpret), x_MD, *weights)
      return np.where(set_bits(words[0]), h_PF, 0), *words

    def combine():
      combine = functools.partial(decode_hopper.combine, num_tokens=case.M, interpret=interpret)
      return run(combine, h_PF, listed_PW, weights[2])

    packed = words_of(np.where(some_MF, abs(draw(case.M, case.F)), 0).astype(case.dtype), case.spec)
    h_PF, listed_PW = rng.normal(size=some_MF.shape).astype(np.float32), words_of_bits(some_MF)
    return {"pack": pack, "gather": gather, "hidden": hidden, "combine": combine}[name]

  @everywhere({name: (name, *calls) for name, calls in REPEATED.items()})
  def test_same_call(self, run, interpret, case):
    """On the GPU fifty times, each after another shape has left its traces in shared memory."""
    name, own, other = case
    call, disturb = (self.call(run, interpret, name, case) for case in (own, other))
    bits = [a.tobytes() for a in jax.tree.leaves(call())]
    for _ in range(1 if interpret else 50):
      if not interpret:
        disturb()
      assert [a.tobytes() for a in jax.tree.leaves(call())] == bits
