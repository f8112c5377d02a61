"""Recommenders side by side, from the folder of a sweep: `python -m experiments.report_recsys --workdir=runs/NAME`.

Writes WORKDIR/report.md, a table with 95 % intervals over seeds, its plots, and floors.json: what sums of means get on
the same test events. All runs must have the same data and split.
"""

import os
from pathlib import Path

from absl import flags

from sparse_lm.errors import UserError
from sparse_lm.flags import run

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of a sweep over configs of recommenders")


def main(argv: list[str]) -> None:
  """Reads, judges the floors, writes, prints."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  if not _WORKDIR.value:
    raise UserError("--workdir is missing; name the folder of a sweep, such as --workdir=runs/movielens_time")
  from sparse_lm import config_io, figures, recsys_report, report  # seconds to import: a wrong flag is answered before
  from sparse_lm.data.recsys import open_samples
  from sparse_lm.recsys_config import RecsysConfig

  workdir = Path(os.path.expanduser(_WORKDIR.value))
  runs = report.read_runs(workdir)
  models = recsys_report.by_model(runs)
  data = {name: run.config["data"] for name, run in runs.items()}
  first = next(iter(data))
  if differs := [name for name in data if data[name] != data[first]]:
    raise UserError(f"runs {first!r} and {differs[0]!r} have other data or another split; report them apart")
  floors = recsys_report.floors(open_samples(config_io.from_dict(RecsysConfig, runs[first].config), print))
  recsys_report.write_floors(floors, workdir)
  table = recsys_report.markdown_table(models, floors)
  plots = figures.recommenders({kind: group[0] for kind, group in models.items()}, workdir)
  (workdir / "report.md").write_text(f"{table}\n{figures.image_links(plots)}\n")
  print(f"\n{table}\nwritten: {workdir / 'report.md'}")


if __name__ == "__main__":
  run(main)
