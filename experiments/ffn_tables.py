"""The tables of `experiments.bench_ffn`: times of all cases, where dense is faster, and what trained layers do."""

from experiments import ffn_training
from experiments.ffn_measurement import DENSE_APART, ROUTES, TIMED, Json
from pallas_kernels import bench

_SORTED = " sorted"


def table(cases: list[Json]) -> str:
  """Returns Markdown of a record's cases."""
  training = [case for case in cases if "kept_bytes" in case]
  parts = [ffn_training.table(training)] if training else []
  if forward := [case for case in cases if "kept_bytes" not in case]:
    parts.append(_of_forward(forward))
  return "\n".join(parts)


def _of_forward(cases: list[Json]) -> str:
  parts = [_times(cases), "\n".join([*_slower(cases), *_apart(cases), _notes(cases[0])]) + "\n"]
  if trained := _trained(cases):
    parts.append(_of_trained(trained))
  return "\n".join(parts)


def summary(cases: list[Json]) -> str:
  """Returns Markdown of the routes alone, a line a case: for README.md."""
  header = [
    "case",
    "M, D x F",
    "non-zeros, mean (max)",
    "dense",
    "sparse",
    "auto",
    "auto took",
    "auto over dense",
    "error",
  ]
  rows = []
  for case in cases:
    ms, error = _medians(case), max(case["relative_error"].values())
    times = (f"{ms[what]:.{_digits(ms[what])}f} ms" for what in ("dense", *ROUTES))
    shape = f"{case['shape']['M']:,}, {case['shape']['D']} x {case['shape']['F']}"
    start = [case["name"], shape, f"{case['nonzeros_mean']:.1f} ({case['nonzeros_max']})"]
    rows.append([*start, *times, case["auto_took"], f"{ms['dense'] / ms['auto']:.2f}x", f"{error:.0e}"])
  return bench.markdown_table(header, rows)


def _trained(cases: list[Json]) -> list[tuple[Json, Json]]:
  """(as trained, pruned and sorted) of each layer; a run that died between them leaves one out."""
  by_name = {case["name"]: case for case in cases}
  return [
    (case, by_name[name + _SORTED])
    for name, case in by_name.items()
    if "dead_share" in case and name + _SORTED in by_name
  ]


def _times(cases: list[Json]) -> str:
  header = ["case", "M, D x F", "density asked", "non-zeros, mean (max)", "overflow rows", "auto took"]
  header += [f"{what} ms (p10 - p90)" for what in TIMED]
  header += ["sparse over dense", "auto over dense", "error", "floor of sparse"]
  rows = [_row(case) for case in cases]
  if trained := _trained(cases):
    rows += [_sum_row(layers) for layers in zip(*trained)]
  return bench.markdown_table(header, rows)


def _row(case: Json) -> list[str]:
  shape, ms, asked = case["shape"], _medians(case), case.get("activity")
  return [
    case["name"],
    f"{shape['M']}, {shape['D']} x {shape['F']}" + (f" ({case['hot']} hot)" if case["hot"] else ""),
    f"{100 * asked['density']:g} %" if asked else "-",
    f"{case['nonzeros_mean']:.1f} ({case['nonzeros_max']})",
    f"{case['overflow_rows']:g}",
    case["auto_took"],
    *(_milliseconds(case["ms"][what]) for what in TIMED),
    *_ratios_and_errors(ms, max(case["relative_error"].values()), case["floor_ms"]),
  ]


def _sum_row(layers: tuple[Json, ...]) -> list[str]:
  """Of medians."""
  ms = {what: sum(_medians(layer)[what] for layer in layers) for what in TIMED}
  suffix = _SORTED if layers[0]["name"].endswith(_SORTED) else ""
  taken = sorted({layer["auto_took"] for layer in layers})
  return [
    f"trained/sum of {len(layers)} layers{suffix}",
    "",
    "-",
    f"{sum(layer['nonzeros_mean'] for layer in layers):.1f} ({max(layer['nonzeros_max'] for layer in layers)})",
    f"{sum(layer['overflow_rows'] for layer in layers):g}",
    " and ".join(taken),
    *(f"{ms[what]:.{_digits(ms[what])}f}" for what in TIMED),
    *_ratios_and_errors(
      ms,
      max(max(layer["relative_error"].values()) for layer in layers),
      sum(layer["floor_ms"] for layer in layers),
    ),
  ]


