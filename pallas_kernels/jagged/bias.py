"""The relative bias of HSTU: one table over distances in position, one over distances in time.

Dimension key: T tokens, N longest row, Q queries, S keys.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

TIME_BUCKETS = 129
BUCKET_WIDTH = 0.301
_LARGEST = np.iinfo(np.int32).max
# A distance d is in bucket floor(ln(max(1, d)) / 0.301), at most 128; those from 72 on begin beyond int32.
# i32[130]: the largest distance below bucket 0, 1, ...
LAST_BELOW = np.minimum(np.ceil(np.exp(BUCKET_WIDTH * np.arange(TIME_BUCKETS + 1))) - 1, _LARGEST).astype(np.int32)
LAST_BELOW[0] = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativeBias:
  """position[j - i + N - 1] + time[bucket], added to the score of query i and key j, all heads alike (HSTU, 3.2).

  The distance in time is from the key's event to the one that follows the query's, as whose request the query's output
  is used; for the last event of a row, to the event itself. `bucket` = floor(ln(max(1, |distance|)) / 0.301), at
  most 128.

  Args:
    position: f32[2 N - 1]. A row longer than N gives NaN where it has no entry.
    time: f32[129].
    timestamps: i32[T], of the tokens of q, in any unit in which those of a row are less than 2^31 apart.
  """

  position: jax.Array
  time: jax.Array
  timestamps: jax.Array

  def check(self, op: str, num_tokens: int) -> None:
    """Raises for shapes and dtypes that do not fit."""
    for name in ("position", "time", "timestamps"):
      if not hasattr(getattr(self, name), "dtype"):
        raise TypeError(f"{op}: bias.{name} must be an array, got {type(getattr(self, name)).__name__}")
    if self.position.ndim != 1 or self.position.shape[0] % 2 == 0 or self.position.dtype != jnp.float32:
      raise ValueError(f"{op}: bias.position must be float32[2 N - 1], got {self.position.dtype}{self.position.shape}")
    if self.time.shape != (TIME_BUCKETS,) or self.time.dtype != jnp.float32:
      raise ValueError(f"{op}: bias.time must be float32[{TIME_BUCKETS}], got {self.time.dtype}{self.time.shape}")
    if self.timestamps.shape != (num_tokens,) or self.timestamps.dtype != jnp.int32:
      raise ValueError(
        f"{op}: bias.timestamps must be int32[{num_tokens}], one for each token, got"
        f" {self.timestamps.dtype}{self.timestamps.shape}; subtract the first one of each row where they are larger"
      )

  def places(self, i_Q, j_S, requested_Q, happened_S) -> tuple[jax.Array, jax.Array]:
    """i32[Q, S] twice, where to look in either table; positions count from the start of a row."""
    longest = (self.position.shape[0] + 1) // 2
    place_QS = j_S[None, :] - i_Q[:, None] + longest - 1
    # Before the table: a place behind it, which is filled with NaN, and its own for each diagonal.
    place_QS = jnp.where(place_QS < 0, self.position.shape[0] - place_QS + len(i_Q) + len(j_S), place_QS)
    distance_QS = jnp.abs(requested_Q[:, None] - happened_S[None, :])
    bucket_QS = jnp.searchsorted(jnp.asarray(LAST_BELOW[1:]), distance_QS)  # how many are below the distance
    return place_QS, bucket_QS

  def add_gradients(self, d_tables, d_s_QS, place_QS, bucket_QS) -> tuple[jax.Array, jax.Array]:
    """Gradients of the tables and what a tile adds to them, in an order of their own: scattered additions have none."""
    (d_position, d_time), (num_queries, num_keys) = d_tables, d_s_QS.shape
    # Rows from the last to the first, each one further to the right: diagonals stand in columns.
    length = num_queries + num_keys - 1
    skewed = jnp.pad(d_s_QS[::-1], ((0, 0), (0, num_queries))).reshape(-1)[: num_queries * length]
    diagonals = jnp.sum(skewed.reshape(num_queries, length), axis=0)
    # Places that are not in the table belong to no pair that counts.
    place = jnp.concatenate([place_QS[::-1, 0], place_QS[0, 1:]])
    d_position = d_position.at[place].add(diagonals, mode="drop", unique_indices=True)
    of_bucket = bucket_QS[:, :, None] == jnp.arange(TIME_BUCKETS)[None, None, :]
    return d_position, d_time + jnp.sum(jnp.where(of_bucket, d_s_QS[:, :, None], 0), axis=(0, 1))

  def at(self, place_QS, bucket_QS) -> jax.Array:
    """f32[Q, S]."""
    return self.position.at[place_QS].get(mode="fill", fill_value=math.nan) + self.time[bucket_QS]


def requests(timestamps_T: jax.Array, offsets: jax.Array) -> jax.Array:
  """i32[T]: when the next event of the row happened; of the last one, when it itself did."""
  is_last_T = jnp.zeros(len(timestamps_T) + 1, bool).at[offsets].set(True)[1:]  # an offset is where a row begins
  return jnp.where(is_last_T, timestamps_T, jnp.roll(timestamps_T, -1))
