"""Wukong: stacked factorization machines (arXiv 2403.02545, section 3), and a mixture of them (Kunlun, 2602.10016).

After layer i there are interactions of up to 2^i input tokens: each layer multiplies pairs of what the last one made.

Dimension key: B batch, N interaction tokens, C tokens that a block puts out, D model width, R rank (k in the paper),
E experts. Every block takes [B, N, D] to [B, C, D].
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_lm.models.initial import normal_weight
from sparse_lm.models.layer_norm import layer_norm
from sparse_lm.models.mlp import MLP, Identity
from sparse_lm.precision.linear import linear
from sparse_lm.precision.recipes import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class InteractionConfig:
  """Sizes inside one interaction."""

  rank: int  # how many learned mixtures of the tokens each token is multiplied with
  hidden: tuple[int, ...]  # widths of the hidden layers of its MLP
  activation: str = "relu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WukongConfig(InteractionConfig):
  """A stack of equal layers, in the paper's letters: l, n_F and n_L, with k and the MLP above."""

  num_layers: int
  fmb_tokens: int
  lcb_tokens: int

  @property
  def tokens(self) -> int:
    """How many a layer puts out."""
    return self.fmb_tokens + self.lcb_tokens


def factorization_machine(x_BND: jax.Array, y_RN: jax.Array, recipe: Recipe) -> jax.Array:
  """FM(X) = X X^T Y, as X (X^T Y): 4 N R D operations, where the N x N dots of all pairs would take 2 N^2 D."""
  mixtures_BRD = linear("BND,RN->BRD", x_BND, y_RN, recipe)
  return jnp.einsum("BND,BRD->BNR", x_BND, mixtures_BRD, precision=recipe.matmul_precision)


class FMB(nnx.Module):
  """Factorization machine block: reshape(MLP(LN(flatten(FM(X))))). Y is one for all samples, not attentive."""

  def __init__(
    self, tokens: int, out_tokens: int, width: int, config: InteractionConfig, recipe: Recipe, *, rngs: nnx.Rngs
  ):
    self.y_RN = normal_weight((config.rank, tokens), tokens, rngs=rngs)
    widths = (tokens * config.rank, *config.hidden, out_tokens * width)
    self.mlp = MLP(widths, config.activation, recipe, rngs=rngs)
    self.tokens, self.out_tokens, self.width, self.rank = tokens, out_tokens, width, config.rank
    self.recipe = recipe

  def __call__(self, x_BND: jax.Array) -> jax.Array:
    """From [B, N, D] to [B, C, D]."""
    batch = x_BND.shape[0]
    fm_BNR = factorization_machine(x_BND, self.y_RN[...], self.recipe)
    flat_BF = self.mlp(layer_norm(fm_BNR.reshape(batch, self.tokens * self.rank)))
    return flat_BF.reshape(batch, self.out_tokens, self.width)

  def flops(self) -> int:
    """4 N R D, and the MLP."""
    return 4 * self.tokens * self.rank * self.width + self.mlp.flops()


