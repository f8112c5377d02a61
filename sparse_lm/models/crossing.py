"""Products of features: cross layers of DCNv2 (arXiv 2008.13535, section 3) and pairwise dots of DLRM (1906.00091).

Dimension key: B batch, N interaction tokens, D width (of cross layers: of all tokens, flattened), R rank, P pairs of
tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from sparse_lm.models.initial import normal_weight
from sparse_lm.models.mlp import Affine
from sparse_lm.parallel import sharding
from sparse_lm.precision.linear import linear
from sparse_lm.precision.recipes import Recipe


class LowRankAffine(nnx.Module):
  """y = U (V x) + b, an affine map of rank R (DCNv2, eq. 3)."""

  def __init__(self, width: int, rank: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.v_RD = normal_weight((rank, width), width, rngs=rngs)
    self.u = Affine(rank, width, recipe, rngs=rngs)
    self.width, self.rank = width, rank
    self.recipe = recipe

  def __call__(self, x_BD: jax.Array) -> jax.Array:
    """Shape in, shape out."""
    return self.u(linear("BD,RD->BR", x_BD, self.v_RD[...], self.recipe))

  def flops(self) -> int:
    """4 D R, against 2 D^2 of the whole matrix."""
    return 4 * self.width * self.rank


class CrossNetwork(nnx.Module):
  """x_(l+1) = x_0 * (W_l x_l + b_l) + x_l (DCNv2, eq. 1): l layers hold products of up to l + 1 entries of x_0."""

  def __init__(self, width: int, num_layers: int, recipe: Recipe, *, rank: int | None = None, rngs: nnx.Rngs):
    """`rank` is that of each W_l; None: W_l is one whole matrix."""
    make = lambda: (
      Affine(width, width, recipe, rngs=rngs) if rank is None else LowRankAffine(width, rank, recipe, rngs=rngs)
    )
    self.projections = nnx.List([make() for _ in range(num_layers)])

  def __call__(self, x_BD: jax.Array) -> jax.Array:
    """Shape in, shape out."""
    first_BD = x_BD
    for project in self.projections:
      x_BD = first_BD * project(x_BD) + x_BD
    return x_BD

  def flops(self) -> int:
    """2 D^2 a layer, or 4 D R at rank R."""
    return sum(project.flops() for project in self.projections)


def pairwise_dots(x_BND: jax.Array, recipe: Recipe) -> jax.Array:
  """<x_i, x_j> for all i < j, row by row: [B, P] with P = N (N - 1) / 2; one token alone gives P = 0."""
  batch, tokens, _ = x_BND.shape
  dots_BNN = jnp.einsum("BND,BMD->BNM", x_BND, x_BND, precision=recipe.matmul_precision)
  above_P = np.flatnonzero(np.triu(np.ones((tokens, tokens), bool), k=1))
  layout = P(jax.typeof(x_BND).sharding.spec[0], None) if sharding.under_mesh() else None
  # Unique and sorted, and JAX told so: the gradient is then a scatter that needs no atomics.
  return (
    dots_BNN.reshape(batch, tokens * tokens)
    .at[:, above_P]
    .get(unique_indices=True, indices_are_sorted=True, out_sharding=layout)
  )


def pairwise_dots_flops(tokens: int, width: int) -> int:
  """2 N^2 D: the product X X^T is computed whole, though less than half of it is used."""
  return 2 * tokens * tokens * width
