"""Multi-layer perceptrons of the recommender.

Dimension key: D input width of a layer, F its output width. Arrays have these as their last axis, behind any others.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_lm.models.initial import normal_weight
from sparse_lm.precision.linear import linear, operand
from sparse_lm.precision.recipes import Recipe

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"relu": jax.nn.relu, "silu": jax.nn.silu}


class Affine(nnx.Module):
  """y = x W^T + b, from [..., D] to [..., F]. b starts at zero."""

  def __init__(self, in_width: int, out_width: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.w_FD = normal_weight((out_width, in_width), in_width, rngs=rngs)
    self.b_F = nnx.Param(jnp.zeros((out_width,), jnp.float32))
    self.in_width = in_width
    self.out_width = out_width
    self.recipe = recipe

  def __call__(self, x: jax.Array) -> jax.Array:
    """Acts on the last axis."""
    y = linear("...D,FD->...F", x, self.w_FD[...], self.recipe)
    return y + jnp.expand_dims(operand(self.b_F[...], self.recipe), tuple(range(y.ndim - 1)))

  def flops(self) -> int:
    """2 D F for a row."""
    return 2 * self.in_width * self.out_width


class Identity(nnx.Module):
  """Where widths or tokens are already those that are wanted."""

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns its argument."""
    return x

  def flops(self) -> int:
    """None."""
    return 0


class MLP(nnx.Module):
  """Affine layers with an activation between them, and none after the last: a norm, a gate or a loss follows there."""

  def __init__(self, widths: Sequence[int], activation: str, recipe: Recipe, *, rngs: nnx.Rngs):
    """`widths` are those of the input, of each hidden layer if any, and of the output.

    Raises:
      ValueError: fewer than two widths, or an activation without that name.
    """
    if len(widths) < 2:
      raise ValueError(f"MLP: widths={tuple(widths)} must name at least the widths of the input and of the output")
    if activation not in ACTIVATIONS:
      raise ValueError(f"MLP: activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
    self.layers = nnx.List([Affine(n_in, n_out, recipe, rngs=rngs) for n_in, n_out in itertools.pairwise(widths)])
    self.activation = ACTIVATIONS[activation]

  def __call__(self, x: jax.Array) -> jax.Array:
    """From [..., widths[0]] to [..., widths[-1]]."""
    *hidden, last = self.layers
    for layer in hidden:
      x = self.activation(layer(x))
    return last(x)

  def flops(self) -> int:
    """2 sum_i w_i w_(i+1) for a row."""
    return sum(layer.flops() for layer in self.layers)
