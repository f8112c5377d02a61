"""The form of cuDNN's attention that the benchmark compares with: which rows are where, and that it computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import cudnn_packed
from pallas_kernels import device


@pytest.mark.parametrize(
  ("lengths", "expected"),
  [([], []), ([0, 0], []), ([3], [[3]]), ([8, 8], [[8], [8]]), ([1, 7, 0, 2, 6, 8, 3], [[8], [7, 1], [6, 2], [3]])],
)
def test_each_row_with_tokens_is_in_the_first_sequence_with_room(lengths, expected):
  packing = cudnn_packed.pack(np.array(lengths, np.int32), 8)
  most = max(map(len, expected), default=1)
  pad = lambda rows, size: rows + [-1] * (size - len(rows))
  np.testing.assert_array_equal(packing.lengths_NM, np.array([pad(rows, most) for rows in expected]).reshape(-1, most))
  begins = [pad([sum(rows[:n]) for n in range(len(rows))], most + 1) for rows in expected]
  np.testing.assert_array_equal(packing.offsets_NM1, np.array(begins).reshape(-1, most + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows_equal_each_row_alone(causal):
  if (reason := device.missing_hopper()) is not None:
    pytest.skip(f"hopper: {reason}")
  packing = cudnn_packed.pack(np.array([200, 256, 1, 100, 129, 56], np.int32), 256)
  sequences = len(packing.lengths_NM)
  q, k, v, d_o = jax.random.normal(jax.random.key(0), (4, sequences, 256, 2, 64), jnp.bfloat16)

  def outputs(attend, q, k, v, d_o):
    o, pull = jax.vjp(attend, q, k, v)
    return o, *pull(d_o)

  found = jax.jit(
    lambda *a: outputs(lambda *qkv: cudnn_packed.attention(*qkv, packing, causal=causal), *a)
  )(q, k, v, d_o)  # fmt: skip
  for sequence, (lengths, offsets) in enumerate(zip(*packing, strict=True)):
    for length, begin in zip(lengths, offsets):
      if length < 0:
        continue
      row = slice(begin, begin + length)
      alone = lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=causal)
      expected = outputs(alone, *(a[sequence : sequence + 1, row].astype(jnp.float32) for a in (q, k, v, d_o)))
      for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a[sequence : sequence + 1, row].astype(jnp.float32), b, rtol=3e-2, atol=3e-2)
