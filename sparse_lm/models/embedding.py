"""Lookup of token embeddings whose gradient is summed in float32 and in a fixed order.

The gradient of a lookup adds up the rows of d_out that fetched the same row of the table. As XLA's scatter it rounds
each addition to the dtype of d_out (a common token has thousands), and on a GPU it is atomic, hence different in every
run, or two hundred times slower when asked to be deterministic. Sorted by id, it is an embedding bag: one bag for each
row of the table, holding the tokens that fetched it.

Dimension key: B batch, L length, M = B * L tokens, D model width, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import embedding
from sparse_lm.parallel import sharding
from sparse_lm.precision.recipes import Recipe


def embed(table_VD: jax.Array, tokens_BL: jax.Array, recipe: Recipe) -> jax.Array:
  """Rows of the table, in the compute dtype. An id outside the table gives NaN, which stops a run, not another row."""
  return _lookup(table_VD.shape[0], sharding.gather(table_VD.astype(recipe.compute_dtype)), tokens_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(num_rows, table_VD, tokens_BL):
  del num_rows
  return table_VD.at[tokens_BL].get(
    mode="fill", fill_value=jnp.nan, wrap_negative_indices=False, out_sharding=sharding.activations(3)
  )


def _lookup_forward(num_rows, table_VD, tokens_BL):
  return _lookup(num_rows, table_VD, tokens_BL), tokens_BL


def _lookup_backward(num_rows, tokens_BL, d_out_BLD):
  def of_device(tokens_BL, d_out_BLD):
    tokens_M, d_out_MD = tokens_BL.reshape(-1), d_out_BLD.reshape(-1, d_out_BLD.shape[-1])
    tokens_M = jnp.where(tokens_M < 0, num_rows, tokens_M)  # past all bags, as every id that is in no row
    order_M = jnp.argsort(tokens_M).astype(jnp.int32)
    offsets = jnp.searchsorted(tokens_M[order_M], jnp.arange(num_rows + 1, dtype=jnp.int32)).astype(jnp.int32)
    return embedding.bag(d_out_MD, order_M, offsets)[None]

  return jnp.sum(sharding.per_device_batch(of_device)(tokens_BL, d_out_BLD), axis=0), None


_lookup.defvjp(_lookup_forward, _lookup_backward)
