"""The benchmark frame, rehearsed on CPU: what it writes, what it refuses. Times mean nothing here."""

import json
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench_kernels
from pallas_kernels import bench, device
from pallas_kernels.embedding import bag_hopper, shapes
from sparse_lm.errors import UserError


@pytest.fixture
def rehearsal(monkeypatch):
  """Replaces what would take minutes on a CPU: the shapes, and every measurement."""
  timing = {"ms": 0.5, "ms_p10": 0.4, "ms_p90": 0.6}
  monkeypatch.setattr(shapes, "BENCHMARK", {"tiny": shapes.TEST["one_block"]})
  monkeypatch.setattr(bench, "ceilings", lambda: {"copy_bytes_per_s": 4e12, "matmul_flop_per_s": 7e14})
  monkeypatch.setattr(bench, "device_time", lambda function, *args: timing)


def test_a_run_leaves_a_record_and_its_table(tmp_path, rehearsal, capsys):
  bench_kernels.run_cases(str(tmp_path / "record"), interpret=True)
  assert {p.name for p in (tmp_path / "record").iterdir()} == {"config.json", "env.json", "metrics.jsonl", "table.md"}
  (case,) = bench.load_cases(tmp_path / "record")
  assert case["relative_error"] < 1e-5
  assert json.loads((tmp_path / "record" / "env.json").read_text())["device"]["kind"]
  text = (tmp_path / "record" / "table.md").read_text()
  assert text == bench_kernels.table([case])
  assert capsys.readouterr().out == f"{text}\n"


def test_a_record_is_not_overwritten(tmp_path):
  bench.Record(tmp_path, {}).add({"name": "first"})
  with pytest.raises(FileExistsError, match=r"already holds config\.json; name another folder"):
    bench.Record(tmp_path, {})
  assert bench.load_cases(tmp_path) == [{"name": "first"}]


@pytest.mark.parametrize("name", bench.RECORD_FILES)
def test_a_file_of_something_else_is_not_overwritten(tmp_path, name):
  (tmp_path / name).write_text("of a model, say")
  with pytest.raises(FileExistsError, match=f"already holds {re.escape(name)}; name another folder"):
    bench.Record(tmp_path, {})
  assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "of a model, say")]


def test_a_record_without_a_case_is_begun_anew(tmp_path):
  bench.Record(tmp_path, {"calls": 1})
  bench.Record(tmp_path, {"calls": 2})
  assert json.loads((tmp_path / "config.json").read_text()) == {"calls": 2}


@pytest.mark.parametrize(
  ("folder", "why"),
  [
    ("file", "File exists; name a folder that can be written"),
    ("file/record", "Not a directory; name a folder that can be written"),
    ("held", "{}/held already holds config.json; name another folder, records are not overwritten"),
  ],
)
def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_measured(tmp_path, monkeypatch, folder, why):
  monkeypatch.setattr(bench, "ceilings", lambda: pytest.fail("measured"))
  (tmp_path / "file").write_text("kept")
  (tmp_path / "held").mkdir()
  (tmp_path / "held" / "config.json").write_text("kept")
  with pytest.raises(UserError) as caught:
    bench_kernels.run_cases(str(tmp_path / folder))
  assert str(caught.value) == f"--record={tmp_path / folder}: {why.format(tmp_path)}"
  assert (tmp_path / "file").read_text() == (tmp_path / "held" / "config.json").read_text() == "kept"


def test_a_name_that_matches_nothing_is_refused(tmp_path):
  with pytest.raises(UserError, match="--only=nope is part of no case's name; the cases are fp32_uniform, "):
    bench_kernels.run_cases(str(tmp_path), only="nope")


def test_a_sweep_times_only_legal_configs_and_starts_with_the_default():
  for shape in shapes.BENCHMARK.values():
    configs = bench_kernels.configs_to_time(shape, sweep=True)
    assert configs[0] == bag_hopper.Config.for_width(shape.D, shape.dtype)
    assert len(set(configs)) == len(configs) > 3
    assert all(shape.D % c.block_d == 0 for c in configs)


def test_ceilings_are_rates_of_both_units():
  found = bench.ceilings(copy_bytes=1 << 16, matmul_size=64)
  assert found.keys() == {"copy_bytes_per_s", "matmul_flop_per_s"}
  assert min(found.values()) > 1e6


