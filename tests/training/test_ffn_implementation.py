"""The implementation of the feed-forward blocks changes what a run takes, and not what it computes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import losses

from sparse_lm import config_io
from sparse_lm.errors import UserError
from sparse_lm.inference import open_model
from sparse_lm.training.loop import train

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
