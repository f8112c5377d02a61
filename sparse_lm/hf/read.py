"""A Hugging Face folder as parameters of ours: tensor by tensor from safetensors into the wanted layout.

Nothing is held but the target arrays and the part of one parameter that one device is about to receive; a file is
mapped only while one tensor is read from it.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparse_lm.config import ModelConfig, PrecisionConfig
from sparse_lm.data.tokenizer import Tokenizer, read_tokenizer
from sparse_lm.errors import UserError, first_line
from sparse_lm.hf import layout
from sparse_lm.models.transformer import Transformer
from sparse_lm.training.checkpoint import flatten, unflatten

_FLOATS = ("F32", "BF16", "F16", "F64")


def is_hf_folder(folder: Path) -> bool:
  """True if config.json there is one of transformers."""
  try:
    return "model_type" in json.loads((folder / "config.json").read_text())
  except (OSError, ValueError, TypeError):
    return False


class HfFolder:
  """What a folder holds; opening it reads names and shapes alone."""

  config: ModelConfig
  precision: PrecisionConfig  # bf16 where the weights have 16 bits

  def __init__(self, folder: Path):
    """Raises UserError for a folder that is not a whole checkpoint of a supported model."""
    self.folder = folder
    with self._said():
      values = json.loads((folder / "config.json").read_text())
      self._file_of, self._shapes = self._index()
      gated, feedforward = layout.style_of(self._shapes)
      self.config = layout.config_from_hf(values, gated=gated, has_head="lm_head.weight" in self._shapes)
      self._stored = layout.tensors(self.config, feedforward)
      self._refuse_missing_or_unknown()
    sixteen_bits = any(dtype in ("BF16", "F16") for _, dtype in self._shapes.values())
    self.precision = PrecisionConfig("bf16" if sixteen_bits else "fp32")

  def tokenizer(self, given: str | None = None) -> Tokenizer:
    """The one of a given tokenizer.json, else of that beside the weights; raises UserError if it does not fit them."""
    found = read_tokenizer(given or str(self.folder / "tokenizer.json"), "tokenizer")
    found.require_rows(self.config.vocab_size, self.folder)
    return found

  def load(self, abstract: Transformer) -> Transformer:
    """Reads the parameters.

    Args:
      abstract: a model of this folder's config, as ShapeDtypeStruct with the wanted dtypes and shardings.

    Raises:
      UserError: a tensor cannot be read or has another shape than config.json says.
    """
    # The largest first: what is on its way to a device comes on top of what is there already.
    leaves = sorted(flatten(abstract).items(), key=lambda item: -item[1].size)
    with self._said():
      return unflatten(abstract, {name: self._parameter(name, leaf) for name, leaf in leaves})

  def _parameter(self, name: str, leaf: Any) -> jax.Array:
    path = name.removesuffix("/value")
    stored, stacked = self._stored[path], path.startswith("blocks/")
    keys = [stored.key.format(layer=layer) for layer in range(leaf.shape[0] if stacked else 1)]
    shape = leaf.shape[1:] if stacked else leaf.shape
    wanted = _merged(shape)[:: -1 if stored.form == "columns" else 1]
    for key in keys:
      if (found := self._shapes[key][0]) != wanted:
        raise UserError(f"{key} has shape {list(found)}, but config.json asks for {list(wanted)}")

    def region(index: tuple[slice, ...] | None) -> np.ndarray:
      assert index is not None  # what the type allows, JAX never gives
      layers, inner = (keys[index[0]], index[1:]) if stacked else (keys, index)
      inner_shape = [len(range(*s.indices(n))) for s, n in zip(inner, shape)]
      out = np.empty((len(layers), *inner_shape), leaf.dtype)
      for n, key in enumerate(layers):
        out[n] = self._read(key, stored.form, shape, inner)
      return out if stacked else out[0]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, region)

  def _read(self, key: str, form: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
    """The part `index` of one layer's parameter of our `shape`; only the wanted columns of D leave the file."""
    with _open(self.folder / self._file_of[key]) as file:
      tensor = file.get_slice(key)
      if form == "vector":
        return tensor[index[0]]
      part = tensor[:, index[-1]] if form == "rows" else tensor[index[-1], :].T
    return part.reshape(*shape[:-1], part.shape[-1])[*index[:-1], :]

  def _index(self) -> tuple[dict[str, str], dict[str, tuple[tuple[int, ...], str]]]:
    """File of each tensor, and its (shape, dtype)."""
    names = sorted(path.name for path in self.folder.glob("*.safetensors"))
    index = self.folder / "model.safetensors.index.json"
    if index.exists():
      wanted = set(json.loads(index.read_text())["weight_map"].values())
      if missing := sorted(wanted - set(names)):
        raise UserError(f"file {missing[0]}, named in {index.name}, is missing")
      names = sorted(wanted)
    if not names:
      other = " (only .bin files, which can run code when read; convert them)" if [*self.folder.glob("*.bin")] else ""
      raise UserError(f"there is no .safetensors file{other}")
    file_of, shapes = {}, {}
    for name in names:
      with _open(self.folder / name) as file:
        for key in file.keys():  # noqa: SIM118 - no mapping, though it looks like one
          tensor = file.get_slice(key)
          file_of[key], shapes[key] = name, (tuple(tensor.get_shape()), tensor.get_dtype())
    return file_of, shapes

  def _refuse_missing_or_unknown(self) -> None:
    layers = range(self.config.num_layers)
    wanted = {stored.key.format(layer=n) for stored in self._stored.values() for n in layers}
    present = {key for key in self._shapes if not layout.ignored(key, self.config)}
    if missing := sorted(wanted - present):
      raise UserError(f"{_some(missing)} missing; is the checkpoint complete?")
    if unknown := sorted(present - wanted):
      raise UserError(f"{_some(unknown)} unknown; our model has no such parameter and would compute something else")
    if bad := sorted(key for key in wanted if self._shapes[key][1] not in _FLOATS):
      raise UserError(f"{bad[0]} is stored as {self._shapes[bad[0]][1]}; supported: {', '.join(_FLOATS)}")

  @contextlib.contextmanager
  def _said(self) -> Iterator[None]:
    """Names the folder in every error, whoever raises it."""
    try:
      yield
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise UserError(f"{self.folder} cannot be read as a Hugging Face checkpoint: {first_line(error)}") from error


def _merged(shape: tuple[int, ...]) -> tuple[int, ...]:
  """[H, K, D] as [H * K, D]; [D] as it is."""
  return shape if len(shape) == 1 else (math.prod(shape[:-1]), shape[-1])


def _some(keys: list[str]) -> str:
  return f"{', '.join(keys[:3])}{f' and {len(keys) - 3} others' if len(keys) > 3 else ''} {'are' if keys[1:] else 'is'}"


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
  try:
    import safetensors
  except ImportError as error:
    raise UserError("Hugging Face checkpoints need the package safetensors: pip install -e '.[hf]'") from error
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      yield file
  except safetensors.SafetensorError as error:
    raise UserError(f"{path.name} is damaged or cut short ({first_line(error)})") from error
