"""The device mesh of a run: axes `data` (copies of the weights) and `fsdp` (shares of each weight) split the batch."""

import os

import jax
from jax.sharding import Mesh

from sparse_lm.config import LmConfig
from sparse_lm.errors import UserError


def make_mesh(config: LmConfig) -> Mesh:
  """Returns an explicit mesh over the first data * fsdp devices; one device is a mesh of size 1, not a special case.

  Raises:
    UserError: the devices, the batch or the model width do not divide as asked.
  """
  try:
    devices = jax.devices()
  except (RuntimeError, AssertionError) as error:  # what JAX raises depends on which of its back ends is missing
    raise UserError(
      f"JAX finds no device (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}; {error});"
      " leave JAX_PLATFORMS unset, or install the extra `cuda`"
    ) from None
  fsdp = config.parallel.fsdp
  data = config.parallel.data if config.parallel.data is not None else max(len(devices) // fsdp, 1)
  if data * fsdp > len(devices) or (config.parallel.data is None and data * fsdp != len(devices)):
    raise UserError(
      f"parallel.data={config.parallel.data} and parallel.fsdp={fsdp} do not fit {len(devices)} {devices[0].platform}"
      " device(s); parallel.data * parallel.fsdp may be at most that, and fsdp must divide it when data is None"
    )
  micro_batch = config.training.batch_size // config.training.accumulation_steps
  if micro_batch % (data * fsdp):
    raise UserError(
      f"training.batch_size={config.training.batch_size} / accumulation_steps={config.training.accumulation_steps} ="
      f" {micro_batch} sequences do not divide over parallel.data * parallel.fsdp = {data * fsdp} devices"
    )
  if config.model.model_width % fsdp:
    raise UserError(
      f"model.model_width={config.model.model_width} is not divisible by parallel.fsdp={fsdp}, which shares each weight"
      " along the model width"
    )
  return jax.make_mesh((data, fsdp), ("data", "fsdp"), devices=devices[: data * fsdp])
