"""Checkpoints that are whole or not used: Orbax commits them atomically, a CRC-32 of every leaf proves their content.

Orbax (0.12) makes a checkpoint visible only when it is complete, but loads a flipped byte without a word. So each save
carries, in its metadata, the CRC-32 of every leaf and of the metadata itself; a load checks them and falls back to the
checkpoint before. The checksums are kept for each region that one device held, so a run on another mesh can check them.
In a run of several processes they cover what the first process holds.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from sparse_lm.errors import SaveError, UserError, first_line

Json = dict[str, Any]
_TEMPORARY = ".orbax-checkpoint-tmp"


class DamagedError(Exception):
  """A checkpoint does not hold what was saved."""


def flatten(tree) -> dict[str, Any]:
  """Leaves by name, such as `model/blocks/attention/w_query_HKD/value`: what is on disk does not depend on classes."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def unflatten(like, leaves: Mapping[str, Any]):
  """The inverse of `flatten`, for a tree shaped as `like`."""
  return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in flatten(like)])


def _crc(data: np.ndarray) -> int:
  return zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def _checksums(leaves: Mapping[str, jax.Array]) -> Json:
  """For each leaf a list of [region, CRC-32], the region as [start, stop] for each axis."""

  def of_leaf(leaf):
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    bounds = lambda shard: [list(s.indices(n)[:2]) for s, n in zip(shard.index, leaf.shape)]
    return [[bounds(shard), _crc(np.asarray(shard.data))] for shard in shards]

  with ThreadPoolExecutor() as pool:  # zlib lets other threads run while it works
    return dict(zip(leaves, pool.map(of_leaf, leaves.values())))


def _verify(leaves: Mapping[str, jax.Array], checksums: Json) -> None:
  if leaves.keys() != checksums.keys():
    raise DamagedError(f"leaves {sorted(leaves.keys() ^ checksums.keys())} are missing or unknown")

  def damaged(name):
    if not leaves[name].is_fully_addressable:
      return False
    data = np.asarray(leaves[name])
    return any(_crc(data[tuple(slice(*b) for b in region)]) != crc for region, crc in checksums[name])

  with ThreadPoolExecutor() as pool:
    bad = [name for name, is_bad in zip(leaves, pool.map(damaged, leaves)) if is_bad]
  if bad:
    raise DamagedError(f"CRC-32 of {', '.join(bad[:3])}{' and others' if len(bad) > 3 else ''} does not match")


def _seal(metadata: Json) -> Json:
  return {"metadata": metadata, "crc": zlib.crc32(json.dumps(metadata, sort_keys=True).encode())}


def _unseal(sealed: Any) -> Json:
  if not isinstance(sealed, dict) or sealed != _seal(sealed.get("metadata", {})):
    raise DamagedError("its metadata is damaged")
  return sealed["metadata"]


def steps(directory: Path) -> list[int]:
  """Steps of the complete checkpoints in a folder, oldest first."""
  if not directory.is_dir():
    return []
  return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())


def read_metadata(path: Path) -> Json:
  """The `metadata` that was saved with a checkpoint.

  Raises:
    DamagedError: it cannot be read, or is not what was saved.
  """
  try:
    return _unseal(ocp.metadata(path.absolute()).custom_metadata)
  except DamagedError:
    raise
  except Exception as error:  # whatever Orbax or the file system raises, the checkpoint cannot be used
    raise DamagedError(f"its metadata cannot be read ({first_line(error)})") from error


def load(path: Path, abstract):
  """Loads and checks one checkpoint, or the part of it that `abstract` has leaves for.

  Args:
    path: WORKDIR/checkpoints/STEP.
    abstract: tree of ShapeDtypeStruct with the wanted shardings, on any mesh.

  Raises:
    DamagedError: a leaf cannot be read, has another shape, or differs from what was saved.
  """
  checksums = read_metadata(path)["checksums"]
  wanted = flatten(abstract)
  try:
    leaves = ocp.load(path.absolute(), {name: wanted.get(name, ocp.PLACEHOLDER) for name in checksums | wanted})
  except Exception as error:
    raise DamagedError(first_line(error)) from error
  leaves = {name: leaf for name, leaf in leaves.items() if name in wanted}
  _verify(leaves, {name: checksums[name] for name in wanted if name in checksums})
  return unflatten(abstract, leaves)


