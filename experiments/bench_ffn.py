"""Speed of TwELL feed-forward blocks, on a GPU: the dense block, the sparse and the automatic route, and their parts.

python -m experiments.bench_ffn --what=inference --record=runs/ffn
python -m experiments.bench_ffn --what=trained --model=runs/wide --text=held_out.txt --record=runs/ffn_trained

inference: inputs of a known density (`pallas_kernels/twell/shapes.py`). training: forward and backward of such inputs.
trained: the layers of a trained model on text, as they are, and pruned and sorted. `experiments/ffn_measurement.py` and
`ffn_training.py` say what is compared, and how it is timed.

Dimension key: M tokens, D model width.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Iterator

import jax
from absl import flags

from experiments import ffn_measurement as measurement
from experiments import ffn_training
from experiments.ffn_measurement import Json, Problem
from experiments.ffn_tables import table
from pallas_kernels import device
from pallas_kernels.twell import routing, shapes
from pallas_kernels.twell.shapes import Activity, FfnShape
from sparse_lm.benchmark import RECORD, cases_flag, choose, record_cases
from sparse_lm.errors import UserError
from sparse_lm.flags import run

flags.declare_key_flag("record")
_CASES = cases_flag()  # of drawn inputs, such as density,pattern/trained
_WHAT = flags.DEFINE_list("what", None, "what to measure: inference, training, trained")
_MODEL = flags.DEFINE_string("model", None, "trained: folder of a run, WORKDIR/checkpoints/STEP, or a HF folder")
_TEXT = flags.DEFINE_string("text", None, "trained: file, folder or glob of .txt, .jsonl, .parquet, or several")
_TOKENS = flags.DEFINE_integer(
  "tokens", 131072, "trained: of --text that are timed, at most; as many others are counted", lower_bound=1
)
_REPEATS = flags.DEFINE_integer("repeats", 9, "samples of a time, of which the median counts", lower_bound=1)

_KINDS = ("inference", "training", "trained")
_DECODE_LAYERS = 8  # of weights, ten times what L2 holds, so that each is read from memory
_DECODE_ROUNDS = 8  # a call of 64 blocks is long beside its dispatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One row of the table."""

  shape: FfnShape
  activity: Activity
  sort: bool = False  # drop neurons that never fire, and bring those that fire most to the front
  layers: int = 1  # with weights of their own, one after another
  rounds: int = 1  # of all layers in a call
  training: bool = False  # forward and backward


