"""The gate of InterFormer (arXiv 2411.09852, section 4).   Dimension key: B batch, N tokens, D model width."""

from collections.abc import Sequence

import jax
from flax import nnx

from sparse_lm.models.mlp import MLP
from sparse_lm.precision.recipes import Recipe


class Gate(nnx.Module):
  """Gate(Z) = Z * sigmoid(MLP(Z)), each token by itself.

  The paper writes sigmoid(Z * MLP(Z)), which forgets the scale of Z and can give no negative value. Public ports
  multiply Z by the sigmoid, as here: a gate that damps entries and invents none.
  """

  def __init__(self, width: int, hidden: Sequence[int], activation: str, recipe: Recipe, *, rngs: nnx.Rngs):
    self.mlp = MLP((width, *hidden, width), activation, recipe, rngs=rngs)

  def __call__(self, z_BND: jax.Array) -> jax.Array:
    """Shape in, shape out."""
    return z_BND * jax.nn.sigmoid(self.mlp(z_BND))

  def flops(self, tokens: int) -> int:
    """The MLP for each of N tokens."""
    return tokens * self.mlp.flops()