def _ratios_and_errors(ms: dict[str, float], error: float, floor_ms: float) -> list[str]:
  ratios = [f"{ms['dense'] / ms[route]:.2f}x" for route in ROUTES]
  return [*ratios, f"{error:.1e}", f"{floor_ms:.3g} ms ({100 * floor_ms / ms['sparse']:.0f} %)"]


def _slower(cases: list[Json]) -> list[str]:
  """A sentence for each route: where dense is faster, and by how much."""
  said = []
  for route in ROUTES:
    ratios = {case["name"]: _medians(case)[route] / _medians(case)["dense"] for case in cases}
    slower = [f"{name} ({ratio:.2f}x the time)" for name, ratio in ratios.items() if ratio > 1]
    where = ": " + ", ".join(slower) if slower else ""
    said.append(f"{route} is slower than dense in {len(slower)} of {len(cases)} cases{where}.\n")
  return said


def _apart(cases: list[Json]) -> list[str]:
  many_blocks = [case for case in cases if DENSE_APART in case["ms"]]
  if not many_blocks:
    return []
  said = []
  for case in many_blocks:
    ms = _medians(case)
    ratios = ", ".join(f"{route} {ms[DENSE_APART] / ms[route]:.2f}x" for route in ROUTES)
    said.append(f"{case['name']} {_milliseconds(case['ms'][DENSE_APART])} ms ({ratios})")
  return [
    "Dense with its gate and up products kept apart (XLA may join small products that share x, and then copies both"
    f" weights in each call): {'; '.join(said)}.\n"
  ]


def _notes(case: Json) -> str:
  tera = {name: 1e-12 * case[name] for name in ("matmul_flop_per_s", "copy_bytes_per_s", "l2_bytes_per_s")}
  return (
    f"Ceilings in this run: bf16 matmul {tera['matmul_flop_per_s']:.0f} TFLOP/s, copy"
    f" {tera['copy_bytes_per_s']:.2f} TB/s (read + write); L2 is taken to give {tera['l2_bytes_per_s']:.1f} TB/s."
    f" Times are of one block, medians of {case['samples']} queues of calls, which take turns; a call of decode has"
    " many blocks. The weights of a sorted case are pruned for its dense block too."
  )


def _of_trained(layers: list[tuple[Json, Json]]) -> str:
  """What the layers of a trained model do, and what pruning and sorting them costs and gives."""
  header = ["layer", "non-zeros, mean (max)", "at first tokens", "dead", "neurons left", "hot", "share of non-zeros"]
  header += ["overflow rows, before", "after", "tokens that fire a pruned neuron", "error to the unpruned block"]
  header += ["best sorted over dense unpruned"]
  rows = []
  for before, after in layers:
    rows.append(
      [
        before["name"].removeprefix("trained/"),
        f"{before['nonzeros_mean']:.1f} ({before['nonzeros_max']})",
        f"{before['nonzeros_first']:.1f}",
        f"{100 * before['dead_share']:.1f} %",
        f"{after['neurons_before'] - after['neurons_pruned']} of {after['neurons_before']}",
        f"{after['hot']}",
        f"{100 * after['hot_share']:.1f} %",
        f"{before['overflow_rows']:g}",
        f"{after['overflow_rows']:g}",
        f"{after['tokens_firing_pruned']} of {after['shape']['M']}",
        f"{after['relative_error_to_unpruned']:.1e}",
        _best(before, after),
      ]
    )
  notes = (
    f"Dead: fired for none of the {layers[0][1]['tokens_counted']} tokens of the same text that were counted; those"
    " that are timed are others. An error to the unpruned block of 3e-03 is the rounding of any route.\n"
  )
  return f"{bench.markdown_table(header, rows)}\n{notes}"


def _best(before: Json, after: Json) -> str:
  ms = {what: time for what, time in _medians(after).items() if what in ("dense", *ROUTES)}
  best = min(ms, key=lambda what: ms[what])
  return f"{_medians(before)['dense'] / ms[best]:.2f}x ({best})"


def _medians(case: Json) -> dict[str, float]:
  return {what: timing["ms"] for what, timing in case["ms"].items()}


def _milliseconds(timing: bench.Timing) -> str:
  digits = _digits(timing["ms"])
  return f"{timing['ms']:.{digits}f} ({timing['ms_p10']:.{digits}f} - {timing['ms_p90']:.{digits}f})"


def _digits(ms: float) -> int:
  return 4 if ms < 0.1 else 3 if ms < 10 else 2
