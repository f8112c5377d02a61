"""Memory and time of importing a Hugging Face checkpoint: `python -m experiments.bench_convert --record=runs/bench`.

Writes random bf16 weights of one of the paper's shapes as a Hugging Face folder, imports it with
`experiments.convert_hf` in a process of its own, and reads that process's largest resident memory. Needs 10 bytes of
disk for each parameter. Writes a record and prints it as a table.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

from pallas_kernels import bench
from sparse_lm import flags as config_flags
from sparse_lm.benchmark import RECORD, record_cases
from sparse_lm.config import LmConfig
from sparse_lm.errors import UserError

flags.declare_key_flag("record")
_MODEL = flags.DEFINE_string("model", "paper_1_5b", "file of configs/lm")
_FILE_GB = flags.DEFINE_list("file_gb", ["5", "1"], "largest file of the checkpoint, a case each")
_SCRATCH = flags.DEFINE_string(
  "scratch", None, "folder for the checkpoints, deleted at the end; default: a temporary one"
)

Json = dict[str, Any]


def main(argv: list[str]) -> None:
  """Measures, records, prints."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  if not RECORD.value:
    raise UserError("--record is missing; name a new folder, such as --record=runs/bench_convert")
  asked = {name: flags.FLAGS[name].value for name in ("model", "file_gb")}
  record_cases(RECORD.value, asked, _cases(), table)


def _cases() -> Iterator[Json]:
  config = config_flags.load_config(f"configs/lm/{_MODEL.value}.py", LmConfig)
  for size in _FILE_GB.value:
    with tempfile.TemporaryDirectory(dir=_SCRATCH.value) as folder:
      yield _import(config, Path(folder), int(float(size) * 1e9))


def _import(config: LmConfig, folder: Path, file_bytes: int) -> Json:
  source, target_bytes = folder / "hf", _write_random(config, folder / "hf", file_bytes)
  command = [sys.executable, "-m", "experiments.convert_hf", f"--from_hf={source}", f"--workdir={folder / 'run'}"]
  start = time.perf_counter()
  process = subprocess.Popen(command)
  _, status, usage = os.wait4(process.pid, 0)  # of this process alone, whatever ran before
  if status:
    raise RuntimeError(f"{' '.join(command)} failed with status {status}")
  return {
    "model": _MODEL.value,
    "seconds": time.perf_counter() - start,
    "peak_bytes": 1024 * usage.ru_maxrss,
    "largest_file_bytes": max(path.stat().st_size for path in source.glob("*.safetensors")),
    "target_bytes": target_bytes,
  }


def _write_random(config: LmConfig, folder: Path, file_bytes: int) -> int:
  """Writes the folder; returns the bytes of its parameters in float32."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  from tokenizers import Tokenizer as Library
  from tokenizers import models

  from sparse_lm.data.tokenizer import EOS, Tokenizer
  from sparse_lm.hf import write_folder
  from sparse_lm.inference.opening import abstract_parameters

  rng = np.random.default_rng(0)
  abstract = abstract_parameters(config.model, config.precision, jnp.dtype(jnp.bfloat16))
  model = jax.tree.map(lambda x: (0.02 * rng.standard_normal(x.shape, np.float32)).astype(x.dtype), abstract)
  tokenizer = Tokenizer(Library(models.WordLevel({EOS: 0}, unk_token=EOS)).to_str(), name="of one word")
  write_folder(folder, model, config.model, tokenizer, dtype="bfloat16", file_bytes=file_bytes)
  return 4 * sum(leaf.size for leaf in jax.tree.leaves(model))


def table(cases: list[Json]) -> str:
  """Markdown of a record."""
  header = ["model", "largest file", "target arrays", "peak of the import", "allowed: 1.2 files + target", "seconds"]
  gb = lambda number: f"{number / 1e9:.2f} GB"
  rows = [
    [
      c["model"],
      gb(c["largest_file_bytes"]),
      gb(c["target_bytes"]),
      gb(c["peak_bytes"]),
      gb(1.2 * c["largest_file_bytes"] + c["target_bytes"]),
      f"{c['seconds']:.0f}",
    ]
    for c in cases
  ]
  return bench.markdown_table(header, rows)


if __name__ == "__main__":
  config_flags.run(main)
