"""cuDNN's attention over rows packed into sequences, an offset each, which JAX has under no public name.

Dimension key: N sequences, L tokens of a sequence, M rows that one holds at most, H heads, K head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Packing(NamedTuple):
  """Where the rows are; -1 for those that a sequence lacks."""

  lengths_NM: np.ndarray  # i32
  offsets_NM1: np.ndarray  # i32[N, M + 1], where each begins in its sequence


def pack(lengths: np.ndarray, longest: int) -> Packing:
  """Puts rows into sequences of `longest` tokens, longest first, each into the first with room; empty ones nowhere."""
  sequences: list[list[int]] = []
  room: list[int] = []
  for length in sorted((int(n) for n in lengths if n), reverse=True):
    place = next((n for n, free in enumerate(room) if free >= length), None)
    if place is None:
      place = len(room)
      sequences.append([])
      room.append(longest)
    sequences[place].append(length)
    room[place] -= length
  most = max(map(len, sequences), default=1)
  lengths_NM = np.full((len(sequences), most), -1, np.int32)
  offsets_NM1 = np.full((len(sequences), most + 1), -1, np.int32)
  for n, rows in enumerate(sequences):
    lengths_NM[n, : len(rows)] = rows
    offsets_NM1[n, : len(rows)] = np.cumsum([0, *rows[:-1]])
  return Packing(lengths_NM, offsets_NM1)


def attention(q_NLHK: jax.Array, k_NLHK: jax.Array, v_NLHK: jax.Array, packing: Packing, *, causal: bool) -> jax.Array:
  """softmax(q k^T / sqrt(K)) v inside each row; tokens of no row get anything.

  Raises:
    RuntimeError: no cuDNN is there, or one that cannot do it.
  """
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  lengths, offsets = map(jnp.asarray, packing)
  return cudnn.dot_product_attention(
    q_NLHK,
    k_NLHK,
    v_NLHK,
    q_seqlen=lengths,
    kv_seqlen=lengths,
    q_offsets=offsets,
    kv_offsets=offsets,
    scale=q_NLHK.shape[-1] ** -0.5,
    mask_type=cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING,
  )
