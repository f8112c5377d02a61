"""How every master weight becomes an operand, and the one projection that multiplies most of them."""

import jax
import jax.numpy as jnp

from sparse_lm.parallel import sharding
from sparse_lm.precision.recipes import Recipe


def linear(equation: str, x: jax.Array, w: jax.Array, recipe: Recipe) -> jax.Array:
  """Contracts x with a weight, for example `linear("BLD,FD->BLF", x_BLD, w_gate_FD, recipe)`.

  Args:
    equation: an einsum of two operands in the letters of the dimension key.
    x: activations, of the recipe's compute dtype.
    w: as `operand` takes it.
    recipe: number formats; products accumulate in float32 and are rounded once to the compute dtype.
  """
  return jnp.einsum(equation, x, operand(w, recipe), precision=recipe.matmul_precision)


def operand(w: jax.Array, recipe: Recipe) -> jax.Array:
  """A float32 master weight, possibly an FSDP shard, whole and in the compute dtype."""
  # Cast first: the gather then moves half the bytes.
  return sharding.gather(w.astype(recipe.compute_dtype))
