"""Between a Hugging Face folder and the folder of a run: what `experiments/convert_hf.py` does.

An imported model is a run's folder with the one checkpoint `checkpoints/0`, which holds parameters and nothing else:
it can be evaluated, sampled from, exported again, and be what `checkpoint.restore_path` starts a training from.
"""

import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from sparse_lm import config_io
from sparse_lm.config import LmConfig, ParallelConfig, PrecisionConfig
from sparse_lm.errors import UserError
from sparse_lm.hf.read import HfFolder
from sparse_lm.hf.write import require_new, write_folder
from sparse_lm.inference.opening import abstract_parameters, open_model
from sparse_lm.parallel.mesh import make_mesh
from sparse_lm.training import checkpoint, recorder

Report = Callable[[str], None]


def import_folder(
  folder: Path, workdir: Path, *, tokenizer: str | None = None, fsdp: int = 1, report: Report = print
) -> Path:
  """Makes a run's folder of a Hugging Face folder; returns the checkpoint.

  Args:
    folder: config.json and .safetensors files.
    workdir: new, or empty.
    tokenizer: a tokenizer.json; None: the one in `folder`.
    fsdp: devices that share each weight while it is converted; the checkpoint restores on any number.
    report: takes one line.

  Raises:
    UserError: the folder cannot be read or is no model of ours, or the work folder is in use.
    SaveError: the checkpoint could not be written.
  """
  folder, workdir = Path(os.path.expanduser(folder)), Path(os.path.expanduser(workdir))
  source = HfFolder(folder)
  found = source.tokenizer(tokenizer)
  config = LmConfig(model=source.config, precision=source.precision, parallel=ParallelConfig(data=1, fsdp=fsdp))
  config.training.batch_size = fsdp  # no training; the mesh asks that a batch could be split
  mesh = make_mesh(config)
  with recorder.lock(workdir):
    # What an import that was killed has left is neither, and is done again.
    if checkpoint.steps(workdir / "checkpoints") or (workdir / "metrics.jsonl").exists():
      raise UserError(f"work folder {workdir} already holds a run; give another --workdir")
    report(f"reading {folder}: {_description(config)}")
    with jax.set_mesh(mesh):
      model = source.load(abstract_parameters(config.model, PrecisionConfig("fp32"), jnp.dtype(jnp.float32)))
    values = config_io.to_dict(LmConfig(model=source.config, precision=source.precision))
    recorder.write_json(workdir / "config.json", values)
    recorder.write_json(workdir / "env.json", recorder.environment())
    recorder.write_text(workdir / "tokenizer.json", found.json_text)
    saver = checkpoint.Saver(workdir / "checkpoints", keep=1)
    metadata = {"config": values, "tokenizer": found.fingerprint, "dataset": None, "step": 0}
    saver.save(0, {"model": model}, metadata | {"vocab_size": source.config.vocab_size})
    saver.wait()
  return workdir / "checkpoints" / "0"


def export_run(path: Path, folder: Path, *, dtype: str = "float32", report: Report = print) -> None:
  """Writes a run's model as a folder that `transformers` loads.

  Args:
    path: WORKDIR or WORKDIR/checkpoints/STEP.
    folder: new, or empty.
    dtype: of the weights, as in `write_folder`.
    report: takes one line.

  Raises:
    UserError: as `open_model` and `write_folder`.
    SaveError: it could not be written.
  """
  folder = Path(os.path.expanduser(folder))
  require_new(folder)  # before minutes go into reading the checkpoint
  opened = open_model(path, dtype=jnp.dtype(jnp.float32), report=report)
  report(f"writing {opened.path} to {folder} in {dtype}")
  write_folder(folder, opened.model, opened.config, opened.tokenizer, dtype=dtype)


def _description(config: LmConfig) -> str:
  model = config.model
  return (
    f"{model.num_layers} layers of width {model.model_width}, {model.num_heads} heads of which {model.kv_heads} have"
    f" keys and values, {model.ffn_width} neurons ({model.ffn_kind}), {model.vocab_size} tokens,"
    f" rope_theta {model.rope_theta:g}"
  )
