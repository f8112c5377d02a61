"""Named sizes of feed-forward blocks, and inputs for them whose gate fires as often as asked.

Feature 0 of a token is a constant, and what the gate makes of it a threshold: the pre-activation of neuron n for token
m is N(0, 1) - multiplier_m * threshold_n, so the share of it that is positive is known in closed form. Uniform inputs
flatter: no tile overflows and no token is long. So there are others, shaped like trained models and like worst cases.

Dimension key: M tokens, D model width, F hidden neurons, S sampled tokens.
"""

import dataclasses
import functools
import math
from statistics import NormalDist
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

Pattern = Literal["uniform", "trained", "zipf", "misleading"]

_CONSTANT = 8.0  # feature 0 under a multiplier of 1
_NEVER = 16.0  # standard deviations, beyond which nothing of 1e9 pre-activations lies
_ZIPF_CAP = 0.9  # no neuron fires for every token
# The trained pattern, after figures 6 and 7 of the TwELL paper.
_DEAD = 0.3  # of the neurons
_RATE_SPREAD = 1.0  # standard deviation of the log of a living neuron's rate
_RATE_CAP = 0.4  # below 1/2, so that a smaller multiplier always means more non-zeros
_TOKEN_SPREAD = 0.57  # of the log of a token's non-zeros: the longest of 131072 tokens has about 10 times the mean
_SEQUENCE = 2048  # tokens, of which the first has
_FIRST_TOKEN = 480 / 5632  # non-zeros a neuron: 480 in the paper's 1.5B
_LEAST_MULTIPLIER = 0.25  # at which the threshold of the dead is still out of reach
_TRAINED_DENSITIES = (0.001, 0.02)  # below, first tokens alone are more; above, the longest tokens need every neuron


@dataclasses.dataclass(frozen=True, kw_only=True)
class FfnShape:
  """One feed-forward block."""

  M: int
  D: int
  F: int
  gated: bool = True
  dtype: type = jnp.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activity:
  """How often which neurons fire.

  uniform: every neuron for every token at the same rate. zipf: rates by 1 / rank**exponent, at most 0.9, in no order.
  trained: 30 % of the neurons are dead and the rates of the others skewed; tokens have log-normal numbers of non-zeros,
  and the first of each 2048 more than 400 (at F=5632). misleading: as uniform for the sampled tokens, and every other
  token fires half of its neurons.
  """

  density: float  # mean share of neurons that fire for a token (misleading: for a sampled token)
  pattern: Pattern = "uniform"
  exponent: float = 1.0  # of zipf

  def __post_init__(self):
    if self.pattern not in get_args(Pattern):
      raise ValueError(f"Activity.pattern={self.pattern!r} must be one of {get_args(Pattern)}")
    low, high = {"zipf": (1e-6, _ZIPF_CAP / 2), "trained": _TRAINED_DENSITIES}.get(self.pattern, (0, 1))
    if not low <= self.density <= high:
      raise ValueError(f"Activity.density={self.density} must lie in [{low}, {high}] for pattern={self.pattern!r}")


class Weights(NamedTuple):
  """Neuron-major, in the order of `twell.gated_feedforward`."""

  w_gate_FD: jax.Array | None  # None: the non-gated block
  w_up_FD: jax.Array
  w_down_FD: jax.Array

  @property
  def firing_FD(self) -> jax.Array:
    """The projection whose ReLU decides which neurons fire."""
    return self.w_up_FD if self.w_gate_FD is None else self.w_gate_FD


class Inputs(NamedTuple):
  """Of one call."""

  x_MD: jax.Array
  weights: Weights


def draw(key: jax.Array, shape: FfnShape, activity: Activity, *, sampled_S: np.ndarray | None = None) -> Inputs:
  """Returns inputs of a block; the same for the same key.

  bfloat16 thresholds move the rate of a neuron by up to 1.5 %.

  Args:
    key: a typed key, `jax.random.key(0)`.
    shape: sizes and dtype.
    activity: how often which neurons fire.
    sampled_S: for the misleading pattern, the tokens that `route="auto"` looks at.
  """
  if (activity.pattern == "misleading") != (sampled_S is not None):
    raise ValueError("draw: sampled_S is for pattern='misleading', and that pattern needs it")
  # What has to be exact, thresholds and multipliers, is small: it is made on the host in float64.
  rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
  thresholds_F = rng.permutation(_thresholds(shape.F, activity))
  multipliers_M = np.ones(shape.M)
  if activity.pattern == "misleading":
    multipliers_M[:] = 0  # no threshold: half of N(0, 1) is positive
    multipliers_M[sampled_S] = 1
  elif activity.pattern == "trained":
    multipliers_M = _multipliers(shape.M, thresholds_F, activity.density, rng)
  return _draw(key, thresholds_F.astype(np.float32), multipliers_M.astype(np.float32), shape=shape)


