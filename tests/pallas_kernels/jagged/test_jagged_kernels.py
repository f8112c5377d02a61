"""The kernels of the attention family, in the interpreter and on a GPU: o and all gradients of the public function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import INSTANCES, LENGTHS, OTHERS, draw, offsets_of, with_gradients

from pallas_kernels import compile_cases, compile_check, jagged, mosaic
from pallas_kernels.jagged.bias import LAST_BELOW

CASES = {name: case for name, case in compile_cases.cases().items() if name.startswith("jagged_")}
KINDS = ("o", "q", "k", "v", "position", "time")
TOLERANCE = {jnp.bfloat16: 2e-2, jnp.float16: 3e-3}


@pytest.fixture(params=["interpret", pytest.param("hopper", marks=pytest.mark.gpu)])
def implementation(request):
  if request.param == "hopper":
    request.getfixturevalue("hopper")
  return request.param


on_gpu = pytest.mark.parametrize("implementation", [pytest.param("hopper", marks=pytest.mark.gpu)])
slow_interpreter = pytest.mark.parametrize(
  "implementation", [pytest.param("interpret", marks=pytest.mark.slow), pytest.param("hopper", marks=pytest.mark.gpu)]
)


@pytest.fixture(autouse=True)
def _on_its_hardware(request):
  if "implementation" in request.fixturenames and request.getfixturevalue("implementation") == "hopper":
    request.getfixturevalue("hopper")


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, id=name, marks=[] if "softmax,K=128" in name or "silu" in name else pytest.mark.slow)
    for name, case in CASES.items()
  ],
)
def test_every_kernel_lowers_for_cuda(case):
  assert len(compile_check.kernel_modules(compile_check.lower(case))) == 1


def half(problem, dtype=jnp.bfloat16):
  """The problem, its tokens rounded to a dtype, NaN behind the last row."""
  rounded = lambda a: np.array(jnp.asarray(a, dtype), np.float32)
  for name in ("q", "k", "v", "d_o"):
    setattr(problem, name, rounded(getattr(problem, name)))
  expected = problem.expected
  k_offsets = problem.q_offsets if problem.k_offsets is None else problem.k_offsets
  q_end, k_end = problem.q_offsets[-1], k_offsets[-1]
  if not problem.broadcast:
    problem.q[q_end:] = np.nan
    problem.d_o[q_end:] = np.nan
  problem.k[k_end:] = problem.v[k_end:] = np.nan
  problem.q, problem.k, problem.v = (jnp.asarray(a, dtype) for a in (problem.q, problem.k, problem.v))
  return problem, expected


def check(implementation, problem, dtype=jnp.bfloat16):
  problem, (o, gradients) = half(problem, dtype)
  with mosaic.no_races():
    found_o, found = jax.tree.map(np.asarray, with_gradients(problem, implementation=implementation))
  for name, a, b in zip(KINDS[: 1 + len(gradients)], (found_o, *found), (o, *gradients), strict=True):
    scale = max(1.0, float(np.max(np.abs(b), initial=0)))
    np.testing.assert_allclose(a.astype(np.float64), b, rtol=0, atol=TOLERANCE[dtype] * scale, err_msg=name)


def test_softmax_with_a_mask_and_grouped_heads(implementation):
  check(implementation, draw(1, [5, 70, 0, 1], causal=True, window=40, heads=2, key_heads=1, width=64))


def test_blocks_of_64_tokens(implementation):
  check(implementation, draw(13, [5, 70, 0, 64], block=64, heads=1, width=64))


@slow_interpreter
def test_an_activation_on_keys_of_other_lengths(implementation):
  problem = draw(2, [5, 130, 1], [100, 0, 3], activation="silu", post_scale=0.1, width=64, heads=1)
  check(implementation, problem)


@slow_interpreter
@pytest.mark.parametrize("name", INSTANCES)
def test_every_instance(implementation, name):
  check(implementation, draw(3, LENGTHS, width=64, **INSTANCES[name]))


@slow_interpreter
@pytest.mark.parametrize("name", ["flash", "causal", "window", "block", "silu", "grouped_heads"])
def test_keys_of_other_lengths(implementation, name):
  check(implementation, draw(4, LENGTHS, OTHERS, width=64, **INSTANCES[name]))


@slow_interpreter
@pytest.mark.parametrize(("width", "dtype"), [(96, jnp.bfloat16), (128, jnp.bfloat16), (64, jnp.float16)])
def test_widths_and_dtypes(implementation, width, dtype):
  check(implementation, draw(5, [3, 140], width=width, causal=True), dtype)


@slow_interpreter
@pytest.mark.parametrize(
  ("width", "dtype", "options"),
  [
    (64, jnp.bfloat16, dict(activation="gelu", pre_scale=0.3, turn="q and k")),
    (96, jnp.bfloat16, dict(post_scale=2.0)),
    (128, jnp.bfloat16, dict(turn="values")),
    (128, jnp.float16, dict(activation=("relu", "raw"))),
  ],
  ids=["gelu", "96", "turned", "float16"],
)
def test_blocks_of_every_kind(implementation, width, dtype, options):
  check(implementation, draw(14, [5, 64, 0, 130, 1, 63], block=64, width=width, **options), dtype)


@slow_interpreter
@pytest.mark.parametrize("seeds", [7, 64, 130])
def test_seeds_that_are_the_same_for_all_rows(implementation, seeds):
  check(implementation, draw(6, [seeds] * 4, [0, 70, 1, 200], broadcast_q=True, width=64))


@slow_interpreter
@pytest.mark.parametrize(
  ("lengths", "k_lengths"),
  [([0, 3, 0], [2, 0, 3]), ([1, 0, 1, 1], None), ([0, 0], None), ([], None), ([0, 2], [3, 0])],
  ids=["no_row_has_both", "single_tokens", "only_empty", "no_rows", "no_pair"],
)
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_empty_and_single(implementation, lengths, k_lengths, activation):
  check(implementation, draw(7, lengths, k_lengths, width=64, activation=activation))


@slow_interpreter
def test_much_padding_is_zeros(implementation):
  check(implementation, draw(8, [5, 3], padding=300, width=64))


@slow_interpreter
@pytest.mark.parametrize("block", [None, 64])
@pytest.mark.parametrize("activation", ["softmax", "relu_square"])
def test_a_row_that_is_not_finite_spoils_no_other(implementation, activation, block):
  problem, _ = half(draw(9, [5, 7, 130], activation=activation, block=block, width=64))
  clean = jax.tree.map(np.asarray, with_gradients(problem, implementation=implementation))
  for name in ("q", "k", "v"):
    setattr(problem, name, getattr(problem, name).at[8].set(jnp.nan))
  spoilt = jax.tree.map(np.asarray, with_gradients(problem, implementation=implementation))
  others = np.r_[0:5, 12:142]
  for a, b in zip(jax.tree.leaves(spoilt), jax.tree.leaves(clean), strict=True):
    np.testing.assert_array_equal(a[others], b[others])
  assert np.isnan(spoilt[0][8]).all()


@slow_interpreter
def test_a_schedule_made_before_changes_no_bit(implementation):
  problem, _ = half(draw(10, [5, 130, 64], causal=True, width=64))
  made = jagged.make_schedule(problem.q_offsets, num_queries=len(problem.q), causal=True)
  with_it = with_gradients(problem, implementation=implementation, schedule=made)
  jax.tree.map(np.testing.assert_array_equal, with_it, with_gradients(problem, implementation=implementation))


@slow_interpreter
def test_buckets_of_time_at_their_borders(implementation):
  """p is the bucket: q is 0, a bucket's entry of the table its number. Forward, and as the keys see it."""
  last = LAST_BELOW[:72].astype(np.int64)
  distances = np.unique(np.concatenate([[0, 1, 2**31 - 1], last[1:], last[1:] + 1]))
  distances = distances[(distances >= 0) & (distances < 2**31)]
  rows, width = -(-len(distances) // 62), 64
  times = np.zeros((rows, 64), np.int64)
  times[:, 2:] = np.resize(distances, (rows, 62))
  times[1:2, 2:] *= -1  # either sign
  # The first query is asked when the second event happens, at 0.
  timestamps = jnp.asarray(times.reshape(-1), jnp.int32)
  bias = jagged.RelativeBias(jnp.zeros(127), jnp.arange(129, dtype=jnp.float32), timestamps)
  q = jnp.zeros((64 * rows, 1, width), jnp.bfloat16)
  v = jnp.tile(jnp.eye(64, dtype=jnp.bfloat16), (rows, 1))[:, None]
  d_o = jnp.zeros_like(q).at[::64, :, 0].set(1)  # of each row's first query

  def call(v):
    options = dict(activation="raw", bias=bias, implementation=implementation)
    return jagged.attention(q, q, v, offsets_of([64] * rows), **options)

  o, pull = jax.vjp(call, v)
  expected = np.floor(np.log(np.maximum(np.abs(times), 1)) / 0.301)
  np.testing.assert_array_equal(np.asarray(o, np.float32)[::64, 0, 2:], expected[:, 2:])
  (d_v,) = pull(d_o)
  np.testing.assert_array_equal(np.asarray(d_v, np.float32)[:, 0, 0].reshape(rows, 64)[:, 2:], expected[:, 2:])


MANY = {
  "blocks_64": dict(width=64, block=64, turn="values"),
  "blocks_96": dict(width=96, block=64, activation="gelu", pre_scale=0.3),
  "blocks_128": dict(width=128, block=64, turn="values"),
  "bias": dict(width=64, longest=200, causal=True),
  "bias_of_silu": dict(width=128, longest=200, activation="silu", pre_scale=0.3, post_scale=0.1, key_heads=2),
  "rotary": dict(width=128, turn="values", causal=True),
}


@on_gpu
@pytest.mark.parametrize("options", MANY.values(), ids=MANY)
def test_more_items_than_warpgroups(implementation, options):
  """Slots, barriers and sums are used again and again; the same bits twice. Against plain jnp in float32."""
  lengths = np.random.default_rng(15).integers(1, 200, 500)
  problem = draw(15, lengths, heads=4, **options)
  for name in ("q", "k", "v", "d_o"):
    setattr(problem, name, jnp.asarray(getattr(problem, name), jnp.bfloat16))
  o, found = with_gradients(problem, implementation=implementation)
  jax.tree.map(np.testing.assert_array_equal, (o, found), with_gradients(problem, implementation=implementation))
  for name in ("q", "k", "v", "d_o"):
    setattr(problem, name, getattr(problem, name).astype(jnp.float32))
  expected = with_gradients(problem, implementation="reference")
  for a, b in zip((o, *found), (expected[0], *expected[1]), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.linalg.norm(a - b) <= 1.5e-2 * np.linalg.norm(b)


@on_gpu
def test_the_same_bits_fifty_times(implementation):
  """F06: one giant row and many of three tokens, between calls of other shapes."""
  problem, _ = half(draw(11, [20000, *[3] * 400], width=128, heads=2))
  other, _ = half(draw(12, [70, 3], width=64, activation="silu"))
  first = jax.tree.map(np.asarray, with_gradients(problem, implementation=implementation))
  for n in range(50):
    if n % 10 == 0:
      with_gradients(other, implementation=implementation)
    jax.tree.map(np.testing.assert_array_equal, first, with_gradients(problem, implementation=implementation))


@on_gpu
def test_random_rows(implementation):
  rng = np.random.default_rng(13)
  for n in range(30):
    lengths = rng.choice([0, 1, 7, 8, 63, 64, 65, 127, 128, 129, 200, 700], rng.integers(1, 9))
    k_lengths = None if n % 2 else rng.permutation(lengths)
    options = dict(causal=bool(rng.integers(2)), activation=str(rng.choice(["softmax", "silu", "gelu"])))
    options |= dict(window=[None, 3, 64, 150][rng.integers(4)], width=int(rng.choice([64, 128])))
    check(implementation, draw(n, lengths, k_lengths, padding=int(rng.integers(200)), pre_scale=0.1, **options))
