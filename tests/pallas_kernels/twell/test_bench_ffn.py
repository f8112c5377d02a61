"""The benchmark of feed-forward blocks, rehearsed on CPU: inputs, checks, record. Times mean nothing here."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import bench_ffn, ffn_tables, ffn_trained, ffn_training
from experiments import ffn_measurement as measurement
from experiments.bench_ffn import Case
from experiments.ffn_measurement import Problem
from pallas_kernels import bench, device, twell
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


@pytest.fixture
def refusal():
  """`refusal("--what=inference", ...)`: what a call with these flags is answered."""

  def refused(*arguments):
    with flagsaver.flagsaver(), pytest.raises(UserError) as answer:
      bench_ffn.main(flags.FLAGS(["bench_ffn", *arguments]))
    return str(answer.value)

  yield refused
  flags.FLAGS.unparse_flags()


DRAWN, TRAINED = ("--what=inference", "--record=runs/never"), ("--what=trained", "--record=runs/never")
A_MODEL = ("--model=runs/wide", "--text=a.txt")


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ([], "--what=inference, training, trained (one or several) and --record=FOLDER are needed"),
    (["--what=inference"], "--what=inference, training, trained (one or several) and --record=FOLDER are needed"),
    ([*DRAWN, "more"], "'more' is not a flag"),
    ([*DRAWN, "--what=inference,train"], "--what='train' is none of inference, training, trained"),
    ([*DRAWN, "--cases=density,none"], "--cases='none' starts no case's name"),
    ([*TRAINED, "--model=runs/wide"], "--what=trained needs --model=RUN_FOLDER and --text=FILES"),
    ([*TRAINED, "--text=a.txt"], "--what=trained needs --model=RUN_FOLDER and --text=FILES"),
    (
      [*TRAINED, *A_MODEL, "--cases=density"],
      "--cases has no effect without --what=inference or training; leave it out",
    ),
    ([*DRAWN, "--model=runs/wide"], "--model has no effect without --what=trained; leave it out"),
    ([*DRAWN, "--text=a.txt"], "--text has no effect without --what=trained; leave it out"),
    ([*DRAWN, "--tokens=131072"], "--tokens has no effect without --what=trained; leave it out"),
  ],
)
def test_wrong_flags_are_refused_before_the_gpu_is_asked_for(arguments, said, refusal, monkeypatch):
  monkeypatch.setattr(device, "missing_hopper", lambda: pytest.fail("the GPU was asked for"))
  assert said in refusal(*arguments)


def test_a_machine_without_the_gpu_gets_no_times(refusal):
  both = ["--what=inference,trained", "--record=runs/never", *A_MODEL, "--tokens=4096", "--cases=density"]
  for arguments in ([*DRAWN, "--cases=density"], [*TRAINED, *A_MODEL], both):
    said = refusal(*arguments)
    assert "bench_ffn measures kernels for sm_90" in said
    assert "no times were taken" in said


# Measuring.


@pytest.fixture
def rehearsal(monkeypatch):
  """Replaces what would take minutes on a CPU, every measurement; what is to be timed is traced."""

  def times(functions, *args, samples):
    for function in functions.values():
      jax.eval_shape(jax.jit(function), *args)
    return {name: {"ms": 3.0, "ms_p10": 2.4, "ms_p90": 3.6} for name in functions}

  monkeypatch.setattr(bench, "ceilings", lambda: {"copy_bytes_per_s": 4e12, "matmul_flop_per_s": 7e14})
  monkeypatch.setattr(bench, "device_times", times)


TINY = FfnShape(M=130, D=128, F=512)
ACTIVITY = Activity(density=0.1)
ZIPF = Activity(density=0.02, pattern="zipf")


def test_a_run_leaves_a_record_and_its_table(tmp_path, rehearsal, capsys):
  cases = {
    "without gate": Case(shape=dataclasses.replace(TINY, gated=False), activity=ACTIVITY),
    "sorted": Case(shape=TINY, activity=ZIPF, sort=True),
    "misleading": Case(shape=TINY, activity=Activity(density=0.01, pattern="misleading")),
    "decode": Case(shape=dataclasses.replace(TINY, M=8), activity=ACTIVITY, layers=2, rounds=3),
  }
  record_cases(str(tmp_path), {"repeats": 7}, bench_ffn.measure(cases, samples=7), bench_ffn.table)
  found = {case["name"]: case for case in bench.load_cases(tmp_path)}
  assert list(found) == list(cases)
  assert json.loads((tmp_path / "env.json").read_text())["device"]["kind"]
  assert capsys.readouterr().out.strip() == (tmp_path / "table.md").read_text().strip()
  for name, case in found.items():
    apart = {"dense_apart"} if name == "decode" else set()
    assert case["ms"].keys() == {"dense", "sparse", "auto", "pack", "gate"} | apart
    assert {timing["ms"] for timing in case["ms"].values()} == {0.5 if name == "decode" else 3.0}  # of six blocks
    assert max(case["relative_error"].values()) < 5e-3
    assert case["auto_took"] == "dense"  # so the reference says
    assert case["floor_ms"] > 0
    assert case["samples"] == 7
  assert found["without gate"]["nonzeros_mean"] == pytest.approx(51.2, rel=0.1)
  assert found["decode"]["nonzeros_mean"] == pytest.approx(51.2, rel=0.15)
  assert (found["decode"]["layers"], found["decode"]["blocks_of_a_call"]) == (2, 6)
  assert found["without gate"]["shape"] == {"M": 130, "D": 128, "F": 512, "gated": False, "dtype": "bfloat16"}
  assert (found["sorted"]["hot"], found["sorted"]["shape"]["F"]) == (256, 384)  # some never fired for 130 tokens
  assert (found["sorted"]["neurons_before"], found["sorted"]["tokens_firing_pruned"]) == (512, 0)
  assert found["sorted"]["relative_error_to_unpruned"] < 5e-3
  # One row is looked at in two, more than in a large batch.
  assert found["misleading"]["nonzeros_mean"] > 120
  assert found["misleading"]["overflow_rows"] > 60


def test_sorted_weights_are_those_drawn_and_the_first_fire_most(rehearsal):
  drawn = bench_ffn.prepare(Case(shape=TINY, activity=ZIPF, sort=True), jax.random.key(0))
  problem, facts = bench_ffn._sorted("zipf", drawn)
  before, after = (np.asarray(of.layers[0].firing_FD, np.float32) for of in (drawn, problem))
  fires_MF = np.asarray(problem.x_MD, np.float32) @ after.T > 0
  fired = fires_MF.any(axis=0)
  assert {row.tobytes() for row in after[fired]} <= {row.tobytes() for row in before}
  assert fired.sum() == (np.asarray(drawn.x_MD, np.float32) @ before.T > 0).any(axis=0).sum()
  assert fires_MF[:, :256].sum(axis=0).min() >= fires_MF[:, 256:].sum(axis=0).max()
  assert np.asarray(problem.cold_F).tolist() == [False] * 256 + [True] * (len(after) - 256)
  assert facts["hot_share"] == pytest.approx(fires_MF[:, :256].sum() / fires_MF.sum())


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
  measurement.block.cache_clear()
  measurement.timed.cache_clear()
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
def test_a_wrong_result_gets_no_time(wrong, said, rehearsal, wrong_block, monkeypatch):
  wrong_block(wrong)
  monkeypatch.setattr(bench, "device_times", lambda *args, **options: pytest.fail("a wrong kernel was timed"))
  with pytest.raises(AssertionError, match=said):
    list(bench_ffn.measure({"case": Case(shape=TINY, activity=ACTIVITY)}, samples=1))


@pytest.fixture
def wrong_block(monkeypatch):
  """`wrong_block(change)`: makes the gated block return `change(y, stats)`."""

  def patch(change):
    original = twell.gated_feedforward
    monkeypatch.setattr(twell, "gated_feedforward", lambda *args, **options: change(*original(*args, **options)))
    measurement.block.cache_clear()  # what is traced already does not see the patch

  yield patch
  measurement.block.cache_clear()


def test_sorting_that_changes_y_though_no_pruned_neuron_fires_is_an_error(wrong_block):
  drawn = bench_ffn.prepare(Case(shape=TINY, activity=ZIPF), jax.random.key(0))
  wrong_block(lambda y_MD, stats: (y_MD * 1.02, stats))
  with pytest.raises(AssertionError, match=r"zipf: relative error 2\.\d+e-02 by pruning and sorting, though no pruned"):
    bench_ffn._sorted("zipf", drawn)


def test_nothing_that_fires_is_right_only_as_zeros():
  x_MD, weights = shapes.draw(jax.random.key(0), TINY, Activity(density=0))
  zeros_MD = jnp.zeros_like(x_MD)
  assert measurement.relative_error(x_MD, weights, zeros_MD) == 0
  assert measurement.relative_error(x_MD, weights, zeros_MD.at[0, 0].set(1e-3)) > 1


def test_the_error_counts_every_chunk_once(monkeypatch):
  x_MD, weights = shapes.draw(jax.random.key(0), dataclasses.replace(TINY, M=96), ACTIVITY)
  y_MD = reference.feedforward(x_MD, *weights, spec=None, hot=0, with_active=False)[0]
  wrong_MD = y_MD.at[::7].multiply(2)
  monkeypatch.setattr(measurement, "_ROWS_OF_A_CHUNK", 32)
  measurement._squares.clear_cache()
  y_MD, wrong_MD = np.asarray(y_MD, np.float64), jnp.asarray(wrong_MD)
  expected = np.linalg.norm(np.asarray(wrong_MD, np.float64) - y_MD) / np.linalg.norm(y_MD)
  assert measurement.relative_error(x_MD, weights, wrong_MD) == pytest.approx(expected, rel=0.01)
  measurement._squares.clear_cache()


@pytest.mark.parametrize(("tokens", "rows"), [(96, 32), (130, 26), (7, 7), (33, 11), (1, 1)])
def test_chunks_are_the_largest_that_divide(tokens, rows, monkeypatch):
  monkeypatch.setattr(measurement, "_ROWS_OF_A_CHUNK", 32)
  assert measurement._in_chunks(jnp.zeros((tokens, 3))).shape == (tokens // rows, rows, 3)


def layered(gated=True):
  return bench_ffn.prepare(
    Case(shape=dataclasses.replace(TINY, gated=gated), activity=ACTIVITY, layers=2, rounds=3), jax.random.key(0)
  )


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("what", ["dense", "dense_apart", "sparse", "auto"])
def test_a_call_runs_every_layer_in_every_round_one_after_another(what, gated):
  problem = layered(gated)
  function = measurement.timed(what, 0, 3)
  # XLA would otherwise compute the blocks of later rounds not at all, and join products of different layers.
  assert str(jax.make_jaxpr(function)(problem.x_MD, problem.layers)).count("optimization_barrier") >= 6
  found = jax.jit(function)(problem.x_MD, problem.layers)
  assert len(found) == 6
  for y_MD, weights in zip(found, problem.layers * 3):
    expected_MD = reference.feedforward(problem.x_MD, *weights, spec=None, hot=0, with_active=False)[0]
    np.testing.assert_allclose(y_MD.astype(jnp.float32), expected_MD.astype(jnp.float32), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("what", ["pack", "gate"])
def test_parts_of_a_call_are_computed_for_each_block_and_one_after_another(what):
  problem = layered()
  function = measurement.timed(what, 0, 3)
  assert str(jax.make_jaxpr(function)(problem.x_MD, problem.layers)).count("optimization_barrier") == 6
  found = jax.jit(function)(problem.x_MD, problem.layers)
  assert {leaf.shape[0] for leaf in jax.tree.leaves(found)} == {6}
  for n, weights in enumerate(problem.layers * 3):
    of_block = jax.tree.map(lambda of_blocks, n=n: of_blocks[n], found)
    gate_MF = jax.nn.relu(problem.x_MD @ weights.firing_FD.T)
    if what == "pack":
      fires_MTN = np.asarray(gate_MF != 0).reshape(len(gate_MF), -1, 256)
      np.testing.assert_allclose(of_block.counts, fires_MTN.sum(axis=2), atol=2)
    else:
      np.testing.assert_allclose(jax.nn.relu(of_block).astype(jnp.float32), gate_MF.astype(jnp.float32), atol=0.03)


# Training.


@pytest.mark.parametrize("gated", [True, False])
def test_training_is_compared_recorded_and_shown(gated, tmp_path, monkeypatch, capsys):
  timing = {"ms": 2.0, "ms_p10": 1.0, "ms_p90": 3.0}
  monkeypatch.setattr(bench, "device_times", lambda functions, *args, samples: dict.fromkeys(functions, timing))
  case = Case(shape=dataclasses.replace(TINY, gated=gated), activity=ACTIVITY, training=True)
  monkeypatch.setattr(measurement, "limits", lambda: {"matmul_flop_per_s": 1.0})
  record_cases(str(tmp_path / "record"), {}, bench_ffn.measure({"training/x": case}, samples=3), ffn_tables.table)
  (found,) = bench.load_cases(tmp_path / "record")
  assert set(found["gradient_error"]) == {"sparse", "auto"}
  assert found["kept_bytes"]["dense"] == (3 if gated else 1) * 130 * 512 * 2
  assert set(found["ms"]) == {"dense", "sparse", "auto"}
  assert "| training/x |" in capsys.readouterr().out


def test_a_wrong_gradient_gets_no_time(monkeypatch):
  right = ffn_training._forward
  # The same x, and another derivative.
  spoilt = lambda x_MD: x_MD + 0.05 * (x_MD - jax.lax.stop_gradient(x_MD))
  wrong = lambda what, x_MD, weights: right(what, x_MD if what == "dense" else spoilt(x_MD), weights)
  monkeypatch.setattr(ffn_training, "_forward", wrong)
  monkeypatch.setattr(bench, "device_times", lambda *args, **options: pytest.fail("was timed"))
  problem = bench_ffn.prepare(Case(shape=TINY, activity=ACTIVITY), jax.random.key(0))
  ffn_training.step.cache_clear()
  with pytest.raises(AssertionError, match="training/x, sparse: relative error"):
    ffn_training.measured("training/x", problem, {}, samples=1)
  ffn_training.step.cache_clear()


def test_what_is_kept_for_gradients(monkeypatch):
  """8 bytes for each entry there is room for and for each token, and a few numbers."""
  monkeypatch.setattr(device, "missing_hopper", lambda: None)
  monkeypatch.setattr(device, "num_sms", lambda: 132)
  shape = shapes.BENCHMARK["paper_short"]
  x_MD = jax.ShapeDtypeStruct((shape.M, shape.D), shape.dtype)
  weights = shapes.Weights(*[jax.ShapeDtypeStruct((shape.F, shape.D), shape.dtype)] * 3)
  room = shape.M * 91  # 1.6 % of 5632
  assert 0 < ffn_training.kept_bytes(x_MD, weights) - 8 * (room + shape.M) <= 16


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
  problem = Problem(jnp.zeros((16, 128), jnp.bfloat16), [weights], hot)
  nonzeros_M = np.array(nonzeros_M)
  tokens_F = np.arange(3, -1, -1) < nonzeros_M.max()  # the last neurons
  used = measurement.Counts(nonzeros_M, nonzeros_M, tokens_F)
  gate = 16 * 4 * 32
  assert measurement.floor(problem, used, LIMITS) == pytest.approx(gate + milliseconds)


def case_of_table(name="density/M=131072 0.5%", **changes):
  timing = {"ms": 8.0, "ms_p10": 7.5, "ms_p90": 8.25}
  dense, gate = dict(ms=13.1, ms_p10=13.0, ms_p90=13.2), dict.fromkeys(timing, 0.01)
  case = {
    "name": name,
    "shape": dict(M=131072, D=2048, F=5632),
    "hot": 128,
    "samples": 9,
    "nonzeros_mean": 28.16,
    "nonzeros_max": 61,
    "overflow_rows": 2.0,
    "auto_took": "sparse",
    "ms": dict(dense=dense, sparse=timing, auto=timing, pack=timing, gate=gate),
    "floor_ms": 7.6,
    "relative_error": dict(sparse=0.0032, auto=0.0031),
  }
  return case | dict(copy_bytes_per_s=4.3e12, matmul_flop_per_s=7e14, l2_bytes_per_s=8.8e12) | changes


def test_every_column_of_the_table_has_its_header():
  lines = ffn_tables.table([case_of_table(activity=dict(density=0.005))]).splitlines()
  assert len({line.count("|") for line in lines[:3]}) == 1
  assert lines[2] == (
    "| density/M=131072 0.5% | 131072, 2048 x 5632 (128 hot) | 0.5 % | 28.2 (61) | 2 | sparse | 13.10 (13.00 - 13.20)"
    " | 8.000 (7.500 - 8.250) | 8.000 (7.500 - 8.250) | 8.000 (7.500 - 8.250) | 0.0100 (0.0100 - 0.0100)"
    " | 1.64x | 1.64x | 3.2e-03 | 7.6 ms (95 %) |"
  )
  assert [lines[n] for n in (4, 6)] == [
    f"{route} is slower than dense in 0 of 1 cases." for route in ("sparse", "auto")
  ]
  assert "bf16 matmul 700 TFLOP/s, copy 4.30 TB/s (read + write); L2 is taken to give 8.8 TB/s" in lines[-1]
  assert "medians of 9 queues of calls" in lines[-1]


def test_cases_that_lose_against_dense_are_named():
  fast, slow = case_of_table("fast"), case_of_table("slow")
  slow["ms"] = slow["ms"] | {"sparse": dict(ms=26.2), "auto": dict(ms=13.2)}
  slow["ms"] = {what: dict.fromkeys(("ms", "ms_p10", "ms_p90"), time["ms"]) for what, time in slow["ms"].items()}
  text = ffn_tables.table([fast, slow])
  assert "sparse is slower than dense in 1 of 2 cases: slow (2.00x the time).\n" in text
  assert "auto is slower than dense in 1 of 2 cases: slow (1.01x the time).\n" in text


def test_decoding_is_compared_with_dense_products_kept_apart_too():
  case = case_of_table("decode/M=1 5%")
  case["ms"]["dense_apart"] = {"ms": 12.0, "ms_p10": 11.0, "ms_p90": 13.0}
  assert "decode/M=1 5% 12.00 (11.00 - 13.00) ms (sparse 1.50x, auto 1.50x).\n" in ffn_tables.table([case])


# A trained model.


@pytest.fixture(scope="module")
def model(opened):
  """Two layers wide enough for the kernels. Feature 0 is a constant, from which the gate makes thresholds: on a little
  text many neurons are dead."""
  model = opened(model_width=128, ffn_width=512, context_length=16, precision="bf16", init_std=0.1)
  embedding_VD, blocks = model.model.embedding_VD, model.model.blocks
  embedding_VD[...] = embedding_VD[...].at[:, 0].set(1)
  for w in (blocks.attention.w_out_HKD, blocks.feedforward.w_down_FD):
    w[...] = (0.1 * w[...]).at[..., 0].set(0)
  thresholds_F = jnp.asarray(np.random.default_rng(0).permutation(np.linspace(0, 0.5, 512)), jnp.float32)
  w_gate_NFD = blocks.feedforward.w_gate_FD
  w_gate_NFD[...] = w_gate_NFD[...].at[:, :, 0].set(-thresholds_F)
  return model


TEXTS = ["".join(np.random.default_rng(n).permutation(list("the cat sat on the mat and 19 cats;"))) for n in range(9)]


@pytest.fixture(scope="module")
def text(model):
  return ffn_trained.Text(model, ffn_trained.halves(model, TEXTS, 100))


def test_halves_are_of_whole_contexts_and_no_longer_than_asked_for(model, text):
  assert text.contexts_BL.shape == (12, 16)  # 2 x 96 tokens
  assert ffn_trained.halves(model, TEXTS, 1).shape == (2, 16)
  three = ["z" * 50]
  assert len(ffn_trained.feedforward_inputs.contexts(model, three, 10_000)) == 3
  assert ffn_trained.halves(model, three, 10_000).shape == (2, 16)
  with pytest.raises(UserError, match="--text holds one context of 16 tokens; two are needed"):
    ffn_trained.halves(model, ["z" * 20], 100)


def test_a_trained_model_leaves_two_cases_a_layer_and_the_sum_over_layers(text, tmp_path, rehearsal):
  record_cases(str(tmp_path), {}, ffn_trained.measure(text, samples=3), bench_ffn.table)
  cases = bench.load_cases(tmp_path)
  assert [case["name"] for case in cases] == [f"trained/layer {n}{end}" for n in (0, 1) for end in ("", " sorted")]
  for n, layer in enumerate(ffn_trained.feedforward_inputs.capture(*text)):
    fires_MF = np.asarray(layer.x_MD, np.float32) @ np.asarray(layer.w_gate_FD, np.float32).T > 0
    counted_MF, timed_MF = np.split(fires_MF, 2)
    dead_F = ~counted_MF.any(axis=0)
    before, after = cases[2 * n : 2 * n + 2]
    assert before["shape"]["M"] == after["shape"]["M"] == 96
    assert before["nonzeros_mean"] == pytest.approx(timed_MF.sum() / 96, rel=0.01)
    assert before["nonzeros_max"] == pytest.approx(timed_MF.sum(axis=1).max(), abs=2)
    assert before["nonzeros_first"] == pytest.approx(timed_MF[::16].sum(axis=1).mean(), abs=0.5)
    assert before["dead_share"] == pytest.approx(dead_F.mean(), abs=0.01)
    assert 0.1 < before["dead_share"] < 0.9
    assert after["neurons_pruned"] == pytest.approx(dead_F.sum(), abs=4)
    assert after["shape"]["F"] % 128 == 0
    assert 512 - after["neurons_pruned"] <= after["shape"]["F"] < 512 - after["neurons_pruned"] + 128
    assert after["tokens_firing_pruned"] == pytest.approx(timed_MF[:, dead_F].any(axis=1).sum(), abs=4)
    assert after["tokens_firing_pruned"] > 0
    lost = after["relative_error_to_unpruned"]
    assert 5e-3 < lost < 1  # what the pruned neurons would have added
    assert max(after["relative_error"].values()) < 5e-3  # against the dense block of the same neurons
    assert after["tokens_counted"] == 96
    assert 0 <= after["hot_share"] <= 1
  lines = (tmp_path / "table.md").read_text().splitlines()
  assert len({line.count("|") for line in lines[:8]}) == 1
  assert [line.split(" | ")[0] for line in lines[6:8]] == [
    "| trained/sum of 2 layers",
    "| trained/sum of 2 layers sorted",
  ]
  assert lines[6].split(" | ")[6:11] == ["6.000"] * 5


def test_table_of_trained_layers():
  before = case_of_table("trained/layer 0", dead_share=0.25, nonzeros_first=480.2)
  after = case_of_table("trained/layer 0 sorted", overflow_rows=0.0)
  after |= dict(tokens_counted=131072, neurons_before=5632, neurons_pruned=1408, tokens_firing_pruned=12)
  after |= dict(relative_error_to_unpruned=0.0035, hot_share=0.625)
  text = ffn_tables.table([before, after])
  assert (
    "| 0 | 28.2 (61) | 480.2 | 25.0 % | 4224 of 5632 | 128 | 62.5 % | 2 | 0 | 12 of 131072 | 3.5e-03 | 1.64x (sparse) |"
  ) in text.replace("| layer 0 |", "| 0 |")
  alone = ffn_tables.table([before])  # a run that died
  assert "sum of" not in alone


def test_a_model_is_opened_for_bfloat16_and_refused_if_the_kernels_cannot_serve_it(
  model, opened, tmp_path, monkeypatch
):
  path = tmp_path / "a.txt"
  path.write_text("abc " * 100)
  found, asked = [model, opened(), opened(ffn_kind="gated_silu")], []
  monkeypatch.setattr(ffn_trained, "open_model", lambda *args, **options: asked.append((args, options)) or found.pop(0))
  assert ffn_trained.read("runs/a", str(path), 64).contexts_BL.shape == (8, 16)
  ((folder,), options), *_ = asked
  assert (folder, options["recipe"], options["ffn_implementation"]) == ("runs/a", "bf16", "dense")
  with pytest.raises(UserError, match=r"ffn_width=48, model.model_width=32: F=48 neurons are no positive multiple of"):
    ffn_trained.read("runs/a", str(path), 64)
  with pytest.raises(UserError, match="'gated_silu' has no neurons that ReLU can switch off"):
    ffn_trained.read("runs/a", str(path), 64)
  with pytest.raises(UserError, match=r"--text: .*nowhere.txt: No such file"):
    ffn_trained.read("runs/a", str(tmp_path / "nowhere.txt"), 64)
