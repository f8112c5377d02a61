"""Tiers of kernel tests: reference, interpreter with race detection, and the GPU where there is one.

`pallas_kernels.compile_check` holds the tier between the last two, lowering for CUDA.
"""

import jax
import numpy as np
import pytest

from pallas_kernels import device, mosaic


@pytest.fixture
def hopper():
  """Lets a test run only on the hardware that it is for."""
  if (reason := device.missing_hopper()) is not None:
    pytest.skip(f"hopper: {reason}")


@pytest.fixture(params=["reference", "interpret", pytest.param("hopper", marks=pytest.mark.gpu)])
def implementation(request):
  if request.param == "hopper":
    request.getfixturevalue("hopper")
  return request.param


@pytest.fixture
def run():
  """Calls a function and fetches its results; an interpreted kernel inside must not race."""

  def call(function, *args):
    with mosaic.no_races():
      return jax.tree.map(np.asarray, function(*args))

  return call