@functools.partial(jax.jit, static_argnames="shape")
def _draw(key, thresholds_F, multipliers_M, *, shape: FfnShape) -> Inputs:
  # Drawn in float32: a bfloat16 draw has some hundred values and no tail.
  rows = jax.random.normal(key, (shape.M + 3 * shape.F, shape.D), jnp.float32)
  x_MD, firing_FD, up_FD, down_FD = jnp.split(rows, [shape.M, shape.M + shape.F, shape.M + 2 * shape.F])
  x_MD = x_MD.at[:, 0].set(_CONSTANT * multipliers_M)
  firing_FD = firing_FD.at[:, 0].set(0)
  firing_FD /= jnp.linalg.norm(firing_FD, axis=1, keepdims=True)  # the variance of a pre-activation is 1, not about 1
  firing_FD = firing_FD.at[:, 0].set(-thresholds_F / _CONSTANT)
  up_FD, down_FD = up_FD * shape.D**-0.5, down_FD * shape.D**-0.5
  weights = Weights(firing_FD, up_FD, down_FD) if shape.gated else Weights(None, firing_FD, down_FD)
  return jax.tree.map(lambda a: a.astype(shape.dtype), Inputs(x_MD, weights))


def _thresholds(num_neurons: int, activity: Activity) -> np.ndarray:
  """float64[F], in the order of the rates."""
  if activity.pattern == "zipf":
    return _inverse_tail(_zipf_rates(num_neurons, activity))
  if activity.pattern == "trained":
    living = num_neurons - round(_DEAD * num_neurons)
    quantiles = -_inverse_tail((np.arange(living) + 0.5) / living)
    rates = activity.density * num_neurons / living * np.exp(_RATE_SPREAD * quantiles - _RATE_SPREAD**2 / 2)
    dead = np.full(num_neurons - living, _NEVER / _LEAST_MULTIPLIER)
    return np.concatenate([_inverse_tail(np.minimum(rates, _RATE_CAP)), dead])
  return np.full(num_neurons, _inverse_tail([activity.density])[0])


def _zipf_rates(num_neurons: int, activity: Activity) -> np.ndarray:
  """min(0.9, c / rank**exponent), with the c that gives the mean, by bisection."""
  weights = np.arange(1, num_neurons + 1) ** -activity.exponent
  rates = lambda c: np.minimum(_ZIPF_CAP, c * weights)
  low, high = 0.0, _ZIPF_CAP / weights[-1]  # nobody fires, all fire at the cap
  for _ in range(100):
    middle = (low + high) / 2
    low, high = (middle, high) if rates(middle).mean() < activity.density else (low, middle)
  return rates(high)


def _multipliers(num_tokens: int, thresholds_F: np.ndarray, density: float, rng: np.random.Generator) -> np.ndarray:
  """float64[M], those that give each token of the trained pattern the number of non-zeros that it is to have."""
  share = (density - _FIRST_TOKEN / _SEQUENCE) / (1 - 1 / _SEQUENCE)  # of the others: whole sequences have `density`
  wanted = share * np.exp(_TOKEN_SPREAD * rng.standard_normal(num_tokens) - _TOKEN_SPREAD**2 / 2)
  wanted[::_SEQUENCE] = _FIRST_TOKEN
  grid = np.geomspace(_LEAST_MULTIPLIER, 4, 128)
  given = np.array([_tail(multiplier * thresholds_F).mean() for multiplier in grid])
  return np.interp(-np.log(wanted), -np.log(given), grid)  # fewer non-zeros by larger multipliers


def _tail(z: np.ndarray) -> np.ndarray:
  """P(N(0, 1) > z)."""
  return np.vectorize(math.erfc, otypes=[np.float64])(z / math.sqrt(2)) / 2


def _inverse_tail(rates) -> np.ndarray:
  """The z with P(N(0, 1) > z) = rate; out of reach for the rates 0 and 1."""
  ends = {0.0: _NEVER, 1.0: -_NEVER}
  return np.array([ends[rate] if rate in ends else -NormalDist().inv_cdf(rate) for rate in map(float, rates)])


_PAPER = FfnShape(M=131072, D=2048, F=5632)  # TwELL, table 2: the 1.5B model

BENCHMARK = {
  "paper": _PAPER,
  "paper_short": dataclasses.replace(_PAPER, M=16384),
  "nongated": dataclasses.replace(_PAPER, F=8192, gated=False),
  "wide": dataclasses.replace(_PAPER, D=4096, F=14336),
  "narrow": dataclasses.replace(_PAPER, D=1024, F=4096),
  "decode_1": dataclasses.replace(_PAPER, M=1),
  "decode_8": dataclasses.replace(_PAPER, M=8),
  "decode_64": dataclasses.replace(_PAPER, M=64),
}

# Small enough for the interpreter. 7, 65 and 130 tokens fill no block of rows; 384 neurons are a tile and a half.
TEST = {
  "few_tokens": FfnShape(M=7, D=128, F=256),
  "one_token": FfnShape(M=1, D=128, F=256),
  "last_tile_half": FfnShape(M=130, D=256, F=384),
  "odd_width": FfnShape(M=65, D=384, F=512),
  "nongated": FfnShape(M=65, D=256, F=384, gated=False),
  "float16": FfnShape(M=65, D=256, F=384, dtype=jnp.float16),
}