def main(argv: list[str]) -> None:
  """Runs on a Hopper GPU; on anything else a time would mean nothing, so there is none."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  cases = _asked_cases()
  if (reason := device.missing_hopper()) is not None:
    raise UserError(f"bench_ffn measures kernels for sm_90: {reason}; no times were taken")
  asked = {name: flags.FLAGS[name].value for name in ("what", "repeats", "model", "text", "tokens")}
  found = measure(cases, samples=_REPEATS.value) if cases else iter(())
  if "trained" in _WHAT.value:
    from experiments import ffn_trained  # seconds to import: a wrong flag is answered before

    text = ffn_trained.read(_MODEL.value, _TEXT.value, _TOKENS.value)
    found = itertools.chain(found, ffn_trained.measure(text, samples=_REPEATS.value))
  record_cases(RECORD.value, asked | {"cases": list(cases)}, found, table)


def _asked_cases() -> dict[str, Case]:
  """Returns the cases of drawn inputs, none for trained ones alone; refuses flags that do not fit together."""
  if not _WHAT.value or not RECORD.value:
    raise UserError(
      f"--what={', '.join(_KINDS)} (one or several) and --record=FOLDER are needed; name a new folder, such as"
      " --record=runs/ffn"
    )
  if bad := [what for what in _WHAT.value if what not in _KINDS]:
    raise UserError(f"--what={bad[0]!r} is none of {', '.join(_KINDS)}")
  if "trained" in _WHAT.value and not (_MODEL.value and _TEXT.value):
    raise UserError("--what=trained needs --model=RUN_FOLDER and --text=FILES")
  flags_of = {("inference", "training"): ("cases",), ("trained",): ("model", "text", "tokens")}
  for kinds, names in flags_of.items():
    for name in names:
      if not set(kinds) & set(_WHAT.value) and flags.FLAGS[name].present:
        raise UserError(f"--{name} has no effect without --what={' or '.join(kinds)}; leave it out")
  drawn = {"inference": inference_cases, "training": training_cases}
  cases = {name: case for what, make in drawn.items() if what in _WHAT.value for name, case in make().items()}
  return choose(cases, _CASES.value) if cases else {}


def inference_cases() -> dict[str, Case]:
  """Returns the cases by name."""
  paper = shapes.BENCHMARK["paper"]
  uniform = lambda shape, percent: Case(shape=shape, activity=Activity(density=percent / 100))
  with_pattern = lambda **pattern: Case(shape=paper, activity=Activity(density=0.005, **pattern))
  cases = {}
  for shape in (paper, shapes.BENCHMARK["paper_short"]):
    for percent in (0, 0.1, 0.5, 1, 2, 3, 5, 10, 50, 100):
      cases[f"density/M={shape.M} {percent}%"] = uniform(shape, percent)
  cases["pattern/misleading"] = with_pattern(pattern="misleading")
  to_sort = {"pattern/trained": with_pattern(pattern="trained")}
  to_sort |= {f"zipf/s={s}": with_pattern(pattern="zipf", exponent=s) for s in (1.0, 0.7)}
  for name, case in to_sort.items():
    cases |= {name: case, f"{name} sorted": dataclasses.replace(case, sort=True)}
  for size, percent in (("nongated", 0.5), ("wide", 0.5), ("wide", 1), ("narrow", 0.5), ("narrow", 1)):
    cases[f"shape/{size} {percent}%"] = uniform(shapes.BENCHMARK[size], percent)
  decoding = dict(layers=_DECODE_LAYERS, rounds=_DECODE_ROUNDS)
  for size in ("decode_1", "decode_8", "decode_64"):
    shape = shapes.BENCHMARK[size]
    for percent in (0.5, 5, 50):
      cases[f"decode/M={shape.M} {percent}%"] = dataclasses.replace(uniform(shape, percent), **decoding)
  return cases


def training_cases() -> dict[str, Case]:
  """Returns the cases by name."""
  short = shapes.BENCHMARK["paper_short"]
  nongated = dataclasses.replace(shapes.BENCHMARK["nongated"], M=short.M)
  case = lambda shape, **activity: Case(shape=shape, activity=Activity(**activity), training=True)
  cases = {f"training/{percent}%": case(short, density=percent / 100) for percent in (0, 0.1, 0.5, 1, 2, 5, 50)}
  cases["training/trained"] = case(short, density=0.005, pattern="trained")
  return cases | {"training/nongated 0.5%": case(nongated, density=0.005)}


def measure(cases: dict[str, Case], *, samples: int) -> Iterator[Json]:
  """Yields what was found of each case.

  Raises:
    AssertionError: a route is wrong; it gets no time.
  """
  rates = measurement.limits()
  for name, case in cases.items():
    # The same inputs, whatever else is measured.
    problem, facts = prepare(case, jax.random.key(zlib.crc32(name.encode()))), {}
    if case.sort:
      problem, facts = _sorted(name, problem)
    measured = ffn_training.measured if case.training else measurement.measured
    found = measured(name, problem, rates, samples=samples)
    yield found | {"activity": dataclasses.asdict(case.activity)} | facts


def prepare(case: Case, key: jax.Array) -> Problem:
  """Draws the inputs of a case, in no order of neurons."""
  sampled_S = routing.sample_rows(case.shape.M) if case.activity.pattern == "misleading" else None
  inputs = [shapes.draw(k, case.shape, case.activity, sampled_S=sampled_S) for k in jax.random.split(key, case.layers)]
  return Problem(inputs[0].x_MD, [weights for _, weights in inputs], rounds=case.rounds)


def _sorted(name: str, problem: Problem) -> tuple[Problem, Json]:
  """Counts on the very tokens that are timed: nothing that fires is left out, and y has to be the same."""
  x_MD, (weights,) = problem.x_MD, problem.layers
  counts_F = measurement.count(x_MD, weights.firing_FD, problem.cold_F).tokens_F
  sorted_problem = measurement.pruned_and_sorted(x_MD, weights, counts_F, len(x_MD))
  return sorted_problem, measurement.pruning(name, sorted_problem, weights, counts_F, len(x_MD))


if __name__ == "__main__":
  run(main)