class LCB(nnx.Module):
  """Linear compression block: W X, one matrix of mixtures of tokens for all D columns."""

  def __init__(self, tokens: int, out_tokens: int, width: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.w_CN = normal_weight((out_tokens, tokens), tokens, rngs=rngs)
    self.tokens, self.out_tokens, self.width = tokens, out_tokens, width
    self.recipe = recipe

  def __call__(self, x_BND: jax.Array) -> jax.Array:
    """From [B, N, D] to [B, C, D]."""
    return linear("BND,CN->BCD", x_BND, self.w_CN[...], self.recipe)

  def flops(self) -> int:
    """2 C N D."""
    return 2 * self.out_tokens * self.tokens * self.width


def shortcut(tokens: int, out_tokens: int, width: int, recipe: Recipe, *, rngs: nnx.Rngs) -> Identity | LCB:
  """R(X): the identity if the number of tokens stays, or else a linear compression."""
  return Identity() if tokens == out_tokens else LCB(tokens, out_tokens, width, recipe, rngs=rngs)


class Stack(nnx.Module):
  """Layers one after the other; the first takes the tokens of the input, all others those that a layer puts out."""

  def __init__(self, make_layer: Callable[[int], Any], tokens: int, out_tokens: int, num_layers: int):
    self.layers = nnx.List([make_layer(n) for n in (tokens, *[out_tokens] * (num_layers - 1))])

  def __call__(self, x_BND: jax.Array) -> jax.Array:
    """From [B, N, D] to [B, C, D], C the tokens that a layer puts out."""
    for layer in self.layers:
      x_BND = layer(x_BND)
    return x_BND

  def flops(self) -> int:
    """Those of its layers."""
    return sum(layer.flops() for layer in self.layers)


class WukongLayer(nnx.Module):
  """X' = LN(concat(FMB(X), LCB(X)) + R(X)); the norm is over the width of each token."""

  def __init__(self, tokens: int, width: int, config: WukongConfig, recipe: Recipe, *, rngs: nnx.Rngs):
    self.fmb = FMB(tokens, config.fmb_tokens, width, config, recipe, rngs=rngs)
    self.lcb = LCB(tokens, config.lcb_tokens, width, recipe, rngs=rngs)
    self.shortcut = shortcut(tokens, config.tokens, width, recipe, rngs=rngs)

  def __call__(self, x_BND: jax.Array) -> jax.Array:
    """From [B, N, D] to [B, C, D], C = n_F + n_L."""
    y_BCD = jnp.concatenate([self.fmb(x_BND), self.lcb(x_BND)], axis=1)
    return layer_norm(y_BCD + self.shortcut(x_BND))

  def flops(self) -> int:
    """4 N R D + MLP + 2 n_L N D, and 2 C N D where C is not N."""
    return self.fmb.flops() + self.lcb.flops() + self.shortcut.flops()


class Wukong(Stack):
  """Layers one after the other; the first takes the N tokens of the input, all others n_F + n_L."""

  def __init__(self, tokens: int, width: int, config: WukongConfig, recipe: Recipe, *, rngs: nnx.Rngs):
    make_layer = lambda tokens_in: WukongLayer(tokens_in, width, config, recipe, rngs=rngs)
    super().__init__(make_layer, tokens, config.tokens, config.num_layers)


class WukongExperts(nnx.Module):
  """Y = sum_e Wukong_e(X_e), X_e the e-th of E runs of N / E consecutive tokens (Kunlun's mixture of Wukong experts).

  No token is routed: each expert sees its own part of every sample. The secondary sources do not spell out how outputs
  combine; a sum is what the reduce-scatter of GEM's expert parallelism computes. Parameters carry E in front.
  """

  def __init__(
    self, tokens: int, width: int, num_experts: int, config: WukongConfig, recipe: Recipe, *, rngs: nnx.Rngs
  ):
    """Raises ValueError where the experts do not divide the tokens."""
    if tokens % num_experts:
      raise ValueError(f"WukongExperts: tokens={tokens} do not divide into num_experts={num_experts} equal parts")
    part = tokens // num_experts
    make_expert = lambda key: Wukong(part, width, config, recipe, rngs=nnx.Rngs(key))
    self.experts = jax.vmap(make_expert)(jax.random.split(rngs.params(), num_experts))
    self.num_experts = num_experts

  def __call__(self, x_BND: jax.Array) -> jax.Array:
    """From [B, N, D] to [B, C, D], C = n_F + n_L of one expert."""
    batch, tokens, width = x_BND.shape
    parts_BEND = x_BND.reshape(batch, self.num_experts, tokens // self.num_experts, width)
    y_EBCD = jax.vmap(Wukong.__call__, in_axes=(0, 1))(self.experts, parts_BEND)
    return jnp.sum(y_EBCD, axis=0)

  def flops(self) -> int:
    """E times those of one expert."""
    return self.num_experts * self.experts.flops()
