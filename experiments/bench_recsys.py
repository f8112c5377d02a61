"""Speed of the GEM-style model: `python -m experiments.bench_recsys --what=modules` or `ladder`, on a GPU.

modules: each module of a block alone, forward and with gradients, and the share of the peak that it reaches (its local
MFU); the model's is their mean, weighted by operations. ladder: samples a second of the whole training step (lookups,
model, AdamW, update of the tables), from attention on padded rows to everything that makes it faster, one step at a
time. Operations are those that are of use: visible pairs, events that exist, nothing that is computed again; the
backward pass counts twice the forward. Writes a record and prints it as a table.
"""

from typing import Any

from absl import flags

from experiments import recsys_ladder, recsys_modules
from experiments.recsys_problem import TableSizes
from pallas_kernels import device
from sparse_lm.benchmark import RECORD, cases_flag, choose, record_cases
from sparse_lm.errors import UserError
from sparse_lm.flags import load_config, run
from sparse_lm.recsys_config import RecsysConfig

flags.declare_key_flag("record")
_WHAT = flags.DEFINE_enum("what", None, ["modules", "ladder"], "what to measure")
_CASES = cases_flag()
_CALLS = flags.DEFINE_integer("calls", 5, "ladder: steps of a queue, waited for once", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "ladder: queues, of which the median counts", lower_bound=1)

_CONFIG = "configs/recsys/bench.py"


def main(argv: list[str]) -> None:
  """Measures, records, prints."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  if _WHAT.value is None or RECORD.value is None:
    raise UserError(
      "--what=modules|ladder and --record=FOLDER are needed; for example --what=ladder --record=runs/bench_recsys"
    )
  config, sizes = load_config(_CONFIG, RecsysConfig), TableSizes.of()
  of_modules = _WHAT.value == "modules"
  names: dict[str, Any] = dict.fromkeys(recsys_modules.PARTS) if of_modules else recsys_ladder.rungs()
  chosen = list(choose(names, _CASES.value))
  if (reason := device.missing_hopper()) is not None:
    raise UserError(f"bench_recsys measures kernels for sm_90: {reason}; no times were taken")
  asked = {"what": _WHAT.value, "cases": chosen, "calls": _CALLS.value, "repeats": _REPEATS.value}
  if of_modules:
    record_cases(RECORD.value, asked, recsys_modules.time_modules(config, sizes, chosen), recsys_modules.table)
  else:
    cases = recsys_ladder.time_ladder(config, sizes, chosen, calls=_CALLS.value, repeats=_REPEATS.value)
    record_cases(RECORD.value, asked, cases, recsys_ladder.table)


if __name__ == "__main__":
  run(main)
