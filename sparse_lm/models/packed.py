"""Packed tokens: rows of different lengths behind each other, x_TD with offsets i32[B + 1].

Row b is tokens offsets[b] <= t < offsets[b + 1]. Tokens from offsets[-1] on are padding, may hold NaN, and have no say.

Dimension key: T packed tokens of all rows, B rows, D width, N tokens that stand before each row.
"""

import jax
import jax.numpy as jnp


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
  row_T = jnp.searchsorted(offsets, token_T, side="right").astype(jnp.int32) - 1
  return row_T, token_T - offsets[row_T]


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
