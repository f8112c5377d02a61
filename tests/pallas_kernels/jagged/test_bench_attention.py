"""The benchmark of attention, rehearsed on CPU: what it writes and refuses. Times mean nothing here."""

import dataclasses

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import bench_attention
from experiments.bench_attention import Case
from pallas_kernels import bench
from pallas_kernels.jagged.shapes import BENCHMARK, JaggedShape
from sparse_lm.benchmark import record_cases
from sparse_lm.errors import UserError

TINY = JaggedShape(B=3, L=20, H=2, K=64, fill=0.5)


@pytest.fixture
def rehearsal(monkeypatch):
  """Every measurement is replaced; what is to be timed is traced."""

  def times(functions, *args, **options):
    for function in functions.values():
      jax.eval_shape(jax.jit(function), *args)
    return {name: {"ms": 3.0 if "+grad" in name else 1.0, "ms_p10": 0.9, "ms_p90": 3.1} for name in functions}

  monkeypatch.setattr(bench, "ceilings", lambda: {"copy_bytes_per_s": 4e12, "matmul_flop_per_s": 7e14})
  monkeypatch.setattr(bench, "device_times", times)


@pytest.mark.slow
def test_a_run_leaves_a_record_and_its_table(tmp_path, rehearsal, capsys):
  chosen = {
    "flash": Case(shape=TINY, options={}, baselines=("cudnn_padded", "xla")),
    "cross": Case(shape=dataclasses.replace(TINY, keys=9), options=dict(activation="silu")),
    "pooling": Case(shape=dataclasses.replace(TINY, queries=4), options=dict(broadcast_q=True)),
  }
  record_cases(str(tmp_path), {}, bench_attention.measure(chosen, 7, "reference"), bench_attention.table)
  found = {case["name"]: case for case in bench.load_cases(tmp_path)}
  assert list(found) == list(chosen)
  assert all(case["relative_error"] < 1e-2 for case in found.values())
  lengths = TINY.draw_lengths(np.random.default_rng(bench_attention.zlib.crc32(b"flash")))
  assert found["flash"]["pairs"] == np.sum(lengths.astype(int) ** 2)
  assert found["pooling"]["shape"]["queries"] == 4
  lines = (tmp_path / "table.md").read_text().splitlines()
  assert len({line.count("|") for line in lines[:5]}) == 1
  rate = 4 * 2 * 64 * found["cross"]["pairs"] * 1e-9
  assert lines[3].split(" | ")[2:4] == [f"{rate:.0f} (1.000)", f"{2.5 * rate / 2:.0f} (2.000)"]
  assert capsys.readouterr().out.strip() == (tmp_path / "table.md").read_text().strip()


def test_a_wrong_result_is_not_timed(rehearsal, monkeypatch):
  monkeypatch.setattr(bench, "device_times", lambda *args, **options: pytest.fail("a wrong kernel was timed"))
  problem = bench_attention.Problem(Case(shape=TINY, options={}), np.random.default_rng(0), "reference")
  monkeypatch.setattr(problem, "ours_with_gradients", lambda q, k, v, d_o, schedule: (1.1 * v, q, k, v))
  with pytest.raises(AssertionError, match="case: o is off by"):
    problem.check("case")


@pytest.mark.slow
def test_the_gradients_of_a_bias_are_checked_and_timed(rehearsal):
  case = Case(shape=TINY, options=dict(activation="silu", causal=True), with_bias=True)
  (found,) = bench_attention.measure({"bias": case}, 7, "reference")
  assert found["bias"]
  assert found["relative_error"] < 1e-2
  problem = bench_attention.Problem(case, np.random.default_rng(0), "reference")
  shapes = jax.eval_shape(problem.ours_with_gradients, problem.q, problem.k, problem.v, problem.d_o, problem.schedule)
  assert [a.shape for a in shapes[4:]] == [(2 * TINY.L - 1,), (129,)]


def test_block_attention_is_timed_with_its_own_kernels():
  case = Case(shape=TINY, options=dict(block=64))
  assert bench_attention.Problem(case, np.random.default_rng(0), "reference").schedule.blocks is not None


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=3), dict(block=4), dict(causal=True, window=2)])
def test_visible_pairs_are_counted_one_by_one(options):
  q_lengths, k_lengths = np.array([5, 0, 9]), np.array([7, 3, 9])
  expected = sum(
    (not options.get("causal") or j <= i)
    and abs(i - j) <= options.get("window", 99)
    and i // options.get("block", 99) == j // options.get("block", 99)
    for b in range(3)
    for i in range(q_lengths[b])
    for j in range(k_lengths[b])
  )
  assert bench_attention.visible_pairs(q_lengths, k_lengths, **options) == expected


def test_lengths_follow_the_protocol():
  rng = np.random.default_rng(0)
  lengths = BENCHMARK["L=2048 fill=0.5"].draw_lengths(rng)
  assert (len(lengths), lengths.max() <= 2048, lengths.min() >= 0) == (1152, True, True)
  assert lengths.mean() == pytest.approx(1024, rel=0.05)
  np.testing.assert_array_equal(BENCHMARK["L=1024 fill=1"].draw_lengths(rng), 1024)
  low = JaggedShape(B=999, L=100, fill=0.25).draw_lengths(rng)
  assert (low.min(), low.max()) == (1, 50)
  blocks = BENCHMARK["blocks L=2000 fill=0.75"].draw_lengths(rng)
  assert blocks.sum() == pytest.approx(1.73e6, rel=0.03)


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ([], "--record=FOLDER is needed"),
    (["--record=x", "--cases=nope"], "--cases='nope' starts no case's name; the cases are flash L=256"),
    (["--record=x", "more"], "'more' is not a flag"),
    (["--record=x", "--cases=flash"], "bench_attention measures kernels for sm_90: .* no times were taken"),
  ],
)
def test_wrong_calls_are_refused(arguments, said):
  with flagsaver.flagsaver(), pytest.raises(UserError, match=said):
    bench_attention.main(flags.FLAGS(["bench_attention", *arguments]))
