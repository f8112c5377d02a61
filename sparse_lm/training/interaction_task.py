"""What tasks on a log of interactions have in common: one device, and checkpoints that belong to one log."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm.errors import UserError
from sparse_lm.training.task import Json, Task, refuse_differences

# Fields that a resumed run may change: they decide where and how often, not what is computed.
FREE_FIELDS = (
  "checkpoint.",
  "training.log_every",
  "training.eval_",
  "training.tensorboard",
  "data.path",
  "data.cache_dir",
  "data.loader",
  "distillation.teacher",  # a folder, which may move; the teacher in it must stay the same
)


class InteractionTask(Task):
  """A subclass sets what `Task` names; its `identity` has a fingerprint under "dataset"."""

  def __init__(self) -> None:
    self.mesh = jax.make_mesh((1, 1), ("data", "fsdp"), devices=jax.devices()[:1])

  def place(self, batch: Any) -> Any:
    return jax.tree.map(jnp.asarray, batch)

  def write_files(self, workdir: Path) -> None:
    """Nothing: ids come with the data."""

  def entry(self, values: Json, variant: str) -> Json:
    return values

  def refuse_other_run(self, directory: Path, metadata: Json) -> None:
    refuse_differences(f"work folder {directory.parent}", metadata["config"], self.config, free=FREE_FIELDS)
    if metadata["dataset"] != self.identity["dataset"]:
      raise UserError(
        f"the checkpoints in {directory.parent} were trained on other interactions (fingerprint"
        f" {metadata['dataset'][:12]}, now {self.identity['dataset'][:12]}); restore the files, or give another"
        " --workdir"
      )

  def foreign_parameters(self, given: str, path: Path, abstract: Any) -> Any:
    raise UserError(f"{given} is for language models")  # refused before, by the config


def fingerprint(arrays: Iterable[np.ndarray], names: Iterable[str]) -> str:
  """Of the content of arrays and of names, in their order."""
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(f"{array.dtype}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  digest.update("\0".join(names).encode())
  return digest.hexdigest()
