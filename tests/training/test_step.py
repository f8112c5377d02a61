"""The training step against float64: its gradient, its optimiser, its layout, and what it says of a bad step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_lm.config import DataConfig, LmConfig, ModelConfig, ParallelConfig, PrecisionConfig, SparsityConfig
from sparse_lm.config import TrainingConfig as Training
from sparse_lm.models.transformer import Transformer
from sparse_lm.parallel.mesh import make_mesh
from sparse_lm.parallel.sharding import RULES
from sparse_lm.training import losses, state

MODEL = ModelConfig(
  vocab_size=32,
  context_length=8,
  num_layers=2,
  model_width=16,
  num_heads=2,
  num_kv_heads=1,
  ffn_width=24,
  init_std=0.4,
  tie_embeddings=False,
)
COEFFICIENT, MULTIPLIER, CLIP, RATE, DECAY = 0.05, 2.0, 0.5, 0.125, 0.25
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def config_of(*, micro_batches=1, fsdp=1):
  """No momentum, so the first moment is the clipped gradient itself; a large epsilon, so no sign of noise matters."""
  training = Training(steps=10, batch_size=8, accumulation_steps=micro_batches, learning_rate=RATE, warmup_steps=0)
  training = dataclasses.replace(training, beta1=0.0, epsilon=1e-2, clip_norm=CLIP, weight_decay=DECAY)
  config = LmConfig(
    model=MODEL,
    precision=PrecisionConfig("fp32"),
    sparsity=SparsityConfig(l1_coefficient=COEFFICIENT, l1_multiplier=MULTIPLIER, reinit_rate=0.5, reinit_std=0.1),
    data=DataConfig(document_mask=True),
    training=training,
    parallel=ParallelConfig(data=1, fsdp=fsdp),
  )
  config.validate()
  return config


def batch_of():
  """Sequences 0-3 of uneven documents and targets, 4-5 without any target, 6 short, 7 padding only."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 32, (2, 8, 8)).astype(np.int32)
  segments = 1 + np.cumsum(rng.random((8, 8)) < 0.3, axis=1).astype(np.int32)
  segments[6, 3:], segments[7] = 0, 0
  weights = ((rng.random((8, 8)) < [[0.2], [0.9], [0.5], [1], [0], [0], [1], [0]]) & (segments > 0)).astype(np.float32)
  return {"inputs_BL": tokens[0], "targets_BL": tokens[1], "segments_BL": segments, "weights_BL": weights}


class Compiled:
  """A compiled step on its mesh."""

  def __init__(self, config):
    self.config, self.mesh = config, make_mesh(config)
    self.layout = NamedSharding(self.mesh, P(None, *RULES.activations(2)))
    self.start = self.fresh()
    with jax.set_mesh(self.mesh):
      lowered = state.make_train_step(config).lower(self.start, self.put(batch_of()))
      self.step = lowered.compile(FAST)

  def fresh(self):
    """A new state, whose neuron 3 of layer 0 and neuron 5 of layer 1 have gates of zero, so they are dead."""
    with jax.set_mesh(self.mesh):
      start = state.make_init(self.config)()
      dead = np.zeros((2, 24, 1), bool)
      dead[0, 3], dead[1, 5] = True, True
      kill = lambda path, w: jnp.where(dead, 0, w) if "w_gate_FD" in jax.tree_util.keystr(path) else w
      return dataclasses.replace(start, model=jax.tree_util.tree_map_with_path(kill, start.model))

  def put(self, batch):
    split = lambda x: x.reshape(self.config.training.accumulation_steps, -1, 8)
    return {name: jax.device_put(split(x), self.layout) for name, x in batch.items()}

  def __call__(self, start, batch):
    with jax.set_mesh(self.mesh):
      return self.step(start, self.put(batch))


@pytest.fixture(scope="module")
def one():
  """One device, one batch."""
  return Compiled(config_of())


@pytest.fixture(scope="module")
def two():
  """One device, two micro-batches."""
  return Compiled(config_of(micro_batches=2))


@pytest.fixture(scope="module")
def eight():
  """Eight devices that share each weight."""
  return Compiled(config_of(fsdp=8))


@pytest.fixture(scope="module")
def result(one):
  """State and metrics after the first step, on one device."""
  return jax.device_get(one(one.fresh(), batch_of()))


def leaves(tree):
  """Arrays by their paths."""
  paths, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths}


def adam_of(train_state):
  """Adam's part of the optimiser's state."""
  is_adam = lambda part: hasattr(part, "mu")
  (adam,) = [part for part in jax.tree.leaves(train_state.optimizer, is_leaf=is_adam) if is_adam(part)]
  return adam


def moments(train_state):
  """First and second moments, by parameter."""
  return leaves(adam_of(train_state).mu), leaves(adam_of(train_state).nu)


