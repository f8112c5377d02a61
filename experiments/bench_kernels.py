"""Kernels against their limits on this GPU: checks each against the reference, times it, writes a record and a table.

  python -m experiments.bench_kernels --record=runs/kernels

Beside every time stand the plain jnp reference (XLA) and two limits at the copy bandwidth measured in the same run:
`distinct`, every row that occurs read once, which no kernel can beat; and `traffic`, every occurrence read from memory,
which a kernel beats only as far as caches hold repeated rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from pallas_kernels import bench, device
from pallas_kernels.embedding import bag_hopper, reference, shapes
from sparse_lm.benchmark import RECORD, record_cases
from sparse_lm.errors import UserError
from sparse_lm.flags import run

flags.declare_key_flag("record")
_ONLY = flags.DEFINE_string("only", "", "Run only cases whose name contains this.")
_SWEEP = flags.DEFINE_bool("sweep", False, "Also time the Configs beside the default, for tuning.")


def configs_to_time(shape: shapes.BagShape, sweep: bool) -> list[bag_hopper.Config]:
  """Returns the default first."""
  default = bag_hopper.Config.for_width(shape.D, shape.dtype)
  if not sweep:
    return [default]
  pairs = [(default.block_d, rows) for rows in (2, 8, 12, 16)] + [(default.block_d // 2, 8), (default.block_d // 4, 8)]
  configs = [default]
  for block_d, rows_in_flight in pairs:
    try:
      configs.append(bag_hopper.Config(block_d=block_d, rows_in_flight=rows_in_flight))
    except ValueError:  # too many registers, or less than a warpgroup of columns
      continue
  return configs


def bytes_moved(shape: shapes.BagShape, ids: np.ndarray) -> dict[str, int]:
  """Returns bytes of device memory if each distinct row is read once, and if each occurrence is."""
  row = shape.D * jnp.dtype(shape.dtype).itemsize
  rest = 4 * (shape.T + shape.B + 1) + shape.B * row
  return {"distinct_bytes": rest + row * len(np.unique(ids)), "traffic_bytes": rest + row * shape.T}


def check(actual: jax.Array, expected: jax.Array, name: str) -> float:
  """Returns the relative error of the whole result, or raises."""
  difference = jnp.linalg.norm((actual - expected).astype(jnp.float32)) / jnp.linalg.norm(expected.astype(jnp.float32))
  limit = 2**-8 if actual.dtype == jnp.bfloat16 else 1e-5
  if not difference <= limit:  # also when it is NaN
    raise AssertionError(f"{name}: relative error {float(difference):.2e} against the reference, {limit:.0e} allowed")
  return float(difference)


def time_bag(
  name: str, shape: shapes.BagShape, limits: dict[str, float], *, sweep: bool, interpret: bool
) -> list[dict]:
  """Checks and times one shape; returns a case for each Config."""
  rng = np.random.default_rng(0)
  ids, offsets = shape.draw_ids(rng), shape.draw_offsets(rng)
  table_VD = jax.random.normal(jax.random.key(1), (shape.V, shape.D), shape.dtype)
  args = table_VD, jnp.asarray(ids), jnp.asarray(offsets), None
  xla = functools.partial(reference.bag, mode="sum")
  expected_BD = jax.jit(xla)(*args)
  moved = bytes_moved(shape, ids)
  common = {
    "op": "embedding.bag",
    "name": name,
    "shape": {"V": shape.V, "D": shape.D, "B": shape.B, "T": shape.T},
    "dtype": jnp.dtype(shape.dtype).name,
    "ids": "zipf(1.0)" if shape.zipf else "uniform",
    "longest_bag": int(np.diff(offsets).max()),
    "xla_ms": bench.device_time(xla, *args)["ms"],
    **moved,
    "distinct_ms": 1e3 * moved["distinct_bytes"] / limits["copy_bytes_per_s"],
    "traffic_ms": 1e3 * moved["traffic_bytes"] / limits["copy_bytes_per_s"],
    **limits,
  }
  cases = []
  for config in configs_to_time(shape, sweep):
    kernel = functools.partial(bag_hopper.bag, mode="sum", config=config, interpret=interpret)
    error = check(jax.jit(kernel)(*args), expected_BD, f"{name} {config}")
    chosen = {"block_d": config.block_d, "rows_in_flight": config.rows_in_flight}
    cases.append(common | {"config": chosen, "relative_error": error} | bench.device_time(kernel, *args))
  return cases


def table(cases: list[dict]) -> str:
  """Returns the Markdown table of a record's cases."""
  header = [
    "case",
    "V x D",
    "B, ids",
    "columns x rows",
    "ms (p10 - p90)",
    "TB/s",
    "XLA ms",
    "speed-up",
    "distinct",
    "traffic",
  ]
  rows = []
  for c in cases:
    shape, config, ms = c["shape"], c["config"], c["ms"]
    rows.append(
      [
        c["name"],
        f"{shape['V']} x {shape['D']}",
        f"{shape['B']}, {shape['T']} {c['ids']}",
        f"{config['block_d']} x {config['rows_in_flight']}",
        f"{ms:.3f} ({c['ms_p10']:.3f} - {c['ms_p90']:.3f})",
        f"{1e-9 * c['traffic_bytes'] / ms:.2f}",
        f"{c['xla_ms']:.3f}",
        f"{c['xla_ms'] / ms:.2f}x",
        f"{c['distinct_ms']:.3f} ms ({100 * c['distinct_ms'] / ms:.0f} %)",
        f"{c['traffic_ms']:.3f} ms ({100 * c['traffic_ms'] / ms:.0f} %)",
      ]
    )
  ceiling = (
    f"Ceilings in this run: copy {1e-12 * cases[0]['copy_bytes_per_s']:.2f} TB/s (read + write), bf16 matmul"
    f" {1e-12 * cases[0]['matmul_flop_per_s']:.0f} TFLOP/s.\n"
  )
  return f"{bench.markdown_table(header, rows)}\n{ceiling}"


def run_cases(folder: str, *, only: str = "", sweep: bool = False, interpret: bool = False) -> None:
  """Runs the cases whose name contains `only`, writes the record, and prints its table."""
  chosen = {name: shape for name, shape in shapes.BENCHMARK.items() if only in name}
  if not chosen:
    raise UserError(f"--only={only} is part of no case's name; the cases are {', '.join(shapes.BENCHMARK)}")

  def cases():
    limits = bench.ceilings()
    for name, shape in chosen.items():
      yield from time_bag(name, shape, limits, sweep=sweep, interpret=interpret)

  record_cases(folder, {"only": only, "sweep": sweep, "cases": list(chosen)}, cases(), table)


def main(argv: list[str]) -> None:
  """Runs on a Hopper GPU; on anything else a time would mean nothing, so there is none."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  if (reason := device.missing_hopper()) is not None:
    raise UserError(f"bench_kernels measures kernels for sm_90: {reason}; no times were taken")
  if not RECORD.value:
    raise UserError("--record is missing; name a new folder, such as --record=runs/bench_kernels")
  run_cases(RECORD.value, only=_ONLY.value, sweep=_SWEEP.value)


if __name__ == "__main__":
  run(main)
