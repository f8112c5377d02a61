"""Adapter between a teacher and its student: corrects a stale teacher by fresh labels (gem, 1.10 and 2.7).

  a = z + MLP([z | e | n])

z is the teacher's logit, e are the student's embeddings of the features, n the numeric features. The last layer starts
at zero, so an adapter that has learnt nothing is the teacher. GEM publishes the purpose of its adapter, not its form;
this one is ours.

Dimension key: B samples, D width of the MLP's input.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_lm.models.features import Inputs
from sparse_lm.models.mlp import MLP
from sparse_lm.precision.recipes import Recipe


class Adapter(nnx.Module):
  """a_B from z_B and what the student gets of the features."""

  def __init__(self, features_width: int, hidden_width: int, recipe: Recipe, *, rngs: nnx.Rngs):
    """`features_width` is that of all embeddings and numeric features of a sample together."""
    self.mlp = MLP((1 + features_width, hidden_width, 1), "relu", recipe, rngs=rngs)
    last = self.mlp.layers[-1]
    last.w_FD = nnx.Param(jnp.zeros_like(last.w_FD[...]))

  def __call__(self, logit_B: jax.Array, inputs: Inputs) -> jax.Array:
    """In float32. Nothing is learnt through `inputs`: they are the student's."""
    tokens_BD = inputs.tokens_BFD.reshape(len(logit_B), -1)
    z_B1 = logit_B[:, None].astype(tokens_BD.dtype)
    x_BD = jnp.concatenate([z_B1, *map(jax.lax.stop_gradient, (tokens_BD, inputs.numeric_BN))], axis=1)
    return logit_B + self.mlp(x_BD)[:, 0].astype(jnp.float32)
