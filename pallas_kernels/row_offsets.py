"""Offsets of jagged rows: i32[B+1], from 0, never decreasing, ending at or before the number of tokens.

Row b is tokens offsets[b] <= t < offsets[b + 1]; empty rows are legal; tokens from offsets[-1] on are padding. Under
jit the values are unknown, only shape and dtype are checked; a kernel must stay inside memory whatever they hold.

Dimension key: B rows, T tokens.
"""

import jax
import numpy as np


def check(op: str, name: str, offsets: jax.Array, num_tokens: int) -> None:
  """Raises with the first offending index and its values."""
  if offsets.dtype != np.int32:
    raise TypeError(f"{op}: {name} must be int32, got {offsets.dtype}; cast it where its values are known to fit")
  if offsets.ndim != 1 or offsets.shape[0] == 0:
    raise ValueError(f"{op}: {name} must be one row of B + 1 values, got shape {offsets.shape}")
  if isinstance(offsets, jax.core.Tracer):
    return
  values = np.asarray(offsets)
  if values[0] != 0:
    raise ValueError(f"{op}: {name}[0] = {values[0]} must be 0")
  # A comparison, not a difference: the difference of two int32 may wrap around to the allowed side.
  decreasing = np.flatnonzero(values[1:] < values[:-1])
  if decreasing.size:
    i = int(decreasing[0]) + 1
    raise ValueError(
      f"{op}: {name}[{i}] = {values[i]} is below {name}[{i - 1}] = {values[i - 1]}; offsets never decrease"
    )
  if values[-1] > num_tokens:
    raise ValueError(
      f"{op}: {name}[{len(values) - 1}] = {values[-1]} points past the T = {num_tokens} tokens that were given"
    )