def float64(model):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model)))


def objective64(parameters, batch):
  """The paper's objective over the global batch, a sequence at a time."""
  nats, targets, tokens, l1 = 0.0, 0.0, 0, 0.0
  for b in range(8):
    _, logits, layers = oracle.decoder(parameters, batch["inputs_BL"][b], MODEL, batch["segments_BL"][b])
    real = batch["segments_BL"][b] > 0
    for n in np.flatnonzero(batch["weights_BL"][b]):
      nats += np.log(np.exp(logits[n]).sum()) - logits[n][batch["targets_BL"][b, n]]
      targets += 1
    tokens += real.sum()
    l1 += np.mean([np.abs(h[real]).sum() for h, _ in layers])
  return nats / targets, COEFFICIENT * MULTIPLIER * l1 / tokens


def assert_same_step(other, result):
  """Metrics, optimiser and parameters, to what float32 sums in another order may differ by."""
  (state, metrics), (other_state, other_metrics) = result, jax.device_get(other)
  for name, value in metrics.items():
    np.testing.assert_allclose(other_metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
  expected = leaves(state)
  for name, value in leaves(other_state).items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=2e-6, err_msg=name)


def test_loss_of_a_step_equals_a_float64_oracle_over_the_global_batch(one, result):
  cross_entropy, l1 = objective64(float64(one.start.model), batch_of())
  metrics = result[1]
  np.testing.assert_allclose(metrics["cross_entropy"], cross_entropy, rtol=1e-5)
  np.testing.assert_allclose(metrics["l1_loss"], l1, rtol=1e-5)
  np.testing.assert_allclose(metrics["loss"], cross_entropy + l1, rtol=1e-5)
  assert l1 > 0.1 * cross_entropy, "the test would not see an L1 term that is wrong"


def test_activations_of_a_step_are_counted_over_real_tokens_as_a_float64_oracle_counts_them(one, result):
  batch, parameters, fires = batch_of(), float64(one.start.model), []
  for b in range(8):
    _, _, layers = oracle.decoder(parameters, batch["inputs_BL"][b], MODEL, batch["segments_BL"][b])
    fires.append(np.stack([f for _, f in layers])[:, batch["segments_BL"][b] > 0])
  fires = np.concatenate(fires, axis=1)  # layer, real token, neuron
  np.testing.assert_allclose(result[1]["l0_per_layer"], fires.sum(2).mean(1), rtol=1e-6)
  np.testing.assert_array_equal(result[1]["dead_per_layer"], (~fires.any(1)).sum(1))
  np.testing.assert_allclose(result[0].l0, fires.sum(2).mean(), rtol=1e-6)


def test_dead_gates_are_redrawn_otherwise_in_another_step(one, result):
  """The optimiser counts for itself, so a state whose step alone is later differs in the noise alone."""
  later = dataclasses.replace(one.fresh(), step=jnp.int32(7))
  after = leaves(jax.device_get(one(later, batch_of())[0].model))
  for name, value in leaves(result[0].model).items():
    differs = after[name] != value
    if "w_gate_FD" in name:
      assert differs[0, 3].all()
      assert differs[1, 5].all()
      differs[0, 3], differs[1, 5] = False, False
    assert not differs.any(), name


def test_gradient_of_a_step_equals_differences_of_the_float64_oracle(one, result):
  """Along random directions, one for each kind of parameter; the gradient is read from Adam before its clipping."""
  parameters, rng = float64(one.start.model), np.random.default_rng(1)
  gradient = {name: mu.astype(np.float64) * result[1]["grad_norm"] / CLIP for name, mu in moments(result[0])[0].items()}
  assert result[1]["grad_norm"] > CLIP
  flat, tree = jax.tree_util.tree_flatten(parameters)
  assert len(flat) == len(gradient)
  paths = ["".join(f".{key.key}" for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(parameters)[0]]
  for n, path in enumerate(paths):
    (name,) = [name for name in gradient if name.replace(".value", "").endswith(path)]
    direction = rng.standard_normal(flat[n].shape) * (np.abs(flat[n]) > 0)  # the dead stay dead
    ends = [tree.unflatten([*flat[:n], flat[n] + t * direction, *flat[n + 1 :]]) for t in (-1e-6, 1e-6)]
    below, above = (sum(objective64(end, batch_of())) for end in ends)
    difference = (above - below) / 2e-6
    size = np.linalg.norm(gradient[name]) * np.linalg.norm(direction)
    assert abs(np.sum(gradient[name] * direction) - difference) < 1e-4 * size, path


def test_parameters_move_by_adamw_of_the_clipped_gradient_and_dead_gates_alone_are_redrawn(one, result):
  before, after, (mu, nu) = leaves(one.start.model), leaves(result[0].model), moments(result[0])
  norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in mu.values()))
  np.testing.assert_allclose(norm, CLIP, rtol=1e-5)
  for name, old in before.items():
    g = mu[name].astype(np.float64)
    np.testing.assert_allclose(nu[name], 0.05 * g * g, rtol=1e-4, atol=1e-12)
    decay = 0 if "scale" in name else DECAY
    expected = old - RATE * (g / (np.abs(g) + 1e-2) + decay * old)
    moved = ~np.isclose(after[name], expected, rtol=1e-4, atol=1e-6)
    if "w_gate_FD" in name:
      assert moved[0, 3].all()
      assert moved[1, 5].all()
      moved[0, 3], moved[1, 5] = False, False
    assert not moved.any(), name


