"""Recommenders side by side on MovieLens-100K: `make demo-recsys`.

Trains each for some hundred steps, then SASRec and HSTU, which rank all items for a user's next one; prints and writes
WORKDIR/report.md with tables and plots. Stopped at any moment, the same command goes on where it was.
"""

import os
import time
from pathlib import Path

from absl import flags

from sparse_lm import config_io
from sparse_lm.flags import run_with_config
from sparse_lm.recsys_config import MODEL_KINDS, RecsysConfig

_RANKING_STEPS = 300  # a quarter of what configs/recsys/next_item.py takes

_WORKDIR = flags.DEFINE_string("workdir", "runs/demo_recsys", "folder of the report; each model has a folder in it")


def main(config: RecsysConfig) -> None:
  """Trains what is not trained yet, and reports."""
  from configs.recsys.movielens import tuned
  from configs.recsys.next_item import beside

  start, workdir = time.perf_counter(), Path(os.path.expanduser(_WORKDIR.value))
  configs = {kind: config_io.overlay(config, tuned(kind, config.data.split)) for kind in MODEL_KINDS}
  ranking = beside(config, _RANKING_STEPS)
  for variant in (*configs.values(), *ranking.values()):  # all of them before minutes go into the first
    variant.validate()
  from sparse_lm import figures, recsys_report, report  # seconds to import: a wrong flag is answered before
  from sparse_lm.data.recsys import open_samples
  from sparse_lm.training import next_item, recommender

  for n, (kind, variant) in enumerate((configs | ranking).items(), start=1):
    print(f"\n== {n} of {len(configs) + len(ranking)}: {kind} ==", flush=True)
    trainer = next_item if kind in ranking else recommender
    trainer.train(variant, workdir / kind)
  runs = {kind: report.read_run(workdir / kind) for kind in configs}
  floors = recsys_report.floors(open_samples(config, print))
  table = recsys_report.markdown_table(recsys_report.by_model(runs), floors)
  text = _report(runs, table, figures.image_links(figures.recommenders(runs, workdir)))
  if ranking:
    found = recsys_report.ranking_table({kind: report.read_run(workdir / kind) for kind in ranking})
    text += "\n# Which item comes next?\n\nThe last one of each user, among all items; ties count against a model.\n\n"
    text += found
  (workdir / "report.md").write_text(text)
  print(f"\n{text}\nwritten: {workdir / 'report.md'} (this run took {time.perf_counter() - start:.0f} s)")


def _report(runs, table: str, images: str) -> str:
  run = next(iter(runs.values()))
  data, env = run.config["data"], run.env
  return (
    f"# Which of the last events did their users like?\n\n"
    f"{data['source']}, split by {data['split']}, positive from {data['positive_from']:g}; {env['device']['kind']} with"
    f" {env['host_cores']} cores, jax {env['versions']['jax']}, {env['date'][:10]}. The first rows are sums of means,"
    " with nothing learnt. NE: log loss over that of the mean label, lower is better. Calibration: predicted over"
    " observed positives.\n\n"
    f"{table}\n{images}\n"
  )


if __name__ == "__main__":
  run_with_config(main, RecsysConfig, default="configs/recsys/movielens.py")
