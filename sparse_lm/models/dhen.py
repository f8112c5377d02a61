"""DHEN: layers that add up interactions of several kinds (arXiv 2203.11014, section 3).

Dimension key: B batch, N interaction tokens, C tokens that a block puts out, D model width, F flattened tokens, P pairs
of tokens. Every interaction takes [B, N, D] to [B, C, D].
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
from flax import nnx

from sparse_lm.models.crossing import CrossNetwork, pairwise_dots, pairwise_dots_flops
from sparse_lm.models.layer_norm import layer_norm
from sparse_lm.models.mlp import MLP
from sparse_lm.models.wukong import FMB, LCB, InteractionConfig, Stack, shortcut
from sparse_lm.precision.recipes import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class DhenConfig(InteractionConfig):
  """A stack of equal layers; rank, hidden widths and activation hold for every interaction that has such."""

  num_layers: int
  tokens: int  # how many a layer puts out
  interactions: tuple[str, ...]  # names of INTERACTIONS


class Cross(nnx.Module):
  """One cross layer over the flattened tokens, then a compression to C tokens where C is not N."""

  def __init__(
    self, tokens: int, out_tokens: int, width: int, recipe: Recipe, *, rank: int | None = None, rngs: nnx.Rngs
  ):
    self.network = CrossNetwork(tokens * width, 1, recipe, rank=rank, rngs=rngs)
    self.compress = shortcut(tokens, out_tokens, width, recipe, rngs=rngs)

  def __call__(self, x_BND: jax.Array) -> jax.Array:
    """From [B, N, D] to [B, C, D]."""
    batch, tokens, width = x_BND.shape
    crossed_BF = self.network(x_BND.reshape(batch, tokens * width))
    return self.compress(crossed_BF.reshape(batch, tokens, width))

  def flops(self) -> int:
    """2 (N D)^2, or 4 N D R at rank R, and the compression."""
    return self.network.flops() + self.compress.flops()


class Dots(nnx.Module):
  """An MLP of the dots of all pairs of tokens."""

  def __init__(
    self, tokens: int, out_tokens: int, width: int, config: InteractionConfig, recipe: Recipe, *, rngs: nnx.Rngs
  ):
    widths = (tokens * (tokens - 1) // 2, *config.hidden, out_tokens * width)
    self.mlp = MLP(widths, config.activation, recipe, rngs=rngs)
    self.tokens, self.out_tokens, self.width = tokens, out_tokens, width
    self.recipe = recipe

  def __call__(self, x_BND: jax.Array) -> jax.Array:
    """From [B, N, D] to [B, C, D]."""
    dots_BP = pairwise_dots(x_BND, self.recipe)
    return self.mlp(dots_BP).reshape(x_BND.shape[0], self.out_tokens, self.width)

  def flops(self) -> int:
    """2 N^2 D, and the MLP."""
    return pairwise_dots_flops(self.tokens, self.width) + self.mlp.flops()


class TokenMLP(nnx.Module):
  """An MLP of the flattened tokens."""

  def __init__(
    self, tokens: int, out_tokens: int, width: int, config: InteractionConfig, recipe: Recipe, *, rngs: nnx.Rngs
  ):
    self.mlp = MLP((tokens * width, *config.hidden, out_tokens * width), config.activation, recipe, rngs=rngs)
    self.out_tokens = out_tokens

  def __call__(self, x_BND: jax.Array) -> jax.Array:
    """From [B, N, D] to [B, C, D]."""
    batch, tokens, width = x_BND.shape
    return self.mlp(x_BND.reshape(batch, tokens * width)).reshape(batch, self.out_tokens, width)

  def flops(self) -> int:
    """Those of the MLP."""
    return self.mlp.flops()


class Interaction(Protocol):
  """What a layer adds up."""

  def __call__(self, x_BND: jax.Array) -> jax.Array:
    """From [B, N, D] to [B, C, D]."""

  def flops(self) -> int:
    """Of the forward pass of a sample; a multiply-add counts two."""


INTERACTIONS: dict[str, Callable[..., Interaction]] = {
  "cross": lambda n, c, d, config, recipe, rngs: Cross(n, c, d, recipe, rngs=rngs),
  "low_rank_cross": lambda n, c, d, config, recipe, rngs: Cross(n, c, d, recipe, rank=config.rank, rngs=rngs),
  "dots": lambda n, c, d, config, recipe, rngs: Dots(n, c, d, config, recipe, rngs=rngs),
  "fm": lambda n, c, d, config, recipe, rngs: FMB(n, c, d, config, recipe, rngs=rngs),
  "linear": lambda n, c, d, config, recipe, rngs: LCB(n, c, d, recipe, rngs=rngs),
  "mlp": lambda n, c, d, config, recipe, rngs: TokenMLP(n, c, d, config, recipe, rngs=rngs),
}


class DhenLayer(nnx.Module):
  """X' = LN(sum_i Interaction_i(X) + R(X)); the norm is over the width of each token."""

  def __init__(self, tokens: int, width: int, config: DhenConfig, recipe: Recipe, *, rngs: nnx.Rngs):
    """Raises ValueError where an interaction has a name that is not in INTERACTIONS."""
    unknown = [name for name in config.interactions if name not in INTERACTIONS]
    if unknown:
      raise ValueError(f"DhenLayer: interactions={unknown} must each be one of {', '.join(INTERACTIONS)}")
    sizes = (tokens, config.tokens, width)
    self.interactions = nnx.List([INTERACTIONS[name](*sizes, config, recipe, rngs) for name in config.interactions])
    self.shortcut = shortcut(*sizes, recipe, rngs=rngs)

  def __call__(self, x_BND: jax.Array) -> jax.Array:
    """From [B, N, D] to [B, C, D]."""
    y_BCD = self.shortcut(x_BND)
    for interaction in self.interactions:
      y_BCD = y_BCD + interaction(x_BND)
    return layer_norm(y_BCD)

  def flops(self) -> int:
    """Those of its interactions, and 2 C N D where C is not N."""
    return self.shortcut.flops() + sum(interaction.flops() for interaction in self.interactions)


class Dhen(Stack):
  """Layers one after the other; the first takes the N tokens of the input, all others C."""

  def __init__(self, tokens: int, width: int, config: DhenConfig, recipe: Recipe, *, rngs: nnx.Rngs):
    make_layer = lambda tokens_in: DhenLayer(tokens_in, width, config, recipe, rngs=rngs)
    super().__init__(make_layer, tokens, config.tokens, config.num_layers)
