"""Embedding bag in plain jnp: the oracle of the kernel, and the path on CPU.

out[b] = sum over offsets[b] <= t < offsets[b + 1] of weights[t] * table[ids[t]] / divisor_b; ids outside [0, V) add 0.
divisor_b is 1 for mode "sum"; for "mean" it is the length of bag b, which counts all its ids, or 1 if it is empty.

On a GPU XLA turns the segment sum into atomic adds, so there (and only there) the last bits may differ between runs.

Dimension key: V table rows, D row width, T ids, B bags.
"""

from typing import Literal

import jax
import jax.numpy as jnp

Mode = Literal["sum", "mean"]


def bag(
  table_VD: jax.Array, ids_T: jax.Array, offsets: jax.Array, weights_T: jax.Array | None, mode: Mode
) -> jax.Array:
  """Returns out_BD in the dtype of the table, summed in float32."""
  bag_T, exists_T = place_tokens(ids_T, offsets, table_VD.shape[0])
  terms_TD = _rows_TD(table_VD, ids_T, exists_T)
  if weights_T is not None:
    # A weight that belongs to nothing may be NaN: select, since 0 * NaN is NaN.
    terms_TD = terms_TD * jnp.where(exists_T, weights_T, 0.0)[:, None]
  out_BD = jax.ops.segment_sum(terms_TD, bag_T, num_segments=offsets.shape[0] - 1, indices_are_sorted=True)
  return (out_BD / divisor_B(offsets, mode)[:, None]).astype(table_VD.dtype)


def weights_gradient_T(
  table_VD: jax.Array, ids_T: jax.Array, offsets: jax.Array, d_out_BD: jax.Array, mode: Mode
) -> jax.Array:
  """Returns f32[T]: table[ids[t]] . d_out[b] / divisor_b; zero for padding and for ids that do not exist."""
  bag_T, exists_T = place_tokens(ids_T, offsets, table_VD.shape[0])
  d_sums_BD = d_out_BD.astype(jnp.float32) / divisor_B(offsets, mode)[:, None]
  d_terms_TD = d_sums_BD.at[bag_T].get(mode="fill", fill_value=0)
  return jnp.where(exists_T, jnp.sum(_rows_TD(table_VD, ids_T, exists_T) * d_terms_TD, axis=1), 0.0)


def place_tokens(ids_T: jax.Array, offsets: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
  """Returns the bag of each token (B for padding), and whether the token stands for a row of the table."""
  # Among equal offsets (empty bags) side="right" passes all: the token belongs to the last bag that starts there.
  # Unrolled: each turn of a loop would cost a GPU a launch or two.
  token_T = jnp.arange(ids_T.shape[0], dtype=jnp.int32)
  bag_T = jnp.searchsorted(offsets, token_T, side="right", method="scan_unrolled").astype(jnp.int32) - 1
  return bag_T, (bag_T < offsets.shape[0] - 1) & (ids_T >= 0) & (ids_T < num_rows)


def _rows_TD(table_VD: jax.Array, ids_T: jax.Array, exists_T: jax.Array) -> jax.Array:
  """Returns f32[T, D], zeros where no row exists."""
  if table_VD.shape[0] == 0:  # jnp refuses to index an empty axis, even to fill
    return jnp.zeros((ids_T.shape[0], table_VD.shape[1]), jnp.float32)
  # Row V is past the end, so "fill" gives zeros. A negative id must not get there: it would count from the end.
  at_T = jnp.where(exists_T, ids_T, table_VD.shape[0])
  return table_VD.at[at_T].get(mode="fill", fill_value=0).astype(jnp.float32)


def divisor_B(offsets: jax.Array, mode: Mode) -> jax.Array:
  """Returns f32[B], what the sum of each bag is divided by."""
  lengths_B = offsets[1:] - offsets[:-1]
  return jnp.maximum(lengths_B if mode == "mean" else jnp.ones_like(lengths_B), 1).astype(jnp.float32)