def load_latest(directory: Path, abstract, check: Callable[[Json], None], report: Callable[[str], None]):
  """Loads the newest checkpoint that is whole; damaged newer ones are said and set aside as STEP.damaged.

  Args:
    directory: WORKDIR/checkpoints.
    abstract: as in `load`.
    check: raises UserError when a checkpoint's metadata says that it belongs to something else.
    report: takes one line.

  Returns:
    (tree, metadata), or None where there is no checkpoint at all.

  Raises:
    UserError: there are checkpoints, but none is whole. Nothing is changed then.
  """
  damaged: list[Path] = []
  for step in reversed(steps(directory)):
    path = directory / str(step)
    try:
      metadata = read_metadata(path)
      check(metadata)
      tree = load(path, abstract)
    except DamagedError as error:
      report(f"checkpoint {path} is damaged ({error}); trying the one before")
      damaged.append(path)
      continue
    for bad in damaged:
      _set_aside(bad)
    return tree, metadata
  if damaged:
    raise UserError(
      f"none of the {len(damaged)} checkpoint(s) in {directory} can be read; nothing was changed."
      " Restore one from a copy, or start again with another --workdir"
    )
  return None


def _set_aside(path: Path) -> None:
  target, n = path.with_name(f"{path.name}.damaged"), 1
  while target.exists():
    target, n = path.with_name(f"{path.name}.damaged-{n}"), n + 1
  path.rename(target)


class Saver:
  """Writes checkpoints in the background and keeps the newest `keep`. One process at a time owns the folder."""

  def __init__(self, directory: Path, keep: int):
    directory.mkdir(parents=True, exist_ok=True)
    for entry in directory.iterdir():
      if _TEMPORARY in entry.name:  # a run that was killed while it saved; the owner's lock says that it is gone
        shutil.rmtree(entry)
    self._directory = directory
    self._pending: tuple[int, ocp.AsyncResponse] | None = None
    self._options = ocp.Context()
    # Trained float32 weights hardly compress; trying took six times as long, and memory for a third of the arrays.
    self._options.array_options.saving.use_compression = False
    with self._options:
      self._checkpointer = ocp.training.Checkpointer(  # Orbax refuses relative paths when it writes
        directory.absolute(), preservation_policy=ocp.training.preservation_policies.LatestN(keep)
      )

  def save(self, step: int, tree, metadata: Json) -> None:
    """Copies the tree off the devices, then writes it while the caller goes on (and may donate the tree).

    Raises:
      SaveError: the save before this one failed, or this one could not start.
    """
    self.wait()
    leaves = flatten(tree)
    metadata = metadata | {"checksums": _checksums(leaves)}
    try:
      with self._options:
        response = self._checkpointer.save_async(step, leaves, custom_metadata=_seal(metadata), force=True)
    except Exception as error:
      raise self._failure(step, error) from error
    assert response is not None, f"Orbax declined to save step {step}"
    self._pending = (step, response)

  def wait(self, timeout: float | None = None) -> None:
    """Returns when nothing is being written, or after `timeout` seconds; 0 asks only whether the save has failed.

    Raises:
      SaveError: the save in progress failed; older checkpoints are intact.
    """
    if self._pending is None:
      return
    step, response = self._pending
    try:
      response.result(timeout)
    except Exception as error:
      if timeout is not None and isinstance(error, TimeoutError):
        return
      self._pending = None
      raise self._failure(step, error) from error
    self._pending = None

  def _failure(self, step: int, error: Exception) -> SaveError:
    older = [s for s in steps(self._directory) if s != step]
    kept = f"the newest intact one is step {older[-1]}" if older else "there is no older one"
    return SaveError(
      f"checkpoint of step {step} could not be written to {self._directory} ({first_line(error)}); {kept}"
    )