def test_two_micro_batches_give_the_step_of_the_whole_batch(two, result):
  assert_same_step(two(two.fresh(), batch_of()), result)


@pytest.mark.parametrize("order", ["no_target_first", "no_target_last"])
def test_a_micro_batch_without_any_target_or_token_adds_nothing_and_no_nan(one, two, order):
  """F37: the first or the last four sequences are padding only."""
  batch = batch_of()
  empty = slice(0, 4) if order == "no_target_first" else slice(4, 8)
  for name in ("weights_BL", "segments_BL"):
    batch[name][empty] = 0
  if order == "no_target_first":
    batch["segments_BL"][6] = 1
    batch["weights_BL"][6] = [1, 0, 0, 0, 0, 0, 0, 1]
  expected = jax.device_get(one(one.fresh(), batch))
  assert expected[1]["cross_entropy"] > 0
  assert_same_step(two(two.fresh(), batch), expected)


def test_a_batch_of_padding_only_is_a_step_without_gradient_and_not_a_bad_one(one):
  batch = {name: np.zeros_like(x) for name, x in batch_of().items()}
  after, metrics = jax.device_get(one(one.fresh(), batch))
  assert (metrics["loss"], metrics["grad_norm"], metrics["first_bad_step"]) == (0, 0, -1)
  assert after.l0 == one.start.l0
  for name, value in leaves(after.model).items():
    if "w_gate" in name:  # nobody is dead: weights decay and no more
      decay = 1 - metrics["learning_rate"] * one.config.training.weight_decay
      np.testing.assert_allclose(value, leaves(one.start.model)[name] * decay, rtol=1e-5, err_msg=name)
    assert np.isfinite(value).all(), name


def test_one_step_on_eight_devices_equals_one_step_on_one(eight, result):
  """Each device has one sequence: two of them have no target, and the last has padding only."""
  assert_same_step(eight(eight.fresh(), batch_of()), result)


def test_eight_devices_start_from_the_same_weights_as_one_device(one, eight):
  for name, value in leaves(one.start).items():
    np.testing.assert_array_equal(leaves(eight.start)[name], value, err_msg=name)


def test_weights_and_moments_stay_shared_along_the_width_after_a_step(eight):
  after, _ = eight(eight.fresh(), batch_of())
  specs = lambda tree: [leaf.sharding.spec for leaf in jax.tree.leaves(tree)]
  assert specs(after) == specs(eight.start)
  for part in (after.model, adam_of(after).mu, adam_of(after).nu):
    for path, leaf in jax.tree_util.tree_flatten_with_path(part)[0]:
      assert leaf.addressable_shards[0].data.size * 8 == leaf.size, path


def test_shared_weights_are_gathered_and_gradients_reduced_without_an_all_to_all(one, eight):
  text = eight.step.as_text()
  assert " all-gather" in text
  assert " reduce-scatter" in text or " all-reduce" in text
  assert "all-to-all" not in text
  for collective in ("all-gather", "all-reduce", "reduce-scatter", "collective-permute"):
    assert collective not in one.step.as_text()


def test_a_single_micro_batch_costs_no_loop(one, two):
  loops = [step.step.as_text().count(" while(") for step in (one, two)]
  assert loops[0] + 1 == loops[1]


def poisoned(train_state):
  """The state with one NaN weight."""
  first = np.arange(MODEL.model_width) == 0
  break_one = lambda path, w: jnp.where(first, jnp.nan, w) if "final_norm" in jax.tree_util.keystr(path) else w
  return dataclasses.replace(train_state, model=jax.tree_util.tree_map_with_path(break_one, train_state.model))


def test_the_first_bad_step_is_named_and_stays_named_even_after_the_model_has_recovered(one):
  train_state, metrics = one(one.fresh(), batch_of())
  assert int(metrics["first_bad_step"]) == -1
  with jax.set_mesh(one.mesh):
    train_state = poisoned(train_state)
  train_state, metrics = one(train_state, batch_of())
  assert (int(metrics["first_bad_step"]), int(train_state.first_bad_step)) == (2, 2)
  train_state, metrics = one(train_state, batch_of())
  assert int(metrics["first_bad_step"]) == 2
  healthy = one.fresh()
  train_state = dataclasses.replace(healthy, step=train_state.step, first_bad_step=train_state.first_bad_step)
  train_state, metrics = one(train_state, batch_of())
  assert np.isfinite(metrics["loss"])
  assert (int(train_state.step), int(train_state.first_bad_step)) == (4, 2)


