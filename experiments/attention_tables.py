"""The tables of `experiments.bench_attention`: TFLOP/s of visible pairs beside those of cuDNN and XLA."""

from typing import Any

from pallas_kernels import bench

Json = dict[str, Any]
_BACKWARD = 2.5  # times the operations of the forward pass
_SAME_ROWS = "cudnn_padded", "cudnn_packed"  # forms in which cuDNN takes them


def table(found: list[Json]) -> str:
  """Returns Markdown of a record's cases."""
  header = ["case", "tokens, B x L", "forward TFLOP/s (ms)", "backward TFLOP/s (ms)", "of matmul", "cuDNN, padded"]
  header += ["packed", "cuDNN, equal rows", "XLA", "over the best of cuDNN", "imbalance", "schedule ms", "error"]
  rows = []
  for case in found:
    flop = _flop(case)
    ms = case["ms"]
    forward, backward = _rates(ms, "ours", flop)
    # Equal rows have pairs of their own.
    equal_flop = flop * _equal_pairs(case) / case["pairs"] if "cudnn_equal" in ms else flop
    rows.append(
      [
        case["name"],
        f"{case['tokens']}, {case['shape']['B']} x {case['shape']['L']}",
        f"{forward:.0f} ({ms['ours']['ms']:.3f})",
        f"{backward:.0f} ({_times(ms, 'ours')[1]:.3f})",
        f"{1e12 * forward / case['matmul_flop_per_s']:.0%}",
        *(_pair_of_rates(ms, form, flop) for form in _SAME_ROWS),
        _pair_of_rates(ms, "cudnn_equal", equal_flop),
        _pair_of_rates(ms, "xla", flop),
        _over_best(ms),
        f"{case['imbalance']:.2f}",
        f"{ms['schedule']['ms']:.3f}",
        f"{case['relative_error']:.1e}",
      ]
    )
  first = found[0]
  notes = (
    f"Ceilings in this run: bf16 matmul {1e-12 * first['matmul_flop_per_s']:.0f} TFLOP/s, copy"
    f" {1e-12 * first['copy_bytes_per_s']:.2f} TB/s (read + write). TFLOP/s of visible pairs; medians of"
    f" {first['samples']} queues of calls, which take turns. Imbalance, predicted: steps of the busiest SM over the"
    " mean."
  )
  return f"{bench.markdown_table(header, rows)}\n{notes}\n"


def summary(found: list[Json]) -> str:
  """Returns Markdown of our times beside cuDNN's on the same rows, a line a case: for README.md."""
  header = [
    "case",
    "tokens",
    "forward, TFLOP/s",
    "backward, TFLOP/s",
    "cuDNN, padded",
    "packed",
    "over the best",
    "error",
  ]
  rows = []
  for case in found:
    flop, ms = _flop(case), case["ms"]
    forward, backward = _rates(ms, "ours", flop)
    rows.append(
      [
        case["name"],
        f"{case['tokens']:,}",
        f"{ms['ours']['ms']:.2f} ms, {forward:.0f}",
        f"{_times(ms, 'ours')[1]:.2f} ms, {backward:.0f}",
        *(_pair_of_rates(ms, form, flop) for form in _SAME_ROWS),
        _over_best(ms),
        f"{case['relative_error']:.0e}",
      ]
    )
  return bench.markdown_table(header, rows)


def _flop(case: Json) -> float:
  """Of the forward pass."""
  return 4 * case["shape"]["H"] * case["shape"]["K"] * case["pairs"]


def _over_best(ms: Json) -> str:
  """Forward and backward, each against the faster form of cuDNN."""
  theirs = [_times(ms, form) for form in _SAME_ROWS if isinstance(ms.get(form), dict)]
  if not theirs:
    return "-"
  return " / ".join(f"{min(times) / ours:.2f}x" for ours, *times in zip(_times(ms, "ours"), *theirs, strict=True))


def _times(ms: Json, name: str) -> tuple[float, float]:
  """Milliseconds forward and backward."""
  forward = ms[name]["ms"]
  return forward, ms[f"{name}+grad"]["ms"] - forward


def _equal_pairs(case: Json) -> float:
  rows = case["shape"]["B"]
  length = max(8, round(case["tokens"] / rows / 8) * 8)
  return rows * length * ((length + 1) / 2 if case["options"].get("causal") else length)


def _rates(ms: Json, name: str, flop: float) -> tuple[float | None, float | None]:
  """TFLOP/s forward and backward."""
  if not isinstance(ms.get(name), dict):
    return None, None
  forward, backward = _times(ms, name)
  return 1e-9 * flop / forward, 1e-9 * _BACKWARD * flop / backward


def _pair_of_rates(ms: Json, name: str, flop: float) -> str:
  if isinstance(ms.get(name), str):
    return ms[name]
  rates = _rates(ms, name, flop)
  return "-" if rates[0] is None else " / ".join(f"{rate:.0f}" for rate in rates)
