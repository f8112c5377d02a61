"""A dense model, two sparse ones, and one without feed-forward blocks, side by side: `make demo`.

Trains each for some hundred steps on real English text, then prints and writes WORKDIR/report.md with a table and
plots. Stopped at any moment, the same command goes on where it was.
"""

import os
import time
from pathlib import Path

from absl import flags

from sparse_lm import config_io
from sparse_lm.config import LmConfig
from sparse_lm.errors import UserError
from sparse_lm.flags import run_with_config

_WORKDIR = flags.DEFINE_string("workdir", "runs/demo", "folder of the report; each model has a folder of its own in it")

# What is said of a model in the report, and what differs from the config.
_DENSE = {"sparsity.l1_coefficient": 0.0, "sparsity.target_l0": None, "sparsity.reinit_rate": 0.0}
VARIANTS = {
  "dense": _DENSE,
  "sparse": {"sparsity.l1_coefficient": 1e-3},
  "sparser": {"sparsity.l1_coefficient": 1e-3, "sparsity.target_l0": 20.0},
  "no FFN": _DENSE | {"model.ffn_kind": "none"},
}


def main(config: LmConfig) -> None:
  """Trains what is not trained yet, and reports."""
  start, workdir = time.perf_counter(), Path(os.path.expanduser(_WORKDIR.value))
  configs = {name: config_io.overlay(config, changes) for name, changes in VARIANTS.items()}
  for variant in configs.values():  # all of them before minutes go into the first
    variant.validate()
  if config.data.validation_fraction == 0:
    raise UserError("data.validation_fraction=0 leaves nothing to compare the models on; give a share above 0")
  import jax  # seconds to import: a wrong flag is answered before

  from sparse_lm import figures, report
  from sparse_lm.training.language_model import train

  # Models that differ in their L1 coefficient alone share one program.
  jax.config.update("jax_compilation_cache_dir", str(workdir / "compiled"))
  folders = {name: workdir / name.replace(" ", "_") for name in VARIANTS}
  for n, (name, variant) in enumerate(configs.items(), start=1):
    print(f"\n== {n} of {len(configs)}: {name} ==", flush=True)
    train(variant, folders[name])
  runs = {name: report.read_run(folder) for name, folder in folders.items()}
  table = report.markdown_table(runs, baseline="dense")
  plots = figures.comparison(runs, workdir)
  text = _report(runs, table, figures.image_links(plots))
  (workdir / "report.md").write_text(text)
  print(f"\n{text}\nwritten: {workdir / 'report.md'} (this run took {time.perf_counter() - start:.0f} s)")


def _report(runs, table: str, images: str) -> str:
  dense = runs["dense"]
  return (
    f"# What sparsity costs, and what the feed-forward blocks are worth\n\n"
    f"{dense.last['step']} steps on {dense.config['data']['source']}, {dense.env['device']['kind']}"
    f" with {dense.env['host_cores']} cores, jax {dense.env['versions']['jax']}, {dense.env['date'][:10]}.\n"
    "Zero activations: share of hidden units that ReLU switches off, on held-out documents. Dead neurons: those that no"
    " token of the last training step switched on. The sparser model's L1 coefficient is steered to"
    f" {runs['sparser'].config['sparsity']['target_l0']:g} non-zeros a token (sparsity.target_l0).\n\n"
    f"{table}\n{images}\n"
  )


if __name__ == "__main__":
  run_with_config(main, LmConfig, default="configs/lm/tiny.py")