def test_an_infinite_gradient_is_bad_though_the_loss_is_finite(one):
  with jax.set_mesh(one.mesh):
    start = dataclasses.replace(one.fresh(), l1_coefficient=jnp.float32(1e30))
  train_state, metrics = one(start, batch_of())
  assert np.isfinite(metrics["loss"])
  assert not np.isfinite(metrics["grad_norm"])
  assert int(train_state.first_bad_step) == 1


def test_learning_rate_rises_from_zero_and_falls_as_a_cosine_to_zero_when_all_steps_are_done():
  config = LmConfig(training=Training(steps=20, learning_rate=0.5, warmup_steps=4))
  schedule = state.learning_rate(config.training)
  expected = [0.5 * n / 4 for n in range(4)] + [0.25 * (1 + np.cos(np.pi * n / 16)) for n in range(17)]
  np.testing.assert_allclose([schedule(n) for n in range(21)], expected, atol=1e-7)
  assert schedule(0) == 0
  assert abs(schedule(20)) < 1e-8


def test_without_warmup_the_first_step_has_the_whole_learning_rate():
  assert state.learning_rate(Training(learning_rate=0.5, warmup_steps=0))(0) == 0.5


def test_three_steps_of_the_optimizer_equal_adamw_written_in_float64():
  """Gradients above, below and far above the clip norm; the first step is in the warm-up and moves nothing."""
  training = Training(steps=5, learning_rate=0.1, warmup_steps=1, beta1=0.8, beta2=0.9, epsilon=1e-3)
  training = dataclasses.replace(training, weight_decay=0.3, clip_norm=2.0)
  config = LmConfig(model=MODEL, precision=PrecisionConfig("fp32"), training=training)
  build = lambda: Transformer(MODEL, config.precision, rngs=nnx.Rngs(0))
  model = jax.jit(build, compiler_options=FAST)()
  optimizer, rng = state.make_optimizer(config), np.random.default_rng(0)
  optimizer_state, update = optimizer.init(model), jax.jit(optimizer.update, compiler_options=FAST)
  w = {name: value.astype(np.float64) for name, value in leaves(model).items()}
  m, v = ({name: np.zeros_like(x) for name, x in w.items()} for _ in range(2))
  ranks = {name: x.ndim for name, x in w.items() if "scale" in name}
  assert sorted(ranks.values()) == [1, 2, 2], "scales of blocks are stacked, and still no matrices"
  for step, (size, rate) in enumerate([(3.0, 0.0), (1e-3, 0.1), (50.0, 0.05 * (1 + np.cos(np.pi / 4)))]):
    gradients = jax.tree.map(lambda x, size=size: jnp.float32(size * rng.standard_normal(x.shape)), model)
    updates, optimizer_state = update(gradients, optimizer_state, model)
    model = jax.tree.map(jnp.add, model, updates)
    g = {name: value.astype(np.float64) for name, value in leaves(gradients).items()}
    norm = np.sqrt(sum((x**2).sum() for x in g.values()))
    assert (norm > 2) == (step != 1)
    for name in w:
      clipped = g[name] * min(1, 2.0 / norm)
      m[name] = 0.8 * m[name] + 0.2 * clipped
      v[name] = 0.9 * v[name] + 0.1 * clipped**2
      direction = m[name] / (1 - 0.8 ** (step + 1)) / (np.sqrt(v[name] / (1 - 0.9 ** (step + 1))) + 1e-3)
      w[name] = w[name] - rate * (direction + (0 if name in ranks else 0.3) * w[name])
    for name, value in leaves(model).items():
      np.testing.assert_allclose(value, w[name], rtol=1e-5, atol=1e-6, err_msg=f"{name} after step {step}")


def test_the_batch_of_these_tests_holds_every_odd_case():
  batch, sizes = batch_of(), losses.totals(batch_of())
  targets, tokens = batch["weights_BL"].sum(1), (batch["segments_BL"] > 0).sum(1)
  assert targets.tolist()[4:6] == [0, 0]
  assert (tokens[4], tokens[5], tokens[6], tokens[7]) == (8, 8, 3, 0)
  assert targets[:4].sum() != targets[4:].sum()
  assert len(set(targets[:4])) > 1
  assert len(set(batch["segments_BL"][:6].max(1))) > 2, "documents are uneven"
  assert (sizes.targets, sizes.tokens) == (targets.sum(), tokens.sum())
