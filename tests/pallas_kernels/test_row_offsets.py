"""Structure of offsets: what is refused, with index and values."""

import jax
import numpy as np
import pytest

from pallas_kernels import row_offsets


def check(values, num_tokens=5, dtype=np.int32):
  row_offsets.check("op", "offsets", np.asarray(values, dtype), num_tokens)


@pytest.mark.parametrize("values", [[0], [0, 0, 0], [0, 5], [0, 0, 2, 2, 4]], ids=str)
def test_empty_rows_and_padding_are_legal(values):
  check(values)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ([0, 3, 2, 5], r"offsets\[2\] = 2 is below offsets\[1\] = 3"),
    ([0, 2, 1, 4, 3], r"offsets\[2\] = 1 is below offsets\[1\] = 2"),
    (
      [0, 2**31 - 1, -2],
      r"offsets\[2\] = -2 is below offsets\[1\] = 2147483647",
    ),  # their difference wraps to 2**31 - 1
    ([1, 2], r"offsets\[0\] = 1 must be 0"),
    ([0, 2, 6], r"offsets\[2\] = 6 points past the T = 5 tokens"),
    ([], r"B \+ 1 values, got shape \(0,\)"),
    ([[0, 1]], r"B \+ 1 values, got shape \(1, 2\)"),
  ],
)
def test_a_wrong_structure_is_refused_with_its_place(values, message):
  with pytest.raises(ValueError, match=message):
    check(values)


def test_wide_integers_are_refused():
  with pytest.raises(TypeError, match="offsets must be int32, got int64"):
    check([0, 1], dtype=np.int64)


def test_traced_offsets_are_taken_on_trust():
  jax.jit(lambda offsets: row_offsets.check("op", "offsets", offsets, 1))(np.asarray([0, 3, 2], np.int32))
