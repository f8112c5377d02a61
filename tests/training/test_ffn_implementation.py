"""The implementation of the feed-forward blocks changes what a run takes, and not what it computes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import losses

from pallas_kernels import device
from pallas_kernels.twell import routing
from sparse_lm import config_io
from sparse_lm.errors import UserError
from sparse_lm.inference import open_model
from sparse_lm.training.language_model import train

TWELL = {"model.ffn_implementation": "twell"}


@pytest.mark.slow
def test_a_run_by_twell_learns_what_the_dense_run_does_and_opens_either_way(config, trained_once, tmp_path):
  train(config_io.overlay(config, TWELL | {"sparsity.sparse_below": 1.0}), tmp_path / "run")  # from the first step on
  found, wanted = losses(tmp_path / "run"), losses(trained_once)
  for step, entry in wanted.items():
    for name in ("loss", "grad_norm", "l1", "l0", "l1_coefficient"):
      assert found[step][name] == pytest.approx(entry[name], rel=1e-4), (step, name)
  tokens_BL, states = jnp.arange(12)[None], []
  for path, asked, used in (
    (tmp_path / "run", None, "twell"),
    (tmp_path / "run", "dense", "dense"),
    (trained_once, "twell", "twell"),
  ):
    opened = open_model(path, ffn_implementation=asked)
    assert opened.config.ffn_implementation == used
    states.append(opened.model(tokens_BL)[0])
  np.testing.assert_allclose(states[0], states[1], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(states[0], states[2], rtol=1e-3, atol=1e-3)


def test_a_run_keeps_its_implementation_but_another_may_start_from_its_parameters(config, finished, tmp_path):
  with pytest.raises(UserError, match=r"config \(model.ffn_implementation: 'dense' -> 'twell'\)"):
    train(config_io.overlay(config, TWELL), finished)
  start = {"checkpoint.restore_path": str(finished / "checkpoints" / "16"), "model.rope_theta": 5.0}
  with pytest.raises(UserError, match=r"another config \(model.rope_theta: 10000.0 -> 5.0\)"):  # and nothing else
    train(config_io.overlay(config, TWELL | start), tmp_path / "new")


def test_a_run_of_before_sparse_below_is_refused_in_one_line(config, finished):
  path = finished / "config.json"
  values = json.loads(path.read_text())
  del values["sparsity"]["sparse_below"]
  path.write_text(json.dumps(values))
  with pytest.raises(UserError, match=r"another config \(sparsity.sparse_below: '\(absent\)' -> 0.01\)") as caught:
    train(config, finished)
  assert "\n" not in str(caught.value)


def mean_distance(a, b):
  """Mean over steps of how far two loss curves are apart, from the first quarter on: they start at the same weights."""
  steps = sorted(a)[len(a) // 4 :]
  return float(np.mean([abs(a[step]["loss"] - b[step]["loss"]) for step in steps]))


@pytest.mark.gpu
def test_200_steps_by_kernels_are_as_near_to_dense_ones_as_dense_ones_in_other_micro_batches(
  config, tmp_path, monkeypatch
):
  """Both round otherwise than the first run, and training amplifies it. Every step takes the sparse route."""
  if (reason := device.missing_hopper()) is not None:
    pytest.skip(f"hopper: {reason}")
  monkeypatch.setattr(routing, "_PAYS_BELOW", 2.0)
  changes = {
    "precision.recipe": "bf16",
    "model.model_width": 128,
    "model.ffn_width": 512,
    "training.batch_size": 16,
    "training.accumulation_steps": 1,
    "training.steps": 200,
    "training.log_every": 1,
    "training.learning_rate": 3e-3,
    "sparsity.l1_coefficient": 1e-2,
    "sparsity.target_l0": 5.0,
    "sparsity.sparse_below": 1.0,
    "checkpoint.every": 200,
  }
  base = config_io.overlay(config, changes)
  curves = {}
  for name, change in (("dense", {}), ("split", {"training.accumulation_steps": 2}), ("twell", TWELL)):
    train(config_io.overlay(base, change), tmp_path / name)
    curves[name] = losses(tmp_path / name)
  assert curves["twell"][200]["l0"] < 32  # of 256 at first
  spread = mean_distance(curves["split"], curves["dense"])
  assert spread > 0
  assert mean_distance(curves["twell"], curves["dense"]) <= 3 * spread
