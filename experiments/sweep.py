"""Trains variants of a config one after the other, each in its own process and folder.

python -m experiments.sweep --config=configs/lm/tiny.py --sweep=configs/sweeps/table4_tiny.py --workdir=runs/table4_tiny

A sweep file defines get_sweep(), which returns a dict: name of the run -> {"model.num_layers": 2, ...}. Its runs, of
language models or of recommenders, go to WORKDIR/NAME; --config.field=value holds for all of them. The same command
goes on where it was stopped, passes over runs that are finished, and tries again those that failed. --dry_run prints
the commands, one a line; --index=i runs one of them, for an array of jobs. The environment variable
JAX_COMPILATION_CACHE_DIR lets runs of one shape share programs.
"""

import os
import shlex
import sys
from pathlib import Path

from absl import flags

from sparse_lm import sweeps
from sparse_lm.config import LmConfig
from sparse_lm.errors import UserError
from sparse_lm.flags import as_flags, load_sweep, overrides, run_with_config
from sparse_lm.recsys_config import RecsysConfig

_SWEEP = flags.DEFINE_string("sweep", None, "Python file with get_sweep(), see configs/sweeps/")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the sweep; each run has a folder of its own in it")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "print the command of each run, finished ones too, and run nothing")
_INDEX = flags.DEFINE_integer("index", None, "run only this one, counted from 0; all unless given")

_TRAINERS = {LmConfig: "train_lm", RecsysConfig: "train_recsys"}


def main(config: LmConfig | RecsysConfig) -> None:
  """Checks all runs, then runs them."""
  if not _SWEEP.value:
    raise UserError("--sweep is missing; name a file, such as --sweep=configs/sweeps/table4_tiny.py")
  if not _WORKDIR.value:
    raise UserError("--workdir is missing; name a folder for the runs, such as --workdir=runs/table4_tiny")
  sweep, given = load_sweep(_SWEEP.value), overrides()
  try:
    configs = sweeps.configs(config, sweep, given)
  except UserError as error:
    raise UserError(f"--sweep={_SWEEP.value}: {error}") from None
  workdir = Path(os.path.expanduser(_WORKDIR.value))
  runs = []
  for n, (name, variant) in enumerate(configs.items(), start=1):
    command = [sys.executable, "-m", f"experiments.{_TRAINERS[type(config)]}", f"--config={flags.FLAGS.config}"]
    command += [*as_flags(variant, [*given, *sweep[name]]), f"--workdir={workdir / name}"]
    runs.append(sweeps.Run(f"{n} of {len(configs)}: {name}", variant, workdir / name, command))
  if _INDEX.value is not None:
    if not 0 <= _INDEX.value < len(runs):
      raise UserError(f"--index={_INDEX.value}: {_SWEEP.value} has {len(runs)} runs; give 0 to {len(runs) - 1}")
    runs = [runs[_INDEX.value]]
  if _DRY_RUN.value:
    print("\n".join(shlex.join(run.command) for run in runs))
  else:
    sweeps.run_in_turn(runs)


if __name__ == "__main__":
  run_with_config(main, tuple(_TRAINERS), builds_models=False)
