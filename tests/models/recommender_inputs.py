"""What tests of recommenders share: inputs with NaN behind the last event, one sample of them, pairs that attend."""

import jax.numpy as jnp
import numpy as np
from packed_rows import offsets_of

from sparse_lm.models.features import Inputs, Stream


def inputs_of(lengths, *, features, numeric, width, padding=0, seed=0):
  """Of samples with so many events each; the item is the second feature."""
  rng = np.random.default_rng(seed)
  number, offsets = len(lengths), offsets_of(lengths)
  events_TD = np.full((sum(lengths) + padding, width), np.nan, np.float32)
  events_TD[: sum(lengths)] = rng.normal(size=(sum(lengths), width))
  ages = [np.sort(rng.integers(1, 10**6, size=length))[::-1] for length in lengths]
  tokens_BFD = rng.normal(size=(number, features, width)).astype(np.float32)
  return Inputs(
    tokens_BFD=jnp.asarray(tokens_BFD),
    item_BD=jnp.asarray(tokens_BFD[:, 1]),
    numeric_BN=jnp.asarray(rng.normal(size=(number, numeric)), jnp.float32),
    streams=(
      Stream(
        events_TD=jnp.asarray(events_TD),
        age_T=jnp.asarray(np.concatenate([*ages, np.full(padding, np.nan)]), jnp.float32),
        offsets=jnp.asarray(offsets),
      ),
    ),
  )


def sample_of(inputs, b):
  """The b-th sample alone."""
  ((events_TD, age_T, offsets),) = inputs.streams
  begin, end = int(offsets[b]), int(offsets[b + 1])
  stream = Stream(events_TD[begin:end], age_T[begin:end], jnp.asarray([0, end - begin], jnp.int32))
  one = lambda x: x[b : b + 1]
  return Inputs(one(inputs.tokens_BFD), one(inputs.item_BD), one(inputs.numeric_BN), (stream,))


def visible_pairs(stream, lengths):
  """Events that see each other under a stream's mask, counted one by one."""
  sees = lambda i, j: (
    (stream.window is None or abs(i - j) <= stream.window)
    and (stream.block is None or i // stream.block == j // stream.block)
  )
  return sum(sees(i, j) for length in lengths for i in range(length) for j in range(length))
