"""One training step does not depend on how its batch is cut up: over devices, or over micro-batches."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_lm import config_io
from sparse_lm.parallel.mesh import make_mesh
from sparse_lm.parallel.sharding import RULES
from sparse_lm.training.state import make_init, make_train_step

BATCH = 16


def batch_of(config):
  """Uneven documents; the last two sequences are padding, so one of eight devices has no token at all."""
  rng = np.random.default_rng(0)
  shape = (BATCH, config.model.context_length)
  segments = np.cumsum(rng.random(shape) < 0.2, axis=1).astype(np.int32) + 1
  segments[-2:] = 0
  weights = ((rng.random(shape) < 0.8) & (segments > 0)).astype(np.float32)
  weights[:4] = 0  # with four micro-batches, the first has no target
  tokens = rng.integers(0, config.model.vocab_size, (2, *shape)).astype(np.int32)
  return {"inputs_BL": tokens[0], "targets_BL": tokens[1], "segments_BL": segments, "weights_BL": weights}


def one_step(config, *, data=1, fsdp=1, micro_batches=1):
  changes = {"training.batch_size": BATCH, "training.accumulation_steps": micro_batches, "training.warmup_steps": 0}
  changes |= {"parallel.data": data, "parallel.fsdp": fsdp, "sparsity.l1_warmup_start": 0, "sparsity.l1_warmup_end": 0}
  config = config_io.overlay(config, changes)
  mesh = make_mesh(config)
  with jax.set_mesh(mesh):
    spec = NamedSharding(mesh, P(None, *RULES.activations(2)))
    batch = {k: jax.device_put(x.reshape(micro_batches, -1, x.shape[-1]), spec) for k, x in batch_of(config).items()}
    return make_train_step(config)(make_init(config)(), batch)


@pytest.fixture(scope="module")
def alone(base_config):
  return one_step(base_config)


@pytest.mark.parametrize(
  "cut",
  [
    {"data": 2, "fsdp": 4},
    pytest.param({"data": 8}, marks=pytest.mark.slow),
    pytest.param({"micro_batches": 4}, marks=pytest.mark.slow),
    pytest.param({"fsdp": 2, "micro_batches": 2}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_one_step_on_eight_devices_or_in_micro_batches_equals_one_step_on_one(cut, alone, config):
  (state, metrics), (other_state, other_metrics) = alone, one_step(config, **cut)
  assert float(metrics["l1_loss"]) > 0
  for name, value in metrics.items():
    np.testing.assert_allclose(other_metrics[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
  paths = jax.tree_util.tree_flatten_with_path(state.optimizer)[0]
  for (path, a), b in zip(paths, jax.tree.leaves(other_state.optimizer), strict=True):
    # Adam's first moment is the gradient; the parameters themselves move by its sign, which rounding can flip.
    np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-5 * float(np.abs(a).max()) + 1e-12, err_msg=str(path))
