"""The Hopper kernel's Config, and its lowering for CUDA at every named shape and every legal Config."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compile_cases, compile_check
from pallas_kernels.embedding import bag_hopper

CASES = {name: case for name, case in compile_cases.cases().items() if name.startswith("embedding_bag/")}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lowers_for_cuda(case):
  assert len(compile_check.kernel_modules(compile_check.lower(case))) == 1


class TestConfig:
  def test_columns_that_do_not_fill_a_warpgroup_are_refused(self):
    with pytest.raises(ValueError, match="block_d=100 must be a positive multiple of 128"):
      bag_hopper.Config(block_d=100)

  @pytest.mark.parametrize("rows_in_flight", [0, 17])
  def test_too_few_or_too_many_rows_in_flight_are_refused(self, rows_in_flight):
    with pytest.raises(ValueError, match=rf"rows_in_flight={rows_in_flight} must be in 1\.\.16"):
      bag_hopper.Config(block_d=128, rows_in_flight=rows_in_flight)

  def test_twice_the_tile_is_refused_with_both_numbers(self):
    bag_hopper.Config(block_d=1024, rows_in_flight=8)
    with pytest.raises(ValueError, match=r"block_d=2048, rows_in_flight=8\) needs about 176 registers a lane, 128 are"):
      bag_hopper.Config(block_d=2048, rows_in_flight=8)

  def test_a_width_that_the_block_does_not_divide_is_refused(self):
    args = jnp.zeros((2, 384)), np.zeros(1, np.int32), np.asarray([0, 1], np.int32), None, "sum"
    with pytest.raises(ValueError, match=r"D=384 is no multiple of Config\.block_d=256"):
      bag_hopper.bag(*args, config=bag_hopper.Config(block_d=256))

  @pytest.mark.parametrize(
    ("width", "dtype", "block_d"),
    [(128, jnp.float32, 128), (1024, jnp.float32, 512), (1024, jnp.bfloat16, 1024), (768, jnp.bfloat16, 256)],
  )
  def test_the_default_takes_the_widest_loads_that_the_row_allows(self, width, dtype, block_d):
    assert bag_hopper.Config.for_width(width, dtype).block_d == block_d
