"""Feed-forward blocks with ReLU gates, and the statistics that L1 training needs.

Dimension key: B batch, L length, D model width, F hidden neurons. Weights are neuron-major: row n of each [F, D] matrix
belongs to neuron n, for the down projection too.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import sharding as sharded_kernels
from pallas_kernels import twell
from sparse_lm.config import ModelConfig
from sparse_lm.parallel import sharding
from sparse_lm.precision.linear import linear, operand
from sparse_lm.precision.recipes import Recipe


class Stats(NamedTuple):
  """Sums over real tokens, so that parts of a batch add up exactly; `active` combines by or."""

  l1: jax.Array  # f32[], sum over tokens and neurons of |h|
  l0: jax.Array  # f32[], number of neurons that ReLU let through, summed over tokens
  active_F: jax.Array  # bool[F], fired for at least one token


def measure(h_BLF: jax.Array, fires_BLF: jax.Array, real_BL: jax.Array) -> Stats:
  """Statistics of hidden values h and of which neurons fire, over the tokens that are no padding."""
  # select, not multiply: a padded token may hold NaN, and 0 * NaN is NaN
  real_BL1 = real_BL[:, :, None]
  magnitude_BLF = jnp.where(real_BL1, jnp.abs(h_BLF), jnp.zeros((), h_BLF.dtype))
  fires_BLF = fires_BLF & real_BL1
  return Stats(
    l1=jnp.sum(magnitude_BLF, dtype=jnp.float32),
    l0=jnp.sum(fires_BLF, dtype=jnp.float32),
    active_F=jnp.any(fires_BLF, axis=(0, 1)),
  )


def _twell(call, sharded_call, x_BLD, real_BL, *weights: nnx.Param, recipe: Recipe) -> tuple[jax.Array, Stats]:
  """A block by twell. Padding goes in as zeros, so that no neuron fires for it, and comes out as zeros."""
  # select, not multiply: as in `measure`
  x_BLD = jnp.where(real_BL[:, :, None], x_BLD, jnp.zeros((), x_BLD.dtype))
  x_MD = x_BLD.reshape(-1, x_BLD.shape[-1])
  if sharding.under_mesh():
    call = functools.partial(sharded_call, axes=sharding.RULES.batch)
  y_MD, means = call(x_MD, *(operand(w[...], recipe) for w in weights), with_active=True)
  tokens = x_MD.shape[0]
  return y_MD.reshape(x_BLD.shape), Stats(l1=means.l1 * tokens, l0=means.l0 * tokens, active_F=means.active)


_gated_twell = functools.partial(_twell, twell.gated_feedforward, sharded_kernels.twell_gated_feedforward)
_plain_twell = functools.partial(_twell, twell.feedforward, sharded_kernels.twell_feedforward)


def _weight(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
  shape_FD = (config.ffn_width, config.model_width)
  return nnx.Param(nnx.initializers.normal(config.init_std)(rngs.params(), shape_FD, jnp.float32))


class GatedFeedForward(nnx.Module):
  """y = (act(x Wg^T) * (x Wu^T)) Wd (TwELL, eq. 1), act = ReLU, or SiLU for the dense rival."""

  def __init__(self, config: ModelConfig, recipe: Recipe, *, rngs: nnx.Rngs):
    self.w_gate_FD = _weight(config, rngs)
    self.w_up_FD = _weight(config, rngs)
    self.w_down_FD = _weight(config, rngs)
    self.recipe = recipe
    self.activation = {"gated_relu": jax.nn.relu, "gated_silu": jax.nn.silu}[config.ffn_kind]
    self.implementation = config.ffn_implementation

  def __call__(self, x_BLD: jax.Array, real_BL: jax.Array) -> tuple[jax.Array, Stats]:
    """Returns y_BLD and statistics over the tokens where real_BL holds."""
    if self.implementation == "twell":
      return _gated_twell(x_BLD, real_BL, self.w_gate_FD, self.w_up_FD, self.w_down_FD, recipe=self.recipe)
    p_BLF = self.gate(x_BLD)
    up_BLF = linear("BLD,FD->BLF", x_BLD, self.w_up_FD[...], self.recipe)
    h_BLF = p_BLF * up_BLF
    y_BLD = linear("BLF,FD->BLD", h_BLF, self.w_down_FD[...], self.recipe)
    return y_BLD, measure(h_BLF, p_BLF != 0, real_BL)

  def gate(self, x_BLD: jax.Array) -> jax.Array:
    """act(x Wg^T), zero for a neuron that does not fire."""
    return self.activation(linear("BLD,FD->BLF", x_BLD, self.w_gate_FD[...], self.recipe))


class FeedForward(nnx.Module):
  """h = relu(x Wu^T), y = h Wd: the paper's non-gated block, whose up projection is its gate."""

  def __init__(self, config: ModelConfig, recipe: Recipe, *, rngs: nnx.Rngs):
    self.w_up_FD = _weight(config, rngs)
    self.w_down_FD = _weight(config, rngs)
    self.recipe = recipe
    self.implementation = config.ffn_implementation

  def __call__(self, x_BLD: jax.Array, real_BL: jax.Array) -> tuple[jax.Array, Stats]:
    """Returns y_BLD and statistics over the tokens where real_BL holds."""
    if self.implementation == "twell":
      return _plain_twell(x_BLD, real_BL, self.w_up_FD, self.w_down_FD, recipe=self.recipe)
    h_BLF = self.gate(x_BLD)
    y_BLD = linear("BLF,FD->BLD", h_BLF, self.w_down_FD[...], self.recipe)
    return y_BLD, measure(h_BLF, h_BLF != 0, real_BL)

  def gate(self, x_BLD: jax.Array) -> jax.Array:
    """relu(x Wu^T), zero for a neuron that does not fire."""
    return jax.nn.relu(linear("BLD,FD->BLF", x_BLD, self.w_up_FD[...], self.recipe))


class NoFeedForward(nnx.Module):
  """y = 0 without any neuron: shows what the feed-forward blocks are worth."""

  def __call__(self, x_BLD: jax.Array, real_BL: jax.Array) -> tuple[jax.Array, Stats]:
    """Returns zeros and empty statistics."""
    zero = jnp.zeros((), jnp.float32)
    return jnp.zeros_like(x_BLD), Stats(l1=zero, l0=zero, active_F=jnp.zeros((0,), bool))


def gate_parameter(ffn_kind: str) -> str:
  """Name of the matrix that decides which neurons fire: the up projection where there is no gate."""
  return "w_up_FD" if ffn_kind == "relu" else "w_gate_FD"


def make_feedforward(config: ModelConfig, recipe: Recipe, *, rngs: nnx.Rngs) -> nnx.Module:
  """The block that config.ffn_kind names."""
  if config.ffn_kind == "none":
    return NoFeedForward()
  cls = FeedForward if config.ffn_kind == "relu" else GatedFeedForward
  return cls(config, recipe, rngs=rngs)
