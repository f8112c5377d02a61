"""Batches of a run: which blocks, in which order, and which process holds which of them.

Sample k of a run is block order(k // n)[k % n], where order(e) permutes the n blocks and depends on seed and e only.
Global batch t is samples tB .. (t+1)B - 1, and process p of P holds the p-th of P equal runs of them. So the order is
one for all processes, their shares are disjoint, and P processes together see the batches that one process sees.

Two loaders give the same bytes: "numpy" builds a batch when it is asked for; "grain" builds the next few ahead, in
threads. Both know where they are by one number, so either takes over from the other.
"""

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from sparse_lm.config import LOADERS
from sparse_lm.data.packing import Batch, Blocks, padding
from sparse_lm.errors import UserError

State = dict[str, Any]  # JSON
_ENDLESS = 2**62  # grain wants a length; at a batch a microsecond this one lasts 146,000 years


class Source[Rows](Protocol):
  """What batches are drawn from: rows, any of which can be taken together."""

  def __len__(self) -> int:
    """Number of rows."""

  def gather(self, indices: np.ndarray) -> Rows:
    """Rows of these numbers, as a batch."""


class BatchIterator[Rows](Protocol):
  """Endless training batches, this process's share of each."""

  def __iter__(self) -> "BatchIterator[Rows]":
    """Returns itself."""

  def __next__(self) -> Rows:
    """Returns the next batch."""

  def state(self) -> State:
    """Returns where it is, for a checkpoint: "batches" were handed out; what was built ahead does not count."""

  def restore(self, state: State) -> None:
    """Goes to where `state` was taken, without building the batches before it."""

  def close(self) -> None:
    """Ends background work."""


def training_batches[Rows](
  source: Source[Rows],
  *,
  batch_size: int,
  seed: int,
  process_index: int = 0,
  process_count: int = 1,
  loader: str = "auto",
) -> BatchIterator[Rows]:
  """Returns the endless shuffled batches of a run; nothing is dropped and batches run on across epochs.

  Args:
    source: what to draw from.
    batch_size: rows of the global batch.
    seed: of the order.
    process_index: this process.
    process_count: processes that share each batch.
    loader: "numpy", "grain", or "auto": grain where it is installed.
  """
  if loader not in LOADERS:
    raise ValueError(f"training_batches: loader={loader!r} is unknown; allowed: {', '.join(LOADERS)}")
  if len(source) == 0:
    raise ValueError("training_batches: there is nothing to draw from")
  batches = _Batches(source, _Order(len(source), seed), share(batch_size, process_index, process_count), batch_size)
  if loader == "auto":
    loader = "numpy" if importlib.util.find_spec("grain") is None else "grain"
  return _GrainIterator(batches) if loader == "grain" else _NumpyIterator(batches)


def validation_batches(
  blocks: Blocks, *, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
  """Yields each block once, in order. All processes yield as many batches, all of one size; padding weighs 0."""
  rows = share(batch_size, process_index, process_count)
  for first in range(0, len(blocks), batch_size):
    indices = np.arange(first + rows.start, min(first + rows.stop, len(blocks)))
    batch = blocks.gather(indices)
    filler = padding(len(rows) - len(indices), blocks.block_length)
    yield {name: np.concatenate([array, filler[name]]) for name, array in batch.items()}


def share(batch_size: int, process_index: int, process_count: int) -> range:
  """Rows of the global batch that a process holds."""
  if batch_size % process_count:
    raise UserError(
      f"training.batch_size={batch_size} is not divisible by the number of processes, {process_count};"
      " each process takes an equal share of every batch"
    )
  size = batch_size // process_count
  return range(process_index * size, (process_index + 1) * size)


class _Order:
  """Endless sequence of block numbers, one permutation an epoch."""

  def __init__(self, num_blocks: int, seed: int):
    self._num_blocks, self._seed = num_blocks, seed
    # Batches built ahead reach into the next epoch while the last ones of this epoch are still built.
    self._permutation = functools.lru_cache(maxsize=2)(self._compute_permutation)

  def __getitem__(self, samples: range) -> np.ndarray:
    epochs, places = np.divmod(np.arange(samples.start, samples.stop), self._num_blocks)
    indices = np.empty(len(samples), np.int64)
    for epoch in np.unique(epochs):
      here = epochs == epoch
      indices[here] = self._permutation(int(epoch))[places[here]]
    return indices

  def _compute_permutation(self, epoch: int) -> np.ndarray:
    # Sorting raw words, not Generator.permutation: NumPy promises the words of a bit generator for ever, but may change
    # what a Generator makes of them, and a resumed run would then see other batches.
    words = np.random.Philox(np.random.SeedSequence([self._seed, epoch])).random_raw(self._num_blocks)
    return np.argsort(words, kind="stable")


class _Batches[Rows]:
  """Batch t of one process, for any t: what both loaders hand out. (A sequence, as grain wants its sources.)"""

  def __init__(self, source: Source[Rows], order: _Order, share: range, batch_size: int):
    self._source, self._order, self._share, self._batch_size = source, order, share, batch_size

  def __len__(self) -> int:
    return _ENDLESS

  def __getitem__(self, t: int) -> Rows:
    first = t * self._batch_size
    return self._source.gather(self._order[range(first + self._share.start, first + self._share.stop)])


class _NumpyIterator[Rows]:
  def __init__(self, batches: _Batches[Rows]):
    self._batches, self._handed_out = batches, 0

  def __iter__(self) -> BatchIterator[Rows]:
    return self

  def __next__(self) -> Rows:
    batch = self._batches[self._handed_out]
    self._handed_out += 1
    return batch

  def state(self) -> State:
    return {"batches": self._handed_out}

  def restore(self, state: State) -> None:
    self._handed_out = state["batches"]

  def close(self) -> None:
    pass


class _GrainIterator[Rows]:
  """Keeps its own count: what grain's state counts is grain's affair."""

  def __init__(self, batches: _Batches[Rows]):
    try:
      import grain
    except ImportError as error:
      raise UserError("data.loader='grain' needs the package grain: pip install -e '.[demo]'") from error
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    self._iterator: Any = iter(grain.MapDataset.source(batches).to_iter_dataset(options))
    self._handed_out = 0

  def __iter__(self) -> BatchIterator[Rows]:
    return self

  def __next__(self) -> Rows:
    batch: Rows = next(self._iterator)
    self._handed_out += 1
    return batch

  def state(self) -> State:
    return {"batches": self._handed_out}

  def restore(self, state: State) -> None:
    self._iterator.set_state({"next_index": state["batches"]})
    self._handed_out = state["batches"]

  def close(self) -> None:
    self._iterator.close()
