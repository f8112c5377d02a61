"""What steers sparsity: warm-up, the L0 controller in a closed loop, revival of dead neurons."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_lm import config_io
from sparse_lm.config import LmConfig, ModelConfig, PrecisionConfig, SparsityConfig
from sparse_lm.models.transformer import Transformer
from sparse_lm.parallel.mesh import make_mesh
from sparse_lm.training import sparsity
from sparse_lm.training.state import make_init, make_train_step

control = jax.jit(sparsity.control, static_argnums=3)


@pytest.mark.parametrize(
  ("start", "end", "shares"),
  [
    (0, 0, {0: 1, 1: 1, 1000: 1}),  # no warm-up: whole from the first step
    (5, 5, {0: 0, 4: 0, 5: 1, 6: 1}),  # a jump
    (0, 4, {0: 0, 1: 0.25, 3: 0.75, 4: 1, 5: 1}),
    (10, 30, {0: 0, 9: 0, 10: 0, 11: 0.05, 20: 0.5, 29: 0.95, 30: 1, 10**6: 1}),
    (3, 4, {2: 0, 3: 0, 4: 1}),
  ],
)
def test_warmup_is_zero_up_to_its_start_whole_from_its_end_and_linear_between(start, end, shares):
  config = LmConfig(sparsity=SparsityConfig(l1_warmup_start=start, l1_warmup_end=end))
  for step, share in shares.items():
    assert float(sparsity.warmup(jnp.int32(step), config)) == pytest.approx(share), step


def test_too_many_firing_neurons_raise_the_coefficient_and_too_few_lower_it():
  for l0, sign in [(40.0, 1), (21.0, 1), (20.0, 0), (19.0, -1), (1.0, -1)]:
    kept, used = control(1e-3, l0, 1.0, 20.0)
    assert np.sign(float(kept) - np.float32(1e-3)) == sign, l0
    assert np.sign(float(used) - float(kept)) == sign, l0


def test_the_correction_is_the_stated_power_of_the_ratio_to_the_target():
  kept, used = control(1e-3, 30.0, 1.0, 20.0)
  np.testing.assert_allclose(kept, 1e-3 * 1.5**0.02, rtol=1e-5)
  np.testing.assert_allclose(used, 1e-3 * 1.5**0.02 * 1.5**0.3, rtol=1e-5)


@pytest.mark.parametrize("l0", [0.0, 1e-9, 0.1])
def test_no_firing_neuron_at_all_lowers_the_coefficient_by_a_bounded_factor(l0):
  kept, used = control(1e-3, l0, 1.0, 20.0)
  np.testing.assert_allclose([kept, used], [1e-3 * np.exp(-0.08), 1e-3 * np.exp(-1.28)], rtol=1e-5)


def test_an_l0_far_above_the_target_counts_as_e_times_it():
  for l0 in (20.0 * np.e, 1e3, 1e9):
    np.testing.assert_allclose(control(1e-3, l0, 1.0, 20.0), [1e-3 * np.exp(0.02), 1e-3 * np.exp(0.32)], rtol=1e-5)


@pytest.mark.parametrize(("l0", "ramp"), [(-1.0, 1.0), (-1.0, 0.0), (500.0, 0.0), (500.0, 0.5), (0.0, 0.999)])
def test_the_controller_waits_for_the_whole_warmup_and_for_the_first_l0(l0, ramp):
  assert np.array_equal(control(1e-3, l0, ramp, 20.0), np.float32([1e-3, 1e-3]))


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("start", [1e-5, 1e-2, 10.0])
@pytest.mark.parametrize("lag", [1, 20, 60])
@pytest.mark.parametrize("power", [0.3, 1.0])
def test_the_controller_brings_a_plant_with_lag_to_its_target_and_keeps_it_there(power, lag, start, noise):
  """log l0 follows a - b log(coefficient) with a delay of `lag` steps; the true coefficient is 1e-2."""
  target, rng = 25.0, np.random.default_rng(0)
  settled = lambda coefficient: np.log(target) - power * np.log(coefficient / 1e-2)
  bound = lambda log_l0: np.clip(log_l0, np.log(0.5), np.log(512))  # of 512 neurons, the last half never dies
  log_l0, kept, history = bound(settled(start)), np.float32(start), []
  for _ in range(1500):
    kept, used = control(kept, np.float32(np.exp(log_l0 + noise * rng.standard_normal())), 1.0, target)
    log_l0 += (bound(settled(float(used))) - log_l0) / lag
    history.append(np.exp(log_l0))
  history = np.array(history)
  np.testing.assert_allclose(history[-100:], target, rtol=0.1)
  outside = history[np.abs(np.log(history / target)) > 0.1]
  assert np.count_nonzero(np.diff(np.sign(np.log(outside / target)))) <= 3, "it swings"
  arrived = np.argmax(np.abs(np.log(history / target)) < 0.1)
  assert history[arrived:].min() > target / 2
  assert history[arrived:].max() < target * 2


@pytest.mark.parametrize(
  ("before", "l0_per_layer", "after"),
  [
    (False, [15.9, 3.0], True),
    (False, [16.0, 3.0], False),  # not below
    (False, [3.0, 40.0], False),  # one layer is enough
    (False, [20.0, 20.0], False),
    (True, [20.0, 20.0], True),  # between the limits nothing changes
    (True, [20.0, 3.0], True),  # not above
    (True, [3.0, 20.1], False),
    (True, [0.0, 0.0], True),
  ],
  ids=str,
)
def test_a_run_turns_sparse_below_one_limit_and_dense_again_above_another(before, l0_per_layer, after):
  config = LmConfig(model=ModelConfig(ffn_width=64), sparsity=SparsityConfig(sparse_below=0.25))
  decide = lambda step, no_tokens: sparsity.decide(before, step, jnp.float32(l0_per_layer), no_tokens, config)
  for step in (16, 48, 16_000):
    assert bool(decide(jnp.int32(step), jnp.bool_(False))) == after
    assert bool(decide(jnp.int32(step), jnp.bool_(True))) == before, "padding alone decides nothing"
  for step in (1, 15, 17, 40):
    assert bool(decide(jnp.int32(step), jnp.bool_(False))) == before, "no step between decides"


def test_at_a_limit_of_all_neurons_a_run_is_sparse_even_if_all_fire():
  config = LmConfig(model=ModelConfig(ffn_width=64), sparsity=SparsityConfig(sparse_below=1.0))
  assert sparsity.decide(jnp.bool_(True), jnp.int32(16), jnp.float32([64.0, 64.0]), jnp.bool_(False), config)


TINY = ModelConfig(vocab_size=16, num_layers=2, model_width=64, num_heads=2, ffn_width=96, init_std=0.4)


def make(ffn_kind):
  model = dataclasses.replace(TINY, ffn_kind=ffn_kind)
  build = lambda: Transformer(model, PrecisionConfig("fp32"), rngs=nnx.Rngs(0))
  config = LmConfig(model=model, sparsity=SparsityConfig(reinit_rate=0.25, reinit_std=0.05))
  return jax.jit(build, compiler_options={"xla_backend_optimization_level": 0})(), config


def leaves(model):
  paths, _ = jax.tree_util.tree_flatten_with_path(model)
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths}


@pytest.mark.parametrize(("ffn_kind", "gate"), [("gated_relu", "w_gate_FD"), ("relu", "w_up_FD")])
def test_revival_redraws_dead_rows_of_the_gate_and_no_other_bit(ffn_kind, gate):
  model, config = make(ffn_kind)
  active = np.random.default_rng(0).random((2, 96)) < 0.5
  before, after = leaves(model), leaves(sparsity.revive_dead(model, jnp.asarray(active), jax.random.key(1), config))
  changed = [name for name in before if not np.array_equal(before[name], after[name])]
  assert len(changed) == 1
  assert gate in changed[0]
  old, new = before[changed[0]], after[changed[0]]
  np.testing.assert_array_equal(new[active], old[active])
  noise = (new[~active].astype(np.float64) - 0.75 * old[~active]) / 0.25
  count = noise.size
  assert abs(noise.mean()) < 5 * 0.05 / np.sqrt(count)
  assert abs(noise.std() / 0.05 - 1) < 5 / np.sqrt(2 * count)
  assert len(np.unique(noise.round(9))) > 0.99 * count, "rows and layers draw their own noise"
  assert abs(np.corrcoef(noise.ravel(), old[~active].ravel())[0, 1]) < 5 / np.sqrt(count)


def test_revival_draws_other_noise_for_another_key_and_the_same_for_the_same():
  model, config = make("relu")
  dead = jnp.zeros((2, 96), bool)
  draw = lambda key: leaves(sparsity.revive_dead(model, dead, jax.random.key(key), config))
  first, again, other = draw(1), draw(1), draw(2)
  (name,) = [name for name in first if "w_up_FD" in name]
  np.testing.assert_array_equal(first[name], again[name])
  assert (first[name] != other[name]).mean() > 0.99


def test_revival_of_nobody_changes_nothing():
  model, config = make("gated_relu")
  after = leaves(sparsity.revive_dead(model, jnp.ones((2, 96), bool), jax.random.key(1), config))
  for name, value in leaves(model).items():
    np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_a_run_reaches_its_target_l0_once_the_warmup_is_over(config):
  """Real training, on tokens of which each has three possible successors."""
  changes = {"model.num_layers": 1, "model.vocab_size": 32, "training.accumulation_steps": 1, "sparsity.target_l0": 8.0}
  changes |= {"training.steps": 300, "training.learning_rate": 1e-2, "sparsity.l1_coefficient": 0.01}
  config = config_io.overlay(config, changes)
  mesh, rng = make_mesh(config), np.random.default_rng(0)
  following = np.array([rng.permutation(32)[:3] for _ in range(32)])
  with jax.set_mesh(mesh):
    state = make_init(config)()
    step = make_train_step(config)
    layout = NamedSharding(mesh, P(None, ("data", "fsdp"), None))
    history, coefficients = [], []
    for _ in range(300):
      tokens = np.empty((1, 8, 17), np.int32)
      tokens[..., 0] = rng.integers(0, 32, (1, 8))
      for n in range(16):
        tokens[..., n + 1] = following[tokens[..., n], rng.integers(0, 3, (1, 8))]
      batch = {"inputs_BL": tokens[..., :-1], "targets_BL": tokens[..., 1:]}
      batch |= {"segments_BL": np.ones((1, 8, 16), np.int32), "weights_BL": np.ones((1, 8, 16), np.float32)}
      state, metrics = step(state, jax.device_put(batch, layout))
      history.append(metrics["l0_per_layer"])
      coefficients.append(metrics["l1_coefficient"])
  history, coefficients = np.ravel(history), np.array(coefficients)
  assert history[0] > 16, "half of 64 neurons fire at first"
  np.testing.assert_array_equal(coefficients[:3], 0)  # the warm-up of the fixture: steps 2 to 6
  np.testing.assert_allclose(coefficients[4], 0.005, rtol=1e-6)
  np.testing.assert_allclose(history[-50:].mean(), 8.0, rtol=0.1)
  assert int(state.first_bad_step) == -1
