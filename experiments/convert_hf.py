"""Hugging Face checkpoints in and out.

python -m experiments.convert_hf --from_hf=FOLDER --workdir=runs/llama   makes a run's folder of plain Llama or of the
paper's published sparse models; python -m experiments.convert_hf --to_hf=FOLDER --workdir=runs/mine makes a folder
that transformers loads.
"""

from pathlib import Path

from absl import flags

from sparse_lm.errors import UserError
from sparse_lm.flags import run

_FROM = flags.DEFINE_string("from_hf", None, "folder to import: config.json, *.safetensors, tokenizer.json")
_TO = flags.DEFINE_string("to_hf", None, "new folder to export to")
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "the run: new for an import; WORKDIR or WORKDIR/checkpoints/STEP to export"
)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "import: a tokenizer.json, if the folder has none")
_FSDP = flags.DEFINE_integer("fsdp", 1, "import: devices that share each weight", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "export: of the weights")


def main(argv: list[str]) -> None:
  """Converts in one direction."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  if (_FROM.value is None) == (_TO.value is None):
    raise UserError("give one of --from_hf=FOLDER (import) and --to_hf=FOLDER (export)")
  for name in ("dtype",) if _TO.value is None else ("tokenizer", "fsdp"):
    if not flags.FLAGS[name].using_default_value:
      raise UserError(f"--{name} has no effect in this direction; leave it out")
  if not _WORKDIR.value:
    raise UserError("--workdir is missing; name the run's folder, such as --workdir=runs/mine")
  from sparse_lm.hf import convert  # seconds to import: a wrong flag is answered before

  if _FROM.value is not None:
    path = convert.import_folder(Path(_FROM.value), Path(_WORKDIR.value), tokenizer=_TOKENIZER.value, fsdp=_FSDP.value)
    print(f"written: {path}; to train from it: --config.checkpoint.restore_path={path}")
  else:
    convert.export_run(Path(_WORKDIR.value), Path(_TO.value), dtype=_DTYPE.value)
    print(f"written: {_TO.value}")


if __name__ == "__main__":
  run(main)
