"""Packed tokens: rows of different lengths behind each other, x_TD with offsets i32[B + 1].

Row b is tokens offsets[b] <= t < offsets[b + 1]. Tokens from offsets[-1] on are padding, may hold NaN, and have no say.

Dimension key: T packed tokens of all rows, B rows, D width, N tokens that stand before each row.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import embedding


def clear_padding(x_TD: jax.Array, offsets: jax.Array) -> jax.Array:
  """x with zeros behind the last row.

  Whoever multiplies tokens by a weight calls this first: the weight's gradient is a sum over all T tokens, in which
  NaN * 0 is NaN.
  """
  # select, not multiply, for the same reason
  real_T = jnp.arange(len(x_TD)) < offsets[-1]
  return jnp.where(real_T.reshape(-1, *(1 for _ in x_TD.shape[1:])), x_TD, jnp.zeros((), x_TD.dtype))


def places(offsets: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
  """i32[T] twice: the row of every token, B for padding, and its position from the start of the row."""
  token_T = jnp.arange(num_tokens, dtype=jnp.int32)
  # Unrolled: each turn of a loop would cost a GPU a launch or two.
  row_T = jnp.searchsorted(offsets, token_T, side="right", method="scan_unrolled").astype(jnp.int32) - 1
  return row_T, token_T - offsets[row_T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(x_BD: jax.Array, offsets: jax.Array, num_tokens: int) -> jax.Array:
  """[T, D]: the vector of each token's row; zeros for padding."""
  if len(x_BD) == 0:  # jnp refuses to index an empty axis, even to fill
    return jnp.zeros((num_tokens, x_BD.shape[1]), x_BD.dtype)
  row_T, _ = places(offsets, num_tokens)
  return x_BD.at[row_T].get(mode="fill", fill_value=0)  # padding has row B, which is none


@jax.custom_vjp
def total(x_TD: jax.Array, offsets: jax.Array) -> jax.Array:
  """[B, D]: the sum of each row's tokens, in float32 and rounded once."""
  # A bag of its own tokens: XLA would sort all T * D numbers before it adds them in a fixed order.
  return embedding.bag(x_TD, jnp.arange(len(x_TD), dtype=jnp.int32), offsets)


# Each is the other's derivative.
spread.defvjp(
  lambda x_BD, offsets, num_tokens: (spread(x_BD, offsets, num_tokens), offsets),
  lambda num_tokens, offsets, d_TD: (total(d_TD, offsets), None),
)
total.defvjp(
  lambda x_TD, offsets: (total(x_TD, offsets), (offsets, len(x_TD))),
  lambda kept, d_BD: (spread(d_BD, *kept), None),
)


def first_tokens(x_TD: jax.Array, offsets: jax.Array, number: int) -> jax.Array:
  """[B, number, D]: how each row begins; zeros behind the end of a shorter one."""
  token_BN = offsets[:-1, None] + jnp.arange(number, dtype=jnp.int32)[None, :]
  return _gather(x_TD, token_BN, token_BN < offsets[1:, None])


def last_tokens(x_TD: jax.Array, offsets: jax.Array, number: int, *, after: int = 0) -> jax.Array:
  """[B, number, D]: how each row ends, its last token last; zeros for what lies among its first `after` tokens."""
  token_BN = offsets[1:, None] - number + jnp.arange(number, dtype=jnp.int32)[None, :]
  return _gather(x_TD, token_BN, token_BN >= offsets[:-1, None] + after)


def prepend(first_BND: jax.Array, x_TD: jax.Array, offsets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """N tokens before each row: (tokens [T + B * N, D], their offsets). Takes numbers for tokens, [B, N] and [T], too."""
  num_rows, number = first_BND.shape[:2]
  longer = offsets + number * jnp.arange(num_rows + 1, dtype=jnp.int32)
  row_T, position_T = places(longer, len(x_TD) + num_rows * number)
  is_first_T = (position_T < number) & (row_T < num_rows)
  is_token_T = (position_T >= number) & (row_T < num_rows)
  token_T = jnp.where(is_first_T, row_T * number + position_T, num_rows * number)
  token_T = jnp.where(is_token_T, num_rows * number + offsets[row_T] + position_T - number, token_T)
  both_TD = jnp.concatenate([first_BND.reshape(-1, *first_BND.shape[2:]), x_TD])
  return _gather(both_TD, token_T, is_first_T | is_token_T), longer


def _gather(x_TD: jax.Array, token: jax.Array, exists: jax.Array) -> jax.Array:
  """Zeros, and no gradient, for what does not exist."""
  return x_TD.at[jnp.where(exists, token, len(x_TD))].get(mode="fill", fill_value=0)
