"""A run by twell trains by dense blocks until its gates are sparse, and stops and goes on anywhere on the way."""

import time
import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from run_helpers import StopAt, losses

from sparse_lm import config_io
from sparse_lm.errors import Preempted
from sparse_lm.models import feedforward
from sparse_lm.parallel.mesh import make_mesh
from sparse_lm.parallel.sharding import RULES
from sparse_lm.training import language_model, loop, meter, recorder, sparsity
from sparse_lm.training.language_model import train
from sparse_lm.training.sparsity import DECISION_EVERY
from sparse_lm.training.state import make_init, make_train_step

# At first 32 of 64 neurons fire. In step 16 some 13 do, far from the limit of 25.6 on either side of it.
TURNS_SPARSE = {
  "model.ffn_implementation": "twell",
  "sparsity.sparse_below": 0.4,
  "training.learning_rate": 1e-2,
  "training.steps": 36,
  "training.eval_every": 12,  # so that the metrics of step 16 are read late, as those of most steps
  "checkpoint.every": 100,
}


@pytest.fixture
def compiled(monkeypatch):
  """Implementations of the steps that were compiled, in order."""
  found, make = [], language_model.make_train_step

  def note(config):
    found.append(config.model.ffn_implementation)
    return make(config)

  monkeypatch.setattr(language_model, "make_train_step", note)
  return found


def phases(workdir):
  """The implementation of each step, by steps in which it does not change: {1: "dense", 17: "twell"}."""
  ffn = {step: entry["ffn"] for step, entry in losses(workdir).items()}
  return {step: kind for step, kind in ffn.items() if ffn.get(step - 1) != kind}


def test_a_run_turns_sparse_once_and_stopped_anywhere_it_reaches_the_same_metrics(config, tmp_path, compiled, capsys):
  """Stopped within the dense phase, at the decision, and within the sparse phase."""
  config = config_io.overlay(config, TURNS_SPARSE)
  train(config, tmp_path / "whole")
  assert phases(tmp_path / "whole") == {1: "dense", DECISION_EVERY + 1: "twell"}
  assert compiled == ["dense", "twell"]
  out = capsys.readouterr().out
  assert out.count("step 16: every layer below 25.6 of 64 neurons (largest ") == out.count("here on") == 1
  assert out.count("compiled the dense training step in ") == out.count("compiled the twell training step in ") == 1

  compiled.clear()
  for last in (11, DECISION_EVERY, 27):
    with pytest.raises(Preempted, match=f"after step {last} of 36"):
      train(config, tmp_path / "run", progress=StopAt(last - 1))
  train(config, tmp_path / "run")
  assert compiled == ["dense", "dense", "twell", "twell"]
  assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_goes_back_to_the_dense_step_and_takes_up_the_sparse_one_again(
  config, tmp_path, compiled, capsys, monkeypatch
):
  """On two devices, so that each step has to take the shards that the other leaves."""
  monkeypatch.setattr(sparsity, "BACK_TO_DENSE", 0.1)  # below what any layer has
  config = config_io.overlay(config, TURNS_SPARSE | {"training.steps": 50, "parallel.fsdp": 2})
  train(config, tmp_path / "run")
  assert phases(tmp_path / "run") == {1: "dense", 17: "twell", 33: "dense", 49: "twell"}
  assert compiled == ["dense", "twell"]
  assert "step 32: a layer above 2.56 of 64 neurons (largest " in capsys.readouterr().out


@pytest.mark.parametrize("implementation", ["dense", "twell"])
def test_a_run_that_needs_one_step_compiles_one(implementation, config, tmp_path, compiled):
  """At the default of sparse_below this short run does not get there."""
  changes = {"model.ffn_implementation": implementation, "training.steps": DECISION_EVERY + 2}
  train(config_io.overlay(config, changes), tmp_path / "run")
  assert compiled == ["dense"]
  said = {entry.get("ffn") for entry in losses(tmp_path / "run").values()}
  assert said == ({None} if implementation == "dense" else {"dense"})


def test_a_dense_run_never_waits_for_a_decision(config, tmp_path, monkeypatch):
  monkeypatch.setattr(loop._Run, "_choose_step", lambda *args: pytest.fail("the loop has read one"))
  train(config_io.overlay(config, {"training.steps": DECISION_EVERY + 2}), tmp_path / "run")


@pytest.mark.slow
def test_with_sparse_below_1_twell_computes_every_step(config, tmp_path, compiled):
  train(config_io.overlay(config, TURNS_SPARSE | {"sparsity.sparse_below": 1.0}), tmp_path / "run")
  assert phases(tmp_path / "run") == {1: "twell"}
  assert compiled == ["twell"]


def test_validation_is_computed_as_the_step_before_it_was(config, tmp_path, monkeypatch):
  used, evaluate = [], language_model._eval_step

  def note(model, batch, **options):
    used.append(model.blocks.feedforward.implementation)
    return evaluate(model, batch, **options)

  monkeypatch.setattr(language_model, "_eval_step", note)
  changes = {"training.eval_every": DECISION_EVERY, "training.eval_batches": 1}
  train(config_io.overlay(config, TURNS_SPARSE | changes), tmp_path / "run")
  assert used == ["dense", "twell", "twell"]  # after steps 16, 32 and 36


def test_the_time_that_the_second_step_takes_to_compile_is_no_training_time(config, tmp_path, monkeypatch):
  late, make = [0.0], language_model.make_train_step

  def make_slowly(config):
    late[0] += 1e6
    return make(config)

  monkeypatch.setattr(language_model, "make_train_step", make_slowly)
  monkeypatch.setattr(meter, "time", types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0]))
  train(config_io.overlay(config, TURNS_SPARSE), tmp_path)
  assert late[0] == 2e6
  assert max(entry["seconds_per_step"] for entry in recorder.read_metrics(tmp_path / "metrics.jsonl")) < 1e3


def test_a_step_is_computed_as_its_config_says_whatever_the_state_was_made_for(config, monkeypatch):
  blocks, twell = [], feedforward._gated_twell

  def note(*args, **options):
    blocks.append("twell")
    return twell(*args, **options)

  monkeypatch.setattr(feedforward, "_gated_twell", note)
  dense, sparse = (config_io.overlay(config, {"model.ffn_implementation": kind}) for kind in ("dense", "twell"))
  mesh = make_mesh(config)
  with jax.set_mesh(mesh):
    names = {"inputs_BL": np.int32, "targets_BL": np.int32, "segments_BL": np.int32, "weights_BL": np.float32}
    layout = NamedSharding(mesh, P(None, *RULES.activations(2)))
    batch = {name: jax.device_put(np.zeros((2, 4, 16), dtype), layout) for name, dtype in names.items()}
    for made_for in (dense, sparse):
      state = make_init(made_for)()
      for asked in (dense, sparse):
        blocks.clear()
        after, _ = make_train_step(asked).trace(state, batch).out_info
        assert bool(blocks) == (asked is sparse)
        assert jax.tree.structure(after) == jax.tree.structure(state)
