"""Draws have the probabilities that they should, and only allowed tokens are drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.errors import UserError
from sparse_lm.inference.sampling import Sampling, choose

P_V = np.array([0.05, 0.4, 0.1, 0.25, 0.2])  # most likely: 1, 3, 4, 2, 0
DRAWS = 20_000


def frequencies(sampling, p_V=P_V):
  logits_BV = jnp.tile(jnp.log(jnp.asarray(p_V, jnp.float32)) + 3.0, (DRAWS, 1))
  tokens_B = choose(logits_BV, jax.random.split(jax.random.key(0), DRAWS), sampling)
  return np.bincount(tokens_B, minlength=len(p_V)) / DRAWS


def normalised(p_V, kept):
  out = np.where(np.isin(np.arange(len(p_V)), kept), p_V, 0)
  return out / out.sum()


CASES = {
  "all": (Sampling(temperature=1.0), P_V),
  "half_temperature_squares": (Sampling(temperature=0.5), P_V**2 / (P_V**2).sum()),
  "top_2": (Sampling(temperature=1.0, top_k=2), normalised(P_V, [1, 3])),
  "top_k_beyond_the_vocabulary": (Sampling(temperature=1.0, top_k=99), P_V),
  "top_p_takes_the_one_that_crosses": (Sampling(temperature=1.0, top_p=0.5), normalised(P_V, [1, 3])),
  "top_p_1": (Sampling(temperature=1.0, top_p=1.0), P_V),
  "top_p_below_the_first": (Sampling(temperature=1.0, top_p=1e-6), normalised(P_V, [1])),
  # Of the three most likely (0.47, 0.29, 0.24 among themselves) the first two reach 0.7.
  "top_p_of_what_top_k_left": (Sampling(temperature=1.0, top_k=3, top_p=0.7), normalised(P_V, [1, 3])),
  "temperature_before_top_p": (Sampling(temperature=0.5, top_p=0.5), normalised(P_V**2, [1])),
}


@pytest.mark.parametrize(("sampling", "wanted_V"), CASES.values(), ids=CASES)
def test_frequencies_are_the_probabilities(sampling, wanted_V):
  found_V = frequencies(sampling)
  assert (found_V[wanted_V == 0] == 0).all()
  np.testing.assert_allclose(found_V, wanted_V, atol=5 * np.sqrt(0.25 / DRAWS))


def test_top_k_keeps_exactly_k_of_equally_likely_tokens():
  assert (frequencies(Sampling(temperature=1.0, top_k=2), np.full(5, 0.2)) > 0).tolist() == [True, True] + [False] * 3


def test_temperature_0_takes_the_lowest_id_of_the_most_likely():
  logits_BV = jnp.array([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
  keys_B = jax.random.split(jax.random.key(0), 2)
  assert choose(logits_BV, keys_B, Sampling()).tolist() == [1, 0]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"temperature": -1.0}, r"temperature=-1\.0 must be at least 0"),
    ({"temperature": float("nan")}, r"temperature=nan must be"),
    ({"temperature": float("inf")}, r"temperature=inf must be"),
    ({"temperature": 1.0, "top_k": 0}, r"top_k=0 must be at least 1"),
    ({"temperature": 1.0, "top_p": 0.0}, r"top_p=0\.0 must lie in \(0, 1\]"),
    ({"temperature": 1.0, "top_p": 1.5}, r"top_p=1\.5 must lie in \(0, 1\]"),
    ({"top_k": 5}, r"top_k=5 and top_p=None have no effect at temperature=0"),
  ],
)
def test_values_out_of_range_are_refused(options, message):
  with pytest.raises(UserError, match=message):
    Sampling(**options)
