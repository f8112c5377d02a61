"""What a run trains and is judged on, whether its training text lies on disk as blocks or is read on the way."""

import abc
import dataclasses

from sparse_lm.config import LmConfig
from sparse_lm.data.batches import BatchIterator
from sparse_lm.data.packing import Blocks
from sparse_lm.data.tokenizer import Tokenizer
from sparse_lm.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset(abc.ABC):
  """Both kinds are validated on blocks; they differ in where training batches come from."""

  config: LmConfig  # that it was opened with
  validation: Blocks | None  # None: nothing is held out
  tokenizer: Tokenizer
  fingerprint: str  # of texts, split, tokenizer and block layout: equal fingerprints mean equal blocks

  @abc.abstractmethod
  def training_batches(self, *, process_index: int = 0, process_count: int = 1) -> BatchIterator:
    """Returns the endless batches of the run, from its beginning."""


def require_a_block(part: str, blocks: Blocks, remedy: str) -> Blocks:
  """Returns `blocks`; raises UserError where there are none."""
  if len(blocks) == 0:
    raise UserError(
      f"the {part} part holds {blocks.num_tokens} tokens in {blocks.num_documents} documents, but one block of"
      f" model.context_length={blocks.block_length} needs {blocks.block_length + 1}; {remedy}"
    )
  return blocks


def counts(part: str, blocks: Blocks | None) -> str:
  """What a part holds, for a line that is reported."""
  if blocks is None:
    return f"no {part}"
  return (
    f"{blocks.num_documents:,} {part} documents, {blocks.num_tokens:,} tokens,"
    f" {len(blocks):,} blocks of {blocks.block_length}"
  )
