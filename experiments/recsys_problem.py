"""A batch of the size of a cluster's, of random numbers: what `bench_recsys` times.

Dimension key: B samples, T packed events, N numeric features, V rows of a table.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.jagged.shapes import JaggedShape
from sparse_lm.data.samples import Bag, Batch, History
from sparse_lm.recsys_config import RecsysConfig
from sparse_lm.training import mfu

FEATURES, NUMERIC, ACTIONS = 31, 16, 8
_ITEMS, _OTHERS = 17_000_000, 10_000  # rows of the items' table and of each other one
_SKEW = 1.2  # of ids: their ranks follow this power law
_ROOM = 8192  # events are padded to a multiple


@dataclasses.dataclass(frozen=True)
class TableSizes:
  """What the maker of a model's state asks of a data set."""

  table_sizes: dict[str, int]
  num_numeric: int = NUMERIC

  @classmethod
  def of(cls, items: int = _ITEMS, others: int = _OTHERS) -> "TableSizes":
    """One large table, and small ones for all other features."""
    small = {f"feature.{n:02d}": others for n in range(FEATURES - 1)}
    return cls({"action": ACTIONS, "item": items} | small)


def draw_lengths(batch_size: int, longest: int, seed: int) -> np.ndarray:
  """i64[B], uniform up to `longest`: half of the padded events are there."""
  return JaggedShape(B=batch_size, L=longest, fill=0.5).draw_lengths(np.random.default_rng(seed))


def draw_batch(sizes: TableSizes, lengths_B: np.ndarray, seed: int) -> Batch:
  """Random ids, ages up to a year, newest last."""
  rng, batch_size = np.random.default_rng(seed), len(lengths_B)
  offsets = np.concatenate([[0], np.cumsum(lengths_B)]).astype(np.int32)
  room = -(-max(int(offsets[-1]), 1) // _ROOM) * _ROOM
  ids = lambda rows, number: (np.minimum(rng.zipf(_SKEW, number), rows) - 1).astype(np.int32)
  features = {name: rows for name, rows in sizes.table_sizes.items() if name != "action"}
  each = np.arange(batch_size + 1, dtype=np.int32)
  age_T = np.exp(rng.uniform(0, np.log(3e7), room)).astype(np.float32)
  row_T = np.searchsorted(offsets, np.arange(room), side="right")
  batch = Batch(
    bags={name: Bag(ids(rows, batch_size), each) for name, rows in features.items()},
    numeric_BN=rng.normal(size=(batch_size, sizes.num_numeric)).astype(np.float32),
    history=History(
      item_T=ids(sizes.table_sizes["item"], room),
      action_T=rng.integers(0, ACTIONS, room).astype(np.int32),
      age_T=age_T[np.lexsort((-age_T, row_T))],
      offsets=offsets,
    ),
    label_B=rng.integers(0, 2, batch_size).astype(np.float32),
    weight_B=np.ones(batch_size, np.float32),
    teaching=None,
  )
  return jax.tree.map(jnp.asarray, batch)


def problem(config: RecsysConfig, sizes: TableSizes, batch_size: int) -> tuple[np.ndarray, Batch]:
  """(lengths_B, batch), the same ones for the same sizes."""
  lengths_B = draw_lengths(batch_size, config.data.longest, seed=0)
  return lengths_B, draw_batch(sizes, lengths_B, seed=1)


def facts(lengths_B: np.ndarray) -> dict[str, Any]:
  """What every case says."""
  return {"samples": len(lengths_B), "events": int(lengths_B.sum()), "peak_flops": mfu.peak_flops(jax.devices()[:1])}
