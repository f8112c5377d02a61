"""Blocks of tokens: documents end with EOS, are concatenated, and the stream is cut every L tokens.

Block i reads tokens iL .. iL+L: the first L are inputs, the last L targets. Neighbouring blocks share one token, so
every token but the first of the stream is predicted exactly once; what does not fill a block at the end is dropped.

Dimension key: B blocks of a batch, L block length, N documents of the stream.
"""

import dataclasses

import numpy as np

from sparse_lm.data.shards import TokenStore

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The blocks of one side of the split. With `document_mask`, no target starts another document than its input's."""

  store: TokenStore
  block_length: int
  document_mask: bool

  def __len__(self) -> int:
    return max(0, (self.num_tokens - 1) // self.block_length)

  @property
  def num_tokens(self) -> int:
    """Tokens of the stream, one EOS a document included, before the remainder is dropped."""
    return self.store.num_tokens

  @property
  def num_documents(self) -> int:
    """Documents of the stream."""
    return self.store.num_documents

  def gather(self, indices_B: np.ndarray) -> Batch:
    """Returns the blocks with these numbers.

    `inputs_BL` and `targets_BL` are token ids. `segments_BL` numbers the documents of the inputs within their block,
    from 1. `weights_BL` is 1 where the target counts and 0 elsewhere.
    """
    indices_B = np.asarray(indices_B, np.int64)
    if len(indices_B) and not (indices_B.min() >= 0 and indices_B.max() < len(self)):
      raise IndexError(f"block numbers {indices_B.min()} to {indices_B.max()} reach outside [0, {len(self)})")
    width, starts_N = self.block_length + 1, self.store.starts_N
    begin_B = indices_B * self.block_length
    tokens = np.empty((len(indices_B), width), np.int32)
    segments = np.ones_like(tokens)
    # Documents begin at starts[n]; those that begin inside a block, after its first token, raise its segment number.
    low_B = np.searchsorted(starts_N, begin_B, side="right")
    high_B = np.searchsorted(starts_N, begin_B + width, side="left")
    for row, begin in enumerate(begin_B):
      self.store.read(begin, tokens[row])
      for start in starts_N[low_B[row] : high_B[row]] - begin:
        segments[row, start:] += 1
    same_document = segments[:, 1:] == segments[:, :-1]
    return {
      "inputs_BL": np.ascontiguousarray(tokens[:, :-1]),
      "targets_BL": np.ascontiguousarray(tokens[:, 1:]),
      "segments_BL": np.ascontiguousarray(segments[:, :-1]),
      "weights_BL": (same_document if self.document_mask else np.ones_like(same_document)).astype(np.float32),
    }


def padding(num_blocks: int, block_length: int) -> Batch:
  """Blocks that count for nothing: token 0, segment 0, weight 0."""
  zeros_BL = np.zeros((num_blocks, block_length), np.int32)
  return {
    "inputs_BL": zeros_BL,
    "targets_BL": zeros_BL.copy(),
    "segments_BL": zeros_BL.copy(),
    "weights_BL": zeros_BL.astype(np.float32),
  }
