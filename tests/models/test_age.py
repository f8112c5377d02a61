"""What an event says by its age, against linear interpolation.

Dimension key: T packed events, A knots, D width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.models.age import KNOTS, KNOTS_PER_OCTAVE, AgeEmbedding
from sparse_lm.precision.recipes import RECIPES


def _learnt() -> AgeEmbedding:
  age = AgeEmbedding(3, RECIPES["fp32"])
  age.knots_DA[...] = jnp.asarray(np.random.default_rng(0).normal(size=(3, KNOTS)), jnp.float32)
  return age


def _expected(age: AgeEmbedding, age_T) -> np.ndarray:
  place_T = KNOTS_PER_OCTAVE * np.log2(1 + np.maximum(np.asarray(age_T, np.float64), 0))
  return np.stack([np.interp(place_T, np.arange(KNOTS), knots_A) for knots_A in np.asarray(age.knots_DA[...])], axis=1)


@pytest.mark.parametrize(
  "age_T", [[0.0], [1.0], [-5.0], [0.3, 3.0, 59.0, 3600.0, 86400.0, 3e7], [2e9, 2.0**31.5, 1e12]]
)
def test_an_age_is_interpolated_between_its_knots_and_the_last_one_holds_for_all_older(age_T):
  age = _learnt()
  a_TD = age(jnp.asarray(age_T, jnp.float32), jnp.asarray([0, len(age_T)], jnp.int32))
  np.testing.assert_allclose(a_TD, _expected(age, age_T), rtol=2e-5, atol=2e-5)


def test_a_power_of_two_less_a_second_is_a_knot():
  age = _learnt()
  a_TD = age(jnp.asarray([2.0**10 - 1], jnp.float32), jnp.asarray([0, 1], jnp.int32))
  np.testing.assert_allclose(a_TD[0], age.knots_DA[...][:, 10 * KNOTS_PER_OCTAVE], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", [np.nan, np.inf, 7.0])
def test_padding_says_nothing_whatever_its_age(padding):
  age, offsets = _learnt(), jnp.asarray([0, 0, 2], jnp.int32)
  age_T = jnp.asarray([5.0, 9.0, padding, padding], jnp.float32)
  total = lambda age: jnp.sum(age(age_T, offsets))
  np.testing.assert_array_equal(age(age_T, offsets)[2:], 0)
  grads_DA = jax.grad(total)(age).knots_DA[...]
  np.testing.assert_allclose(jnp.sum(grads_DA), 3 * 2.0, rtol=1e-5)  # shares of an event add up to one


def test_no_event_gives_no_vector():
  assert _learnt()(jnp.zeros(0), jnp.zeros(3, jnp.int32)).shape == (0, 3)


def test_it_begins_at_zero():
  age = AgeEmbedding(3, RECIPES["bf16"])
  a_TD = age(jnp.asarray([12.0]), jnp.asarray([0, 1], jnp.int32))
  assert a_TD.dtype == jnp.bfloat16
  np.testing.assert_array_equal(a_TD, 0)
