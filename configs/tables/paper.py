"""What the files table*.py share: the paper's sizes, how their runs are made, and the speeds that have a benchmark.

The paper does not say how many GPUs its forward numbers come from, nor its number of repetitions; throughput times
energy gives 670 to 700 W, that is, one H100 SXM.
"""

from collections.abc import Callable

from sparse_lm.table_config import BenchmarkCase, NotBuilt, Number, RunMetric, Source, TaskScore, TrainedModel

HARDWARE = "H100"
ACCURACY = "mean accuracy of 7 tasks (%)"
CROSS_ENTROPY = "validation CE (nats a token)"
NON_ZEROS = "non-zeros a token (L0)"
FORWARD = "forward (tokens/ms)"
ENERGY = "forward (mJ/token)"
TRAINING = "training (tokens/ms)"
MEMORY = "training, peak memory (GB)"

# Name of the size, its file in configs/lm, and what eight GPUs of 80 GB need for a run.
SIZES = {
  "0.5B": ("paper_0_5b", "about 3 hours"),
  "1B": ("paper_1b", "about 11 hours"),
  "1.5B": ("paper_1_5b", "about a day"),
  "2B": ("paper_2b", "about two days"),
}
_MICRO_BATCH = 8  # sequences on a device
_LARGE_MICRO_BATCH = 32  # of the 2B model, fits with sparse blocks alone
_TRAINED = NotBuilt(missing="a benchmark of a trained model (the paper does not say how many non-zeros it has)")
SPARSE_NOTE = (
  "Our speeds of sparse models are of random weights whose gates let through as many neurons a token as the"
  " paper's 1.5B model has non-zeros (29, and 108 where it says so), not of trained ones."
)


def trained(run: str, size: str, *, sweep: str, gated: bool = True) -> TrainedModel:
  """Returns the run of that name in configs/sweeps/SWEEP.py, which sets the size too."""
  name, time = SIZES[size]
  return TrainedModel(
    name=run,
    config=f"configs/lm/{name}{'' if gated else '_nongated'}.py",
    command=(
      f"python -m experiments.sweep --config=configs/lm/paper_1_5b.py --sweep=configs/sweeps/{sweep}.py"
      f" --workdir=runs/{sweep}"
    ),
    needs=f"eight GPUs of 80 GB for {time}",
  )


def accuracy(paper: str) -> Number:
  return Number(ACCURACY, paper, TaskScore(path="mean_acc"))


def cross_entropy(paper: str) -> Number:
  return Number(CROSS_ENTROPY, paper, RunMetric(metric="validation_loss"))


def non_zeros(paper: str) -> Number:
  return Number(NON_ZEROS, paper, RunMetric(metric="validation_l0"))


def dense_case(size: str, metric: str) -> BenchmarkCase:
  """Returns a forward pass of the committed record of dense models."""
  return BenchmarkCase(
    record="experiments/records/bench_lm_dense",
    case={"model": SIZES[size][0], "what": "forward", "sequences": 64},
    metric=metric,
    command="python -m experiments.bench_lm --what=dense --record=runs/bench_lm_dense",
    needs="one GPU of 80 GB",
  )


def nongated_case(metric: str) -> BenchmarkCase:
  """Returns a case of the record of the non-gated 1.5B model."""
  return BenchmarkCase(
    record="experiments/records/bench_lm_nongated",
    case={"model": "paper_1_5b_nongated", "what": "forward"},
    metric=metric,
    command=(
      "python -m experiments.bench_lm --what=dense --models=paper_1_5b_nongated --record=runs/bench_lm_nongated"
    ),
    needs="one GPU of 80 GB",
  )


def forward(case: Callable[[str], BenchmarkCase], tokens_per_ms: str, energy: str) -> tuple[Number, Number]:
  """Returns both numbers of a dense forward pass; `case` gives the source of a metric."""
  return (
    Number(FORWARD, tokens_per_ms, case("tokens_per_ms")),
    Number(ENERGY, energy, case("millijoules_per_token")),
  )


def dense_forward(size: str, tokens_per_ms: str, energy: str) -> tuple[Number, Number]:
  return forward(lambda metric: dense_case(size, metric), tokens_per_ms, energy)


def sparse_forward(
  size: str, non_zeros: int | None, tokens_per_ms: str, change: str, energy: str, energy_change: str
) -> tuple[Number, Number]:
  """Returns both numbers of a gated model with so many non-zeros a token; None: the paper does not say."""

  def source(metric: str) -> Source:
    return _TRAINED if non_zeros is None else _sparse_case(size, non_zeros, metric)

  return (
    Number(FORWARD, tokens_per_ms, source("tokens_per_ms"), change),
    Number(ENERGY, energy, source("millijoules_per_token"), energy_change),
  )


def _sparse_case(size: str, non_zeros: int, metric: str) -> BenchmarkCase:
  return BenchmarkCase(
    record="experiments/records/bench_lm_sparse",
    case={"model": SIZES[size][0], "what": "forward", "ffn": "twell", "non_zeros": non_zeros},
    metric=metric,
    command="python -m experiments.bench_lm --what=sparse --non_zeros=29,108 --record=runs/bench_lm_sparse",
    needs="one GPU of 80 GB",
  )


def training(size: str, ffn: str, tokens_per_ms: str, memory: str) -> tuple[Number, Number]:
  """Returns speed and memory of an AdamW step with "dense" or "twell" blocks; changes follow the paper's numbers."""
  large = (size, ffn) == ("2B", "twell")
  sequences = _LARGE_MICRO_BATCH if large else _MICRO_BATCH
  options = f" --models={SIZES[size][0]} --train_batch={sequences}" if large else ""
  folder = "bench_lm_training_batch" if large else "bench_lm_training"

  def number(quantity: str, paper: str, metric: str, scale: float = 1.0) -> Number:
    value, change = paper.split() if " " in paper else (paper, None)
    source = BenchmarkCase(
      record=f"experiments/records/{folder}",
      case={"model": SIZES[size][0], "ffn": ffn, "sequences": sequences, "remat": "dots_and_attention"},
      metric=metric,
      scale=scale,
      command=f"python -m experiments.bench_lm --what=training{options} --record=runs/{folder}",
      needs="one GPU of 140 GB",
    )
    return Number(quantity, value, source, change)

  return number(TRAINING, tokens_per_ms, "tokens_per_ms"), number(MEMORY, memory, "peak_bytes", scale=1e-9)
