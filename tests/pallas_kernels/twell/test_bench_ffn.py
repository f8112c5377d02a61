"""The benchmark of feed-forward blocks, rehearsed on CPU: inputs, checks, record. Times mean nothing here."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import program
import pytest

from experiments import bench_ffn
from experiments.bench_ffn import Case
from pallas_kernels import bench, twell
from pallas_kernels.twell import reference, shapes
from pallas_kernels.twell.shapes import Activity, FfnShape
from sparse_lm.benchmark import record_cases
from sparse_lm.errors import UserError

SHAPE = FfnShape(M=4096, D=256, F=704)  # an eighth of the paper's neurons
HALF = Activity(density=0.5)


def fires(shape, activity, seed=0, **options):
  """bool[M, F], by NumPy."""
  x_MD, weights = shapes.draw(jax.random.key(seed), shape, activity, **options)
  return np.asarray(x_MD, np.float32) @ np.asarray(weights.firing_FD, np.float32).T > 0


# Inputs.


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("density", [0.001, 0.005, 0.1, 0.5, 0.97])
def test_uniform_inputs_have_the_density_asked_for(density, gated):
  shape = dataclasses.replace(SHAPE, gated=gated)
  found_MF = fires(shape, Activity(density=density))
  assert found_MF.mean() == pytest.approx(density, rel=0.05)
  assert found_MF.mean(axis=0).max() <= 2 * density + 0.01  # no neuron and, but for chance, no token stands out


@pytest.mark.parametrize("gated", [True, False])
def test_at_the_ends_nothing_and_everything_fires(gated):
  shape = dataclasses.replace(SHAPE, gated=gated)
  assert not fires(shape, Activity(density=0)).any()
  assert fires(shape, Activity(density=1)).all()


def test_trained_inputs_are_as_dense_as_uniform_ones_and_as_uneven_as_a_model():
  shape = dataclasses.replace(SHAPE, M=8192)
  found_MF = fires(shape, Activity(density=0.005, pattern="trained"))
  first = np.arange(shape.M) % 2048 == 0
  nonzeros_M, rates_F = found_MF.sum(axis=1), np.sort(found_MF.mean(axis=0))[::-1]
  assert found_MF.mean() == pytest.approx(0.005, rel=0.05)
  assert nonzeros_M[first].mean() * 5632 / shape.F == pytest.approx(480, rel=0.2)  # of four tokens
  assert 5 < nonzeros_M[~first].max() / nonzeros_M.mean() < 12
  assert np.std(nonzeros_M[~first]) > 1.1 * np.sqrt(nonzeros_M.mean())  # more than independent neurons alone give
  assert (rates_F == 0).mean() == pytest.approx(0.3, abs=0.03)
  assert 8 < rates_F[: shape.F // 100].mean() / rates_F.mean() < 30  # the busiest of a hundred
  assert found_MF.any(axis=0)[: shape.F // 2].mean() == pytest.approx(0.7, abs=0.07)  # the dead lie everywhere


def test_the_longest_tokens_of_a_trained_batch_have_ten_times_the_mean():
  expected = shapes._multipliers(131072, np.full(100, 2.5), 0.005, np.random.default_rng(0))
  nonzeros_M = shapes._tail(expected * 2.5)
  body_M = nonzeros_M[np.arange(131072) % 2048 != 0]
  assert nonzeros_M.mean() == pytest.approx(0.005, rel=0.01)
  assert body_M.max() / nonzeros_M.mean() == pytest.approx(10, rel=0.3)


@pytest.mark.parametrize("exponent", [0.7, 1.0])
def test_zipf_rates_fall_with_the_rank_and_stand_in_no_order(exponent):
  density = 0.02
  rates_F = fires(SHAPE, Activity(density=density, pattern="zipf", exponent=exponent)).mean(axis=0)
  assert rates_F.mean() == pytest.approx(density, rel=0.03)
  ranked = np.sort(rates_F)[::-1]
  assert ranked[0] == pytest.approx(0.9 if exponent == 1 else ranked[9] * 10**0.7, rel=0.1)
  assert ranked[20] / ranked[200] == pytest.approx((201 / 21) ** exponent, rel=0.15)
  assert np.corrcoef(rates_F, np.arange(SHAPE.F))[0, 1] == pytest.approx(0, abs=0.15)


def test_misleading_inputs_are_sparse_only_where_they_are_looked_at():
  sampled = np.arange(5, SHAPE.M, 128)
  found_MF = fires(SHAPE, Activity(density=0.005, pattern="misleading"), sampled_S=sampled)
  assert found_MF[sampled].mean() == pytest.approx(0.005, rel=0.3)
  assert np.delete(found_MF, sampled, axis=0).mean() == pytest.approx(0.5, rel=0.01)


def test_a_key_gives_the_same_inputs_and_another_gives_others():
  one, same, other = (shapes.draw(jax.random.key(seed), SHAPE, HALF) for seed in (1, 1, 2))
  assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(same)))
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
    assert np.mean(np.asarray(a == b)) < 0.05


@pytest.mark.parametrize("shape", (shapes.TEST | shapes.BENCHMARK).values(), ids=shapes.TEST | shapes.BENCHMARK)
def test_inputs_have_the_shape_and_dtype_asked_for(shape):
  per_neuron, per_token = np.zeros(shape.F, np.float32), np.zeros(shape.M, np.float32)
  x_MD, weights = jax.eval_shape(functools.partial(shapes._draw, shape=shape), jax.random.key(0), per_neuron, per_token)
  assert (x_MD.shape, x_MD.dtype) == ((shape.M, shape.D), shape.dtype)
  assert (weights.w_gate_FD is not None) == shape.gated
  assert {(w.shape, w.dtype) for w in jax.tree.leaves(weights)} == {((shape.F, shape.D), jnp.dtype(shape.dtype))}


@pytest.mark.parametrize(
  ("options", "said"),
  [
    (dict(density=1.5), r"density=1.5 must lie in \[0, 1\] for pattern='uniform'"),
    (dict(density=np.nan), "density=nan must lie in"),
    (dict(density=0.5, pattern="trained"), r"density=0.5 must lie in \[0.001, 0.02\] for pattern='trained'"),
    (dict(density=0.0, pattern="zipf"), r"density=0.0 must lie in \[1e-06, 0.45\] for pattern='zipf'"),
    (dict(density=0.1, pattern="even"), r"pattern='even' must be one of \('uniform', 'trained', 'zipf', 'misleading'"),
  ],
)
def test_an_activity_that_cannot_be_drawn_is_refused(options, said):
  with pytest.raises(ValueError, match=said):
    Activity(**options)


def test_only_the_misleading_pattern_knows_a_sample_and_it_needs_one():
  with pytest.raises(ValueError, match="sampled_S is for pattern='misleading', and that pattern needs it"):
    shapes.draw(jax.random.key(0), SHAPE, Activity(density=0.1, pattern="misleading"))
  with pytest.raises(ValueError, match="sampled_S is for pattern='misleading'"):
    shapes.draw(jax.random.key(0), SHAPE, HALF, sampled_S=np.arange(3))


# Cases.


def test_a_name_selects_its_case_and_a_beginning_all_that_begin_so():
  cases = bench_ffn.inference_cases()
  assert list(bench_ffn.choose(cases, [])) == list(cases)
  assert list(bench_ffn.choose(cases, ["pattern/trained"])) == ["pattern/trained"]
  assert list(bench_ffn.choose(cases, ["zipf/s=1", "pattern/trained "])) == [
    "pattern/trained sorted",
    "zipf/s=1.0",
    "zipf/s=1.0 sorted",
  ]
  assert list(bench_ffn.choose(cases, ["density/M=16384 1%"])) == ["density/M=16384 1%"]
  assert len(bench_ffn.choose(cases, ["decode/M=1", "decode/M=64 5%"])) == 4
  with pytest.raises(
    UserError, match="--cases='decode/M=2' starts no case's name; the cases are density/M=131072 0%, "
  ):
    bench_ffn.choose(cases, ["decode/M=1", "decode/M=2"])


def test_wrong_flags_are_refused_before_the_gpu_is_asked_for():
  nothing, no_record, word, what, case, gpu = program.refusals(
    "experiments.bench_ffn",
    [],
    ["--what=inference"],
    ["--what=inference", "--record=runs/never", "more"],
    ["--what=inference,train", "--record=runs/never"],
    ["--what=inference", "--record=runs/never", "--cases=density,none"],
    ["--what=inference", "--record=runs/never", "--cases=density"],
  )
  assert "--what=inference and --record=FOLDER are needed" in nothing
  assert no_record == nothing
  assert "'more' is not a flag" in word
  assert "--what='train' is none of inference" in what
  assert "--cases='none' starts no case's name" in case
  assert "bench_ffn measures kernels for sm_90" in gpu
  assert "no times were taken" in gpu


# Measuring.


@pytest.fixture
def rehearsal(monkeypatch):
  """Replaces what would take minutes on a CPU, every measurement; what is to be timed is traced."""

  def device_time(function, *args, samples):
    jax.eval_shape(jax.jit(function), *args)
    return {"ms": 0.5, "ms_p10": 0.4, "ms_p90": 0.6}

  monkeypatch.setattr(bench, "ceilings", lambda: {"copy_bytes_per_s": 4e12, "matmul_flop_per_s": 7e14})
  monkeypatch.setattr(bench, "device_time", device_time)
  routing = types.SimpleNamespace(sample_rows=lambda num_tokens: np.arange(0, num_tokens, 16, np.int32))
  monkeypatch.setattr(twell, "routing", routing, raising=False)


TINY = FfnShape(M=130, D=128, F=512)
ACTIVITY = Activity(density=0.1)
ZIPF = Activity(density=0.02, pattern="zipf")


def test_a_run_leaves_a_record_and_its_table(tmp_path, rehearsal, capsys):
  cases = {
    "without gate": Case(shape=dataclasses.replace(TINY, gated=False), activity=ACTIVITY),
    "sorted": Case(shape=TINY, activity=ZIPF, sort=True),
    "misleading": Case(shape=TINY, activity=Activity(density=0.01, pattern="misleading")),
    "decode": Case(shape=dataclasses.replace(TINY, M=8), activity=ACTIVITY, layers=2),
  }
  record_cases(str(tmp_path), {"repeats": 1}, bench_ffn.measure(cases, samples=1), bench_ffn.table)
  found = {case["name"]: case for case in bench.load_cases(tmp_path)}
  assert list(found) == list(cases)
  assert json.loads((tmp_path / "env.json").read_text())["device"]["kind"]
  assert capsys.readouterr().out.strip() == (tmp_path / "table.md").read_text().strip()
  for case in found.values():
    assert case["ms"].keys() == {"dense", "sparse", "auto", "pack", "gate"}
    assert case["ms"]["pack"]["ms"] == pytest.approx(0.5 / case["layers"])
    assert max(case["relative_error"].values()) < 5e-3
    assert case["auto_took"] == "dense"  # so the reference says
    assert case["floor_ms"] > 0
  assert found["without gate"]["nonzeros_mean"] == pytest.approx(51.2, rel=0.1)
  assert found["decode"]["nonzeros_mean"] == pytest.approx(51.2, rel=0.15)
  assert found["without gate"]["shape"] == {"M": 130, "D": 128, "F": 512, "gated": False, "dtype": "bfloat16"}
  assert (found["sorted"]["hot"], found["sorted"]["neurons"]) == (256, 384)  # some never fired for 130 tokens
  assert found["misleading"]["nonzeros_mean"] > 200
  assert found["misleading"]["overflow_rows"] > 100


def test_sorted_weights_are_those_drawn_and_cold_neurons_are_known_by_their_old_place(rehearsal):
  case = Case(shape=TINY, activity=ZIPF, sort=True)
  problem = bench_ffn.prepare(case, jax.random.key(0))
  drawn, served = (np.asarray(weights[0].firing_FD, np.float32) for weights in (problem.drawn, problem.served))
  hot = np.flatnonzero(~np.asarray(problem.cold_F))
  assert len(hot) == problem.hot == 256
  assert {row.tobytes() for row in drawn[hot]} == {row.tobytes() for row in served[:256]}
  fires_MF = np.asarray(problem.x_MD, np.float32) @ drawn.T > 0
  assert fires_MF[:, hot].mean(axis=0).min() >= np.delete(fires_MF, hot, axis=1).mean(axis=0).max()


def test_names_decide_the_inputs_and_not_what_else_is_measured(rehearsal):
  case = Case(shape=TINY, activity=ACTIVITY)
  (alone,) = bench_ffn.measure({"b": case}, samples=1)
  first, second = bench_ffn.measure({"a": case, "b": case}, samples=1)
  assert alone == second
  assert first["nonzeros_mean"] != second["nonzeros_mean"]


def test_functions_are_compiled_once_for_cases_of_one_shape(rehearsal, monkeypatch):
  traced = []
  original = twell.gated_feedforward
  monkeypatch.setattr(
    twell, "gated_feedforward", lambda *args, **options: traced.append(1) or original(*args, **options)
  )
  bench_ffn._block.cache_clear()
  bench_ffn._timed.cache_clear()
  cases = {name: Case(shape=TINY, activity=ACTIVITY) for name in "abc"}
  list(bench_ffn.measure(cases, samples=1))
  assert len(traced) == 5  # two routes checked, three timed


@pytest.mark.parametrize(
  ("wrong", "said"),
  [
    (
      lambda y_MD, stats: (y_MD * 1.02, stats),
      r"case, sparse: relative error 2\.\d+e-02 against the dense block, 1e-02",
    ),
    (lambda y_MD, stats: (y_MD.at[77].set(0), stats), r"relative error \d\.\d+e-0[12]"),
    (lambda y_MD, stats: (y_MD.at[129, 3].set(jnp.nan), stats), "relative error nan"),
    (lambda y_MD, stats: (y_MD, stats._replace(l0=stats.l0 + 1)), r"l0=5\d\.\d+, but the dense gate has 5\d\.\d+ non"),
    (lambda y_MD, stats: (y_MD, stats._replace(l0=jnp.nan)), "l0=nan, but the dense gate has"),
  ],
  ids=["scaled", "token_missing", "one_nan", "one_too_many", "count_is_nan"],
)
def test_a_wrong_result_gets_no_time(wrong, said, rehearsal, monkeypatch):
  original = twell.gated_feedforward
  monkeypatch.setattr(twell, "gated_feedforward", lambda *args, **options: wrong(*original(*args, **options)))
  monkeypatch.setattr(bench, "device_time", lambda *args, **options: pytest.fail("a wrong kernel was timed"))
  bench_ffn._block.cache_clear()  # what is traced already does not see the patch
  try:
    with pytest.raises(AssertionError, match=said):
      list(bench_ffn.measure({"case": Case(shape=TINY, activity=ACTIVITY)}, samples=1))
  finally:
    bench_ffn._block.cache_clear()


def test_nothing_that_fires_is_right_only_as_zeros():
  x_MD, weights = shapes.draw(jax.random.key(0), TINY, Activity(density=0))
  zeros_MD = jnp.zeros_like(x_MD)
  assert bench_ffn.relative_error(x_MD, weights, zeros_MD) == 0
  assert bench_ffn.relative_error(x_MD, weights, zeros_MD.at[0, 0].set(1e-3)) > 1


def test_the_error_counts_every_chunk_once(monkeypatch):
  x_MD, weights = shapes.draw(jax.random.key(0), dataclasses.replace(TINY, M=96), ACTIVITY)
  y_MD = reference.feedforward(x_MD, *weights, spec=None, hot=0, with_active=False)[0]
  wrong_MD = y_MD.at[::7].multiply(2)
  monkeypatch.setattr(bench_ffn, "_ROWS_OF_A_CHUNK", 32)
  bench_ffn._squares.clear_cache()
  y_MD, wrong_MD = np.asarray(y_MD, np.float64), jnp.asarray(wrong_MD)
  expected = np.linalg.norm(np.asarray(wrong_MD, np.float64) - y_MD) / np.linalg.norm(y_MD)
  assert bench_ffn.relative_error(x_MD, weights, wrong_MD) == pytest.approx(expected, rel=0.01)
  bench_ffn._squares.clear_cache()


def test_the_next_layer_sees_the_density_of_the_first(rehearsal):
  problem = bench_ffn.prepare(Case(shape=TINY, activity=ACTIVITY, layers=4), jax.random.key(0))
  for weights, x_MD in zip(problem.drawn, bench_ffn._layer_inputs(problem), strict=True):
    x_MD = np.asarray(x_MD, np.float32)
    assert (x_MD[:, 0] == 8).all()
    assert np.sqrt(np.mean(x_MD[:, 1:] ** 2)) == pytest.approx(1, rel=0.05)
    assert (x_MD @ np.asarray(weights.firing_FD, np.float32).T > 0).mean() == pytest.approx(0.1, rel=0.1)


# By hand: a row of 256 bytes takes 256 ms from memory and 64 from L2, its product with a token 32.
LIMITS = {"copy_bytes_per_s": 1e3, "l2_bytes_per_s": 4e3, "matmul_flop_per_s": 8e3}


@pytest.mark.parametrize(
  ("nonzeros_M", "hot", "gated", "milliseconds"),
  [
    ([1] * 16, 0, True, 16 * 2 * 64),
    ([1] * 16, 0, False, 16 * 64),
    ([4] * 16, 0, True, 16 * 4 * 2 * 32),
    ([4] + [0] * 15, 0, True, 4 * 2 * 256),
    ([1] * 16, 2, True, 16 * 2 * 2 * 32 + 16 * 2 * 64),
  ],
  ids=["l2", "without_gate", "dense_is_less", "memory", "hot"],
)
def test_the_floor_beside_the_gate_is_what_binds(nonzeros_M, hot, gated, milliseconds):
  w_FD = jnp.zeros((4, 128), jnp.bfloat16)
  weights = shapes.Weights(w_FD if gated else None, w_FD, w_FD)
  problem = bench_ffn.Problem(jnp.zeros((16, 128), jnp.bfloat16), [weights], [weights], hot, jnp.arange(4) >= hot)
  nonzeros_M = np.array(nonzeros_M)
  tokens_F = np.arange(3, -1, -1) < nonzeros_M.max()  # the last neurons
  used = bench_ffn.Counts(nonzeros_M, nonzeros_M, tokens_F)
  gate = 16 * 4 * 32
  assert bench_ffn._floor_ms(problem, used, LIMITS) == pytest.approx(gate + milliseconds)


def test_every_column_of_the_table_has_its_header():
  timing = {"ms": 8.0, "ms_p10": 7.5, "ms_p90": 8.25}
  case = {
    "name": "density/M=131072 0.5%",
    "shape": dict(M=131072, D=2048, F=5632),
    "activity": dict(density=0.005),
    "neurons": 5632,
    "hot": 128,
    "nonzeros_mean": 28.16,
    "nonzeros_max": 61,
    "overflow_rows": 2.0,
    "auto_took": "sparse",
    "ms": dict(
      dense=dict(ms=13.1, ms_p10=13.0, ms_p90=13.2),
      sparse=timing,
      auto=timing,
      pack=timing,
      gate=dict.fromkeys(timing, 0.01),
    ),
    "floor_ms": 7.6,
    "relative_error": dict(sparse=0.0032, auto=0.0031),
  }
  limits = dict(copy_bytes_per_s=4.3e12, matmul_flop_per_s=7e14, l2_bytes_per_s=8.8e12)
  lines = bench_ffn.table([case | limits]).splitlines()
  assert len({line.count("|") for line in lines[:3]}) == 1
  assert lines[2] == (
    "| density/M=131072 0.5% | 131072, 2048 x 5632 (128 hot) | 0.5 % | 28.2 (61) | 2 | sparse | 13.10 (13.00 - 13.20)"
    " | 8.000 (7.500 - 8.250) | 8.000 (7.500 - 8.250) | 8.000 (7.500 - 8.250) | 0.0100 (0.0100 - 0.0100)"
    " | 1.64x | 1.64x | 3.2e-03 | 7.6 ms (95 %) |"
  )
  assert "bf16 matmul 700 TFLOP/s, copy 4.30 TB/s (read + write); L2 is taken to give 8.8 TB/s" in lines[4]
