"""Our parameters as a folder that `transformers` loads: config.json, safetensors and the tokenizer.

One file's tensors are in memory at a time. The folder appears under its name only when it is complete.
"""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from sparse_lm.config import ModelConfig
from sparse_lm.data.tokenizer import Tokenizer
from sparse_lm.errors import SaveError, UserError
from sparse_lm.hf import layout
from sparse_lm.models.transformer import Transformer
from sparse_lm.training.checkpoint import flatten

DTYPES = {name: jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}
_FILE_BYTES = 5 * 10**9


def write_folder(
  folder: Path, model: Transformer, config: ModelConfig, tokenizer: Tokenizer, *, dtype: str, file_bytes=_FILE_BYTES
) -> None:
  """Writes a model without padding rows in its vocabulary, as `inference.open_model` gives it.

  Args:
    folder: new, or empty.
    model: its parameters.
    config: its shape; vocab_size counts the rows that are written.
    tokenizer: goes beside the weights.
    dtype: of the written weights; float32 loses nothing, bfloat16 nothing of weights that were bfloat16.
    file_bytes: a file is ended before it grows past this; a single larger tensor is a file of its own.

  Raises:
    UserError: the folder is in use, transformers has no such model, or a weight does not fit into the dtype.
    SaveError: it could not be written; nothing is left of it.
  """
  try:
    from safetensors.numpy import save_file
  except ImportError as error:
    raise UserError("Hugging Face checkpoints need the package safetensors: pip install -e '.[hf]'") from error
  values = layout.config_to_hf(config, dtype=dtype, eos_id=tokenizer.eos_id)
  require_new(folder)
  parts = _files(model, config, DTYPES[dtype].itemsize, file_bytes)
  temporary = folder.with_name(f".{folder.name}.tmp")
  try:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for n, keys in enumerate(parts, start=1):
      name = f"model-{n:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else "model.safetensors"
      save_file({k: _stored_array(k, *keys[k], DTYPES[dtype]) for k in keys}, temporary / name, {"format": "pt"})
      weight_map |= dict.fromkeys(keys, name)
    if len(parts) > 1:
      size = sum(leaf.size for leaf in flatten(model).values()) * DTYPES[dtype].itemsize
      _write_json(
        temporary / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map}
      )
    _write_json(temporary / "config.json", values)
    (temporary / "tokenizer.json").write_text(tokenizer.json_text, encoding="utf-8")
    _write_json(
      temporary / "tokenizer_config.json",
      {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.eos,
        "model_max_length": config.context_length,
      },
    )
    temporary.replace(folder)
  except OSError as error:
    raise SaveError(f"{folder} could not be written ({error.strerror}); nothing is left of it") from None
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def require_new(folder: Path) -> None:
  """Raises UserError for a folder with something in it, or a file in its place."""
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    what = "is not empty" if folder.is_dir() else "is a file"
    raise UserError(f"{folder} exists and {what}; name another folder, nothing is overwritten")


_Part = tuple[Any, int | None, str]  # our stacked or single leaf, which layer of it, how it is stored


def _all_tensors(model: Transformer, config: ModelConfig) -> Iterator[tuple[str, _Part]]:
  """(key, part) of every tensor, layer by layer, as a reader wants them."""
  stored, leaves = layout.tensors(config), {k.removesuffix("/value"): v for k, v in flatten(model).items()}
  for path, tensor in stored.items():
    if not path.startswith("blocks/"):
      yield tensor.key, (leaves[path], None, tensor.form)
  for layer in range(config.num_layers):
    for path, tensor in stored.items():
      if path.startswith("blocks/"):
        yield tensor.key.format(layer=layer), (leaves[path], layer, tensor.form)


def _files(model: Transformer, config: ModelConfig, itemsize: int, file_bytes: int) -> list[dict[str, _Part]]:
  files: list[dict[str, _Part]] = [{}]
  used = 0
  for key, part in _all_tensors(model, config):
    leaf, layer, _ = part
    size = math.prod(leaf.shape if layer is None else leaf.shape[1:]) * itemsize
    if files[-1] and used + size > file_bytes:
      files.append({})
      used = 0
    files[-1][key] = part
    used += size
  return files


def _stored_array(key: str, leaf, layer: int | None, form: str, dtype: np.dtype) -> np.ndarray:
  ours = np.asarray(leaf if layer is None else leaf[layer])
  matrix = ours if form == "vector" else ours.reshape(-1, ours.shape[-1])
  with np.errstate(over="ignore"):  # said below
    array = np.ascontiguousarray((matrix.T if form == "columns" else matrix).astype(dtype))
  if (lost := np.isinf(array.astype(np.float32)) & np.isfinite(matrix.T if form == "columns" else matrix)).any():
    raise UserError(
      f"{key} has {int(lost.sum())} weights beyond the range of {dtype}; give --dtype=bfloat16 or float32"
    )
  return array


def _write_json(path: Path, values: Any) -> None:
  path.write_text(json.dumps(values, indent=2) + "\n")
