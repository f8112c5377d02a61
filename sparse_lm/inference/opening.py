"""A trained model, ready for use, from a run's folder, one of its checkpoints, or a Hugging Face folder."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding

from sparse_lm import config_io
from sparse_lm.config import LmConfig, ModelConfig, PrecisionConfig
from sparse_lm.data.tokenizer import Tokenizer, read_tokenizer
from sparse_lm.errors import UserError
from sparse_lm.hf.read import HfFolder, is_hf_folder
from sparse_lm.models.transformer import Transformer
from sparse_lm.parallel.sharding import RULES, parameter_name
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.training import checkpoint


@dataclasses.dataclass(frozen=True)
class OpenedModel:
  """A model and what is needed to feed it text. Its vocabulary has no padding rows: no id that means nothing."""

  config: ModelConfig
  precision: PrecisionConfig
  model: Transformer
  tokenizer: Tokenizer
  path: Path  # of the checkpoint or Hugging Face folder that it came from
  step: int | None  # of the run; None: not a run's


def open_model(
  path: str | Path,
  *,
  tokenizer: str | None = None,
  recipe: str | None = None,
  dtype: jnp.dtype | None = None,
  ffn_implementation: str | None = None,
  report: Callable[[str], None] = print,
) -> OpenedModel:
  """Opens a model on one device, or laid out over the mesh of `jax.set_mesh`.

  Args:
    path: WORKDIR of a run (its newest whole checkpoint), WORKDIR/checkpoints/STEP, or a Hugging Face folder.
    tokenizer: a tokenizer.json; None: the one beside the model.
    recipe: number formats of compute; None: those of the model's config.
    dtype: of the weight matrices; None: the compute dtype of the recipe, so that nothing is cast again in each step.
    ffn_implementation: dense or twell; None: that of the model's config.
    report: takes one line.

  Raises:
    UserError: there is no model, it is damaged, its tokenizer is missing or has more ids than the model has rows, or
      ffn_implementation cannot serve it.
  """
  path = Path(os.path.expanduser(path))
  source: _Run | HfFolder = HfFolder(path) if is_hf_folder(path) else _newest_whole(path, report)
  precision = PrecisionConfig(recipe or source.precision.recipe)
  precision.validate()
  dtype = RECIPES[precision.recipe].compute_dtype if dtype is None else dtype
  # What was chosen for the memory and the device of training.
  config, where = dataclasses.replace(source.config, remat="none", attention_implementation="auto"), path
  if ffn_implementation is not None:
    config = dataclasses.replace(config, ffn_implementation=ffn_implementation)
    config.validate()
  found = source.tokenizer(tokenizer)
  if isinstance(source, HfFolder):
    model = source.load(abstract_parameters(config, precision, dtype))
  else:
    config, where = dataclasses.replace(config, vocab_size=source.vocab_size), source.path
    model = _converted(source.model, config, precision, dtype)
  return OpenedModel(config, precision, model, found, where, None if isinstance(source, HfFolder) else source.step)


def abstract_parameters(config: ModelConfig, precision: PrecisionConfig, dtype: jnp.dtype) -> Transformer:
  """A model's parameters as ShapeDtypeStruct, norm scales in float32, on one device or laid out over the mesh."""
  shapes = jax.eval_shape(lambda: Transformer(config, precision, rngs=nnx.Rngs(0)))
  mesh = jax.sharding.get_mesh()

  def place(path, x):
    name = parameter_name(path)
    spec = RULES.weight(name, x.ndim)
    sharding = SingleDeviceSharding(jax.devices()[0]) if mesh.empty else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(x.shape, _dtype(name, dtype), sharding=sharding)

  return jax.tree_util.tree_map_with_path(place, shapes)


def _dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
  return jnp.dtype(jnp.float32) if name == "scale_D" else dtype


@dataclasses.dataclass(frozen=True)
class _Run:
  """What one checkpoint of a run gives."""

  config: ModelConfig
  precision: PrecisionConfig
  model: Transformer
  vocab_size: int  # rows that the run's tokenizer can use
  tokenizer_fingerprint: str
  step: int
  path: Path

  def tokenizer(self, given: str | None) -> Tokenizer:
    found = read_tokenizer(given or str(self.path.parents[1] / "tokenizer.json"), "tokenizer")
    if given is None and found.fingerprint != self.tokenizer_fingerprint:
      raise UserError(
        f"the tokenizer.json of {self.path} is not the one that it was trained with (fingerprint"
        f" {found.fingerprint[:12]}, then {self.tokenizer_fingerprint[:12]}); restore it, or give one with --tokenizer"
      )
    found.require_rows(self.vocab_size, self.path)
    return found


def _newest_whole(path: Path, report: Callable[[str], None]) -> _Run:
  for candidate in _checkpoints(path):
    try:
      return _load(candidate)
    except checkpoint.DamagedError as error:
      report(f"checkpoint {candidate} is damaged ({error})")
  raise UserError(f"no checkpoint of {path} can be read; give another run, or restore one from a copy")


def _checkpoints(path: Path) -> Iterator[Path]:
  """Those that a path stands for, best first."""
  folder = path / "checkpoints"
  if steps := checkpoint.steps(folder):
    yield from (folder / str(step) for step in reversed(steps))
  elif path.name.isdigit() and path.is_dir():
    yield path
  else:
    raise UserError(
      f"{path} is no model: give the --workdir of a run that has a checkpoint, WORKDIR/checkpoints/STEP, or a folder"
      " in Hugging Face's format"
      if path.exists()
      else f"there is no {path}; give the folder of a run, WORKDIR/checkpoints/STEP, or a Hugging Face folder"
    )


def _load(path: Path) -> _Run:
  metadata: dict[str, Any] = checkpoint.read_metadata(path)
  if "dataset" in metadata and "tokenizer" not in metadata:
    raise UserError(f"checkpoint {path} is of a recommender, which has no text; give the run of a language model")
  if "vocab_size" not in metadata:
    raise UserError(
      f"checkpoint {path} is of a version that did not say which rows of the vocabulary are real; train again"
    )
  config = config_io.from_dict(LmConfig, metadata["config"])
  abstract = abstract_parameters(config.model, config.precision, jnp.dtype(jnp.float32))
  model = checkpoint.load(path, {"model": abstract})["model"]
  return _Run(
    config.model, config.precision, model, metadata["vocab_size"], metadata["tokenizer"], metadata["step"], path
  )


def _converted(model: Transformer, config: ModelConfig, precision: PrecisionConfig, dtype: jnp.dtype) -> Transformer:
  """The same parameters in another dtype, for another recipe, and without the padding rows of the vocabulary."""
  leaves = checkpoint.flatten(model)
  like = abstract_parameters(config, precision, dtype)
  for name, leaf in checkpoint.flatten(like).items():
    leaves[name] = leaves[name][: leaf.shape[0]].astype(leaf.dtype)  # only the vocabulary is longer than wanted
  return checkpoint.unflatten(like, leaves)
