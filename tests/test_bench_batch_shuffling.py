"""The benchmark of Base Batch Shuffling: a window worked by hand, its references, its record, what it refuses."""

import math

import numpy as np
import program
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import bench_batch_shuffling
from pallas_kernels import bench
from sparse_lm.data.batch_shuffling import SUB_BATCH, imbalance


def window(length_WPQ):
  """Sub-batches all samples of which have one length."""
  return np.repeat(np.array(length_WPQ, float), SUB_BATCH, axis=2)


def test_a_window_worked_by_hand():
  length_WPM = window([[[8, 7], [1, 2]], [[1, 1], [4, 6]]])
  first, second = bench_batch_shuffling.imbalances(length_WPM, 1)
  assert first == {
    "drawn": 15 / 9,
    "dealt": 1.0,  # 8 + 1, 7 + 2
    "dealt_by_length": 1.0,
    "snake": 1.0,
    "own_batches": 9 / 8,  # 8 + 1 of the first device, 6 + 1 of the second
    "at_least": 1.0,
    "at_most": pytest.approx(1 + 7 / 18),
  }
  assert second["drawn"] == 10 / 6
  assert second["dealt"] == second["at_least"] == 7 / 6  # 6 + 1, 4 + 1
  assert second["own_batches"] == 8 / 7  # 7 + 1, 4 + 2


def test_squares_dealt_by_length_are_measured_as_squares():
  lengths_SM = np.ones((4, SUB_BATCH))
  lengths_SM[0, 0] = 33  # lengths 160, 256, 128, 192; squares 1216, 512, 128, 320
  lengths_SM[1] = 2
  lengths_SM[3, ::2] = 2
  (found,) = bench_batch_shuffling.imbalances(lengths_SM.reshape(1, 2, -1), 2)
  load = (1216 + 512 + 128 + 320) / 2
  assert found["drawn"] == (1216 + 512) / load
  assert found["dealt"] == found["at_least"] == (1216 + 128) / load
  assert found["dealt_by_length"] == (1216 + 320) / load


def test_equal_lengths_are_balanced_whatever_is_done():
  for batch in bench_batch_shuffling.imbalances(window(np.full((3, 4, 2), 5)), 2):
    assert set(batch.values()) == {1.0}


def test_snake_goes_there_and_back():
  assert bench_batch_shuffling.snake(np.array([1, 2, 3, 4, 5, 6]), 2).tolist() == [[5, 2, 1], [4, 3, 0]]


def test_shares_of_lengths_are_those_of_draws():
  share_L = bench_batch_shuffling.length_shares(3.0, 0.8, 7)
  drawn = np.minimum(np.ceil(np.random.default_rng(0).lognormal(np.log(3), 0.8, 400_000)), 7).astype(int)
  np.testing.assert_allclose(share_L, np.bincount(drawn, minlength=8)[1:] / len(drawn), atol=4e-3)
  assert share_L.sum() == pytest.approx(1, abs=1e-12)
  np.testing.assert_array_equal(bench_batch_shuffling.length_shares(3.0, 0.8, 1), [1])


@pytest.mark.parametrize(("number", "expected"), [(1, 0), (2, math.pi**-0.5), (3, 1.5 * math.pi**-0.5), (10, 1.538753)])
def test_the_mean_maximum_of_normal_numbers(number, expected):
  assert bench_batch_shuffling.largest_of_normals(number) == pytest.approx(expected, abs=1e-6)


def test_the_normal_law_holds_for_many_samples_of_short_histories():
  rng, share_L = np.random.default_rng(2), np.array([0.5, 0.2, 0.3])
  loads = rng.choice([1, 4, 9], size=(300, 16, 200), p=share_L).sum(axis=2)
  measured = np.mean([imbalance(load_P) for load_P in loads])
  assert bench_batch_shuffling.normal_imbalance(share_L, 2, 16, 200) - 1 == pytest.approx(measured - 1, rel=0.05)


def test_a_run_leaves_a_record_and_its_table(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(bench_batch_shuffling, "DEVICES", (2, 8))
  arguments = ["bench_batch_shuffling", f"--record={tmp_path / 'record'}", "--windows=2", "--longest=300"]
  with flagsaver.flagsaver():
    bench_batch_shuffling.main(flags.FLAGS(arguments))
  cases = bench.load_cases(tmp_path / "record")
  assert [(c["devices"], c["sub_batches"], c["work"]) for c in cases] == [
    (devices, room, work) for devices in (2, 8) for room in (2, 4, 8) for work in ("length", "length^2")
  ]
  for case in cases:
    assert case["batches"] == 16
    assert 1 <= case["at_least"]["mean"] <= case["dealt"]["mean"] <= case["at_most"]["mean"]
    assert case["dealt"]["mean"] < case["drawn"]["mean"] <= case["drawn"]["p99"]
    if case["work"] == "length":
      assert case["dealt"] == case["dealt_by_length"]
  text = (tmp_path / "record" / "table.md").read_text()
  assert text == bench_batch_shuffling.table(cases)
  assert capsys.readouterr().out.strip() == text.strip()
  drawn, normal = cases[0]["drawn"], cases[0]["normal"]
  assert text.splitlines()[2].startswith(
    f"| 2 | 2 | length | {drawn['mean']:.3f} ({drawn['p99']:.3f}) | {normal:.3f} | "
  )


def test_wrong_calls_are_refused(tmp_path):
  (tmp_path / "file").touch()
  wrong = {
    "--record is missing": [],
    "'more' is not a flag": ["--record=x", "more"],
    "--windows=0": ["--record=x", "--windows=0"],
    "--log_scale=0": ["--record=x", "--log_scale=0"],
    "--median_length=0.5": ["--record=x", "--median_length=0.5"],
    "--longest=0": ["--record=x", "--longest=0"],
    "--median_length=nan is no finite number": ["--record=x", "--median_length=nan"],
    f"--record={tmp_path}/file: File exists; name a folder": [f"--record={tmp_path}/file"],
    f"--record={tmp_path}/file/x: Not a directory; name a folder": [f"--record={tmp_path}/file/x"],
  }
  found = program.refusals("experiments.bench_batch_shuffling", *wrong.values())
  assert all(said in line for said, line in zip(wrong, found, strict=True)), found