def test_every_column_of_the_table_has_its_header():
  case = {
    "name": "a",
    "shape": dict(V=8, D=128, B=2, T=6),
    "ids": "uniform",
    "config": dict(block_d=128, rows_in_flight=8),
  }
  case |= dict(ms=0.5, ms_p10=0.4, ms_p90=0.6, traffic_bytes=10**9, xla_ms=1.5, distinct_ms=0.1, traffic_ms=0.25)
  lines = bench_kernels.table([case | dict(copy_bytes_per_s=4e12, matmul_flop_per_s=7e14)]).splitlines()
  assert len({line.count("|") for line in lines[:3]}) == 1
  assert "| 0.500 (0.400 - 0.600) | 2.00 | 1.500 | 3.00x | 0.100 ms (20 %) | 0.250 ms (50 %) |" in lines[2]
  assert "copy 4.00 TB/s (read + write), bf16 matmul 700 TFLOP/s" in lines[4]


def test_bytes_count_repeated_rows_once_and_each_time():
  shape = shapes.BagShape(V=8, D=128, B=2, mean_length=3)
  rest = 4 * 6 + 4 * 3 + 2 * 512  # ids, offsets, result
  moved = bench_kernels.bytes_moved(shape, np.asarray([1, 1, 1, 2, 2, 3]))
  assert moved == {"distinct_bytes": rest + 3 * 512, "traffic_bytes": rest + 6 * 512}


def test_a_wrong_kernel_is_not_timed():
  right = jnp.ones((2, 128))
  with pytest.raises(AssertionError, match=r"case: relative error 1\.00e\+00 against the reference, 1e-05 allowed"):
    bench_kernels.check(2 * right, right, "case")
  with pytest.raises(AssertionError, match="relative error nan"):
    bench_kernels.check(np.nan * right, right, "case")


def test_a_machine_without_the_gpu_gets_no_times(monkeypatch):
  monkeypatch.setattr(device, "missing_hopper", lambda: "it needs another device")
  with pytest.raises(UserError, match="it needs another device; no times were taken"):
    bench_kernels.main(["bench_kernels"])


def test_quantiles_are_ordered_and_in_milliseconds():
  timing = bench.device_time(lambda x: x + 1, jnp.zeros(8), samples=5, seconds=1e-3)
  assert 0 < timing["ms_p10"] <= timing["ms"] <= timing["ms_p90"] < 1000


def test_functions_take_turns_and_each_fills_its_queues(monkeypatch):
  clock, order, rests = [0.0], [], []

  def lasting(name, milliseconds):
    def call(x):
      clock[0] += 1e-3 * milliseconds
      order.append((name, x))
      return x

    return call

  monkeypatch.setattr(bench.jax, "jit", lambda function: function)
  monkeypatch.setattr(bench, "time", types.SimpleNamespace(perf_counter=lambda: clock[0], sleep=rests.append))
  functions = {"slow": lasting("slow", 4), "fast": lasting("fast", 1)}
  timings = bench.device_times(functions, "x", samples=3, seconds=9.5e-3)
  turn = [("slow", "x")] * 4 + [("fast", "x")] * 9  # a queue has four calls at least
  assert order == [("slow", "x")] * 8 + [("fast", "x")] * 8 + 3 * turn
  assert rests == [9.5e-3] * 6
  assert timings["slow"] == pytest.approx({"ms": 4, "ms_p10": 4, "ms_p90": 4})
  assert timings["fast"] == pytest.approx({"ms": 1, "ms_p10": 1, "ms_p90": 1})


def test_drawn_ids_and_offsets_are_legal_and_uneven():
  for shape in (shapes.BENCHMARK["fp32_uniform"], shapes.BENCHMARK["fp32_zipf"]):
    ids, offsets = shape.draw_ids(np.random.default_rng(0)), shape.draw_offsets(np.random.default_rng(0))
    assert ids.dtype == offsets.dtype == np.int32
    assert ids.shape == (shape.T,)
    assert 0 <= ids.min() <= ids.max() < shape.V
    assert (offsets[0], offsets[-1], len(offsets)) == (0, shape.T, shape.B + 1)
    assert np.diff(offsets).min() == 0
    assert np.diff(offsets).max() > 5 * shape.mean_length
  top = np.sort(np.bincount(ids))[::-1]
  assert top[0] / len(ids) == pytest.approx(np.log(2) / np.log(shape.V + 1), rel=0.1)


def test_markdown_columns_line_up():
  assert re.fullmatch(r"\| a \| b \|\n\| --- \| --: \|\n\| 1 \| 2 \|\n", bench.markdown_table(["a", "b"], [["1", "2"]]))
