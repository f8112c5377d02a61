"""The lookup of tokens and its gradient, against a float64 scatter-add."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import config_io
from sparse_lm.config import LmConfig
from sparse_lm.models.embedding import embed
from sparse_lm.parallel.mesh import make_mesh
from sparse_lm.precision.recipes import RECIPES


def gradient_of(table_VD, tokens_BL, d_out_BLD, recipe="fp32"):
  return jax.jit(lambda t: jax.vjp(lambda t: embed(t, tokens_BL, RECIPES[recipe]), t)[1](d_out_BLD)[0])(table_VD)


def scatter_added(tokens_BL, d_out_BLD, num_rows):
  sums = np.zeros((num_rows, d_out_BLD.shape[-1]))
  inside = (tokens_BL >= 0) & (tokens_BL < num_rows)
  np.add.at(sums, tokens_BL[inside], np.asarray(d_out_BLD, np.float64)[inside])
  return sums


TOKENS = {
  "none": np.zeros((2, 0), np.int32),
  "one": np.array([[6]], np.int32),
  "both_ends": np.array([[0, 6, 6, 0], [3, 0, 1, 6]], np.int32),
  "all_the_same": np.full((3, 5), 2, np.int32),
  "every_row": np.random.default_rng(0).permutation(7).reshape(1, 7).astype(np.int32),
  "outside": np.array([[-1, 6, 7, 0, -7, 100, 5]], np.int32),
}


@pytest.mark.parametrize("tokens_BL", TOKENS.values(), ids=TOKENS)
def test_rows_and_their_gradient_equal_the_oracle(tokens_BL):
  rng = np.random.default_rng(1)
  table_VD = rng.normal(size=(7, 4)).astype(np.float32)
  d_out_BLD = rng.normal(size=(*tokens_BL.shape, 4)).astype(np.float32)
  inside = (tokens_BL >= 0) & (tokens_BL < 7)
  wanted = np.where(inside[..., None], table_VD[np.clip(tokens_BL, 0, 6)], np.nan)
  np.testing.assert_array_equal(embed(jnp.asarray(table_VD), tokens_BL, RECIPES["fp32"]), wanted)
  gradient = gradient_of(table_VD, tokens_BL, d_out_BLD)
  np.testing.assert_allclose(gradient, scatter_added(tokens_BL, d_out_BLD, 7), rtol=1e-6, atol=1e-6)


def test_a_common_token_in_bfloat16_loses_one_rounding_and_not_one_for_each_time_it_occurs():
  """Added up in bfloat16, 5000 times 1 stays at 256."""
  tokens_BL = np.zeros((5, 1000), np.int32)
  d_out_BLD = jnp.ones((5, 1000, 4), jnp.bfloat16)
  gradient = gradient_of(np.zeros((2, 4), np.float32), tokens_BL, d_out_BLD, "bf16")
  np.testing.assert_array_equal(gradient, np.array([[5000.0] * 4, [0.0] * 4]).astype(jnp.bfloat16))


@pytest.mark.parametrize(("data", "fsdp"), [(8, 1), (2, 4), (1, 8)])
def test_devices_add_up_to_the_gradient_of_the_whole_batch(data, fsdp):
  rng = np.random.default_rng(2)
  table_VD = rng.normal(size=(11, 16)).astype(np.float32)
  tokens_BL = rng.integers(0, 11, (16, 5)).astype(np.int32)
  d_out_BLD = rng.normal(size=(16, 5, 16)).astype(np.float32)
  mesh = make_mesh(config_io.overlay(LmConfig(), {"parallel.data": data, "parallel.fsdp": fsdp}))
  with jax.set_mesh(mesh):
    place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
    rows = ("data", "fsdp")
    gradient = gradient_of(place(table_VD, None, "fsdp"), place(tokens_BL, rows), place(d_out_BLD, rows))
    assert gradient.sharding.spec == jax.P(None, "fsdp")
  np.testing.assert_allclose(gradient, scatter_added(tokens_BL, d_out_BLD, 11), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_the_gradient_equals_the_oracle_and_has_the_same_bits_in_every_call():
  rng = np.random.default_rng(3)
  tokens_BL = np.minimum(rng.geometric(0.01, (8, 512)) - 1, 999).astype(np.int32)
  d_out_BLD = jnp.asarray(rng.normal(size=(8, 512, 256)), jnp.bfloat16)
  calls = [gradient_of(np.zeros((1000, 256), np.float32), tokens_BL, d_out_BLD, "bf16") for _ in range(5)]
  wanted = scatter_added(tokens_BL, d_out_BLD, 1000)
  np.testing.assert_allclose(calls[0], wanted, rtol=2**-8, atol=1e-5)
  for other in calls[1:]:
    np.testing.assert_array_equal(other, calls[0])
