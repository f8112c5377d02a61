"""Number formats of compute, by name. Weights, gradients of weights and optimiser state are float32 in every recipe."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a projection computes."""

  name: str
  compute_dtype: jnp.dtype
  # float32 products on a GPU use TF32 unless asked otherwise: ten bits of mantissa under a name that promises 23.
  matmul_precision: jax.lax.Precision


RECIPES = {
  "bf16": Recipe("bf16", jnp.dtype(jnp.bfloat16), jax.lax.Precision.DEFAULT),
  "fp32": Recipe("fp32", jnp.dtype(jnp.float32), jax.lax.Precision.HIGHEST),
}
