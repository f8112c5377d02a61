"""Students of a teacher: what they learn and from whom, what an adapter corrects, and which teachers are refused."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from run_helpers import StopAt, losses

from sparse_lm import config_io
from sparse_lm.config import LmConfig
from sparse_lm.data.recsys import open_samples
from sparse_lm.data.samples import Teaching
from sparse_lm.errors import Preempted, UserError
from sparse_lm.flags import load_config
from sparse_lm.models.adapter import Adapter
from sparse_lm.models.features import front_end, zero_sinks
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.recsys_config import DistillationConfig, InteractionsConfig, RecsysConfig
from sparse_lm.training import checkpoint, recommender
from sparse_lm.training.adamw import adamw
from sparse_lm.training.recommender import RecommenderTask, train
from sparse_lm.training.recommender_state import AdapterState, make_init, predict
from sparse_lm.training.teacher import open_teacher, teach

STEPS = 12
SMALL = {
  "model.kind": "dlrm",
  "data.synthetic_users": 40,
  "data.synthetic_items": 30,
  "data.validation_fraction": 0.1,
  "data.test_fraction": 0.1,
  "data.longest": 4,
  "training.steps": STEPS,
  "training.batch_size": 32,
  "training.warmup_steps": 2,
  "training.log_every": 1,
  "training.eval_every": 6,
  "checkpoint.every": 6,
}
EARLIER = {"model.kind": "din", "data.validation_fraction": 0.5}


def make_config(**changes):
  """Of a student; names with a double underscore for a dot."""
  changes = {name.replace("__", "."): value for name, value in changes.items()}
  return config_io.overlay(RecsysConfig(data=InteractionsConfig(source="synthetic")), SMALL | changes)


@pytest.fixture(scope="session")
def stale(tmp_path_factory):
  """Work folder of a teacher that has histories, which its students do not have, and 40 % of the events."""
  folder = tmp_path_factory.mktemp("teacher")
  train(config_io.overlay(make_config(), EARLIER), folder)
  return folder


@pytest.fixture
def taught(stale):
  """Returns the config of a student of that teacher."""

  def taught(**changes):
    return make_config(distillation__teacher=str(stale), **changes)

  return taught


def parts_of(config):
  return open_samples(config, lambda line: None)


def taught_samples(config):
  """The training samples of a student, with what its teacher says of them."""
  parts = parts_of(config)
  with jax.set_mesh(jax.make_mesh((1, 1), ("data", "fsdp"), devices=jax.devices()[:1])):
    teaching = teach(open_teacher(config.distillation.teacher), config, parts, lambda line: None)
  return dataclasses.replace(parts.train, teaching=teaching)


def cross_entropy64(logit, target):
  logit, target = np.asarray(logit, np.float64), np.asarray(target, np.float64)
  return np.logaddexp(0, logit) - target * logit


def sigmoid64(logit):
  return 1 / (1 + np.exp(-np.asarray(logit, np.float64)))


def first_step(config, samples, numbers, change=lambda state: state):
  """(state before, batch, state after, metrics), by a step at the full learning rate."""
  batch = jax.tree.map(jnp.asarray, samples.gather(numbers))
  start = change(make_init(config, samples)())
  before = jax.tree.map(np.array, start)  # a step consumes its state
  after, metrics = recommender.make_train_step(config)(start, batch)
  return before, batch, jax.tree.map(np.array, after), metrics


def with_live_adapter(state):
  """Whose last layer is not zero, so that it changes the teacher and has gradients everywhere."""
  shape = state.adapter.model.mlp.layers[-1].w_FD.shape
  live = lambda x: jax.random.normal(jax.random.key(1), shape) if x.shape == shape else x
  model = jax.tree.map(live, state.adapter.model)
  return dataclasses.replace(state, adapter=dataclasses.replace(state.adapter, model=model))


# What a student learns from.


def test_the_loss_is_that_of_the_labels_and_the_weighted_one_of_the_teacher(taught):
  config = taught(distillation__weight=3.0)
  samples = taught_samples(config)
  numbers = np.arange(700, 721)  # fewer than a batch holds
  before, _, _, metrics = first_step(config, samples, numbers)
  chosen = dataclasses.replace(samples, events_N=samples.events_N[numbers], teaching=None)
  logit = predict(before.model, before.tables, chosen, len(numbers), recipe="fp32")
  by_label = cross_entropy64(logit, samples.labels[chosen.events_N]).mean()
  by_teacher = cross_entropy64(logit, sigmoid64(samples.teaching.logit_B[numbers])).mean()
  np.testing.assert_allclose(metrics["loss"], by_label + 3 * by_teacher, rtol=1e-5)
  np.testing.assert_allclose(metrics["label_loss"], by_label, rtol=1e-5)
  np.testing.assert_allclose(metrics["teacher_loss"], by_teacher, rtol=1e-5)


def test_soft_targets_give_the_gradient_of_the_cross_entropy_even_far_out():
  logit, target = jnp.array([0.3, -2.0, 90.0, -90.0, 1.0]), jnp.array([0.25, 1.0, 0.5, 0.0, jnp.nan])
  weight = jnp.array([1.0, 1.0, 1.0, 1.0, 0.0])
  value, grad = jax.value_and_grad(recommender.cross_entropy)(logit, target, weight)
  np.testing.assert_allclose(value, cross_entropy64(logit, target)[:4].mean(), rtol=1e-6)
  np.testing.assert_allclose(grad, [*(sigmoid64(logit) - target)[:4] / 4, 0], rtol=1e-5, atol=1e-7)


def test_of_weight_0_a_teacher_changes_no_bit_of_a_run(taught, tmp_path):
  train(make_config(), tmp_path / "alone")
  train(taught(distillation__weight=0.0), tmp_path / "taught")
  assert losses(tmp_path / "taught") == losses(tmp_path / "alone")
  saved = [checkpoint.read_metadata(tmp_path / run / "checkpoints" / str(STEPS)) for run in ("alone", "taught")]
  assert saved[0]["checksums"] == saved[1]["checksums"]
  assert any(name.startswith("tables/") for name in saved[0]["checksums"])


def test_every_training_event_gets_its_own_prediction_of_the_teacher(stale, taught):
  """As the teacher makes them of its own samples, which are other events in other batches."""
  samples = taught_samples(taught())
  config = config_io.overlay(make_config(), EARLIER)
  parts = parts_of(config)
  abstract = make_init(config, parts.train)()
  state = checkpoint.load(stale / "checkpoints" / str(STEPS), abstract)
  by_event = {}
  for part in (parts.train, parts.validation):
    logits = predict(state.model, state.tables, part, len(part), recipe="fp32")
    by_event |= dict(zip(part.events_N.tolist(), logits))
  expected = [by_event[event] for event in samples.events_N.tolist()]
  assert np.std(expected) > 0.01
  np.testing.assert_allclose(samples.teaching.logit_B, expected, rtol=1e-4, atol=1e-5)
  learnt = set(parts.train.events_N.tolist())
  assert samples.teaching.fresh_B.tolist() == [event not in learnt for event in samples.events_N.tolist()]
  assert 0.4 < samples.teaching.fresh_B.mean() < 0.6  # the later half of 80 %


def test_a_batch_takes_the_teaching_of_its_samples_and_fills_up_with_nothing(taught):
  samples = parts_of(make_config()).validation  # whose events are not counted from 0, as samples are
  number = len(samples)
  samples = dataclasses.replace(samples, teaching=Teaching(np.arange(number, dtype=np.float32), np.ones(number)))
  teaching = samples.gather(np.array([5, 2, number - 1])).teaching
  assert teaching.logit_B.tolist() == [5, 2, number - 1, *[0] * 29]
  assert teaching.fresh_B.tolist() == [1, 1, 1, *[0] * 29]
  assert samples.gather(np.zeros(0, np.int64)).teaching.logit_B.tolist() == [0] * 32


# The adapter.


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_an_adapter_starts_as_the_teacher_to_the_bit(recipe, taught):
  config = taught(distillation__adapter=True)
  samples = parts_of(config).train
  state = make_init(config, samples)()
  batch = jax.tree.map(jnp.asarray, samples.gather(np.arange(32)))
  inputs = front_end(state.tables, zero_sinks(batch, config.model.width), batch, RECIPES[recipe])
  features = inputs.tokens_BFD[0].size + inputs.numeric_BN.shape[1]
  adapter = Adapter(features, 8, RECIPES[recipe], rngs=nnx.Rngs(0))
  logit = jnp.linspace(-80, 80, 32) + 1e-3
  np.testing.assert_array_equal(adapter(logit, inputs), logit)


def test_the_adapter_has_no_gradient_in_the_student_s_embeddings(taught):
  config = taught(distillation__adapter=True)
  samples = taught_samples(config)
  state = with_live_adapter(make_init(config, samples)())
  batch = jax.tree.map(jnp.asarray, samples.gather(np.arange(600, 632)))
  inputs = front_end(state.tables, zero_sinks(batch, config.model.width), batch, RECIPES["fp32"])

  def total(tokens, numeric, logit):
    return jnp.sum(state.adapter.model(logit, inputs._replace(tokens_BFD=tokens, numeric_BN=numeric)))

  logit = batch.teaching.logit_B
  grads = jax.grad(total, argnums=(0, 1, 2))(inputs.tokens_BFD, inputs.numeric_BN, logit)
  assert not np.any(grads[0])
  assert not np.any(grads[1])
  assert np.all(np.isfinite(grads[2]))
  moved = state.adapter.model(logit, inputs._replace(tokens_BFD=inputs.tokens_BFD + 1))
  assert np.all(moved != state.adapter.model(logit, inputs)), "it reads the embeddings"


def test_in_a_step_the_student_and_the_adapter_learn_from_their_own_loss_alone(taught):
  """The student's is that of a teacher who has said what the adapter says; the adapter's knows of no student."""
  config = taught(distillation__adapter=True, training__warmup_steps=0)
  samples = taught_samples(config)
  numbers = np.concatenate([np.flatnonzero(samples.teaching.fresh_B == fresh)[:16] for fresh in (0, 1)])
  before, batch, after, metrics = first_step(config, samples, numbers, with_live_adapter)
  inputs = front_end(before.tables, zero_sinks(batch, config.model.width), batch, RECIPES["fp32"])
  said = np.array(samples.teaching.logit_B)
  said[numbers] = before.adapter.model(batch.teaching.logit_B, inputs)
  assert np.abs(said - samples.teaching.logit_B).max() > 0.1

  plain = dataclasses.replace(samples, teaching=samples.teaching._replace(logit_B=said))
  _, _, expected, expected_metrics = first_step(taught(training__warmup_steps=0), plain, numbers)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  for name in ("loss", "label_loss", "teacher_loss", "grad_norm"):
    close(metrics[name], expected_metrics[name])
  # The optimizer's moments tell how large a gradient was; Adam's first step does not.
  for name in ("model", "optimizer", "tables", "moments"):
    jax.tree.map(close, getattr(after, name), getattr(expected, name))

  adapter, _, fitted = recommender.fit_adapter(before.adapter, inputs, batch, adamw(config.training))
  jax.tree.map(close, after.adapter, adapter)
  close(metrics["adapter_grad_norm"], fitted["adapter_grad_norm"])
  fresh = cross_entropy64(said[numbers], batch.label_B)[16:]
  close(metrics["adapter_loss"], fresh.mean())


def test_labels_that_the_teacher_was_trained_on_teach_the_adapter_nothing(taught):
  config = taught(distillation__adapter=True, training__warmup_steps=0)
  samples = taught_samples(config)
  state = with_live_adapter(make_init(config, samples)())
  batch = jax.tree.map(jnp.asarray, samples.gather(np.flatnonzero(samples.teaching.fresh_B == 0)[:32]))
  inputs = front_end(state.tables, zero_sinks(batch, config.model.width), batch, RECIPES["fp32"])
  after, _, metrics = recommender.fit_adapter(state.adapter, inputs, batch, adamw(config.training))
  jax.tree.map(np.testing.assert_array_equal, after.model, state.adapter.model)
  assert (metrics["adapter_loss"], metrics["adapter_grad_norm"]) == (0, 0)


def test_an_adapter_fits_shifted_labels_better_than_the_raw_teacher(taught):
  """Fresh labels follow half of the teacher's logit minus 1; those that are not fresh would teach the opposite."""
  config = taught(distillation__adapter=True)
  samples, rng = parts_of(config).train, np.random.default_rng(0)
  number = 2048
  logit = rng.normal(scale=2, size=number).astype(np.float32)
  fresh = (np.arange(number) % 2).astype(np.float32)
  truth = np.where(fresh == 1, 0.5 * logit - 1, -logit + 4)
  label = (rng.random(number) < sigmoid64(truth)).astype(np.float32)
  state = make_init(config, samples)()
  batch = jax.tree.map(jnp.asarray, dataclasses.replace(samples, batch_size=number).gather(np.arange(number)))
  batch = batch._replace(label_B=jnp.asarray(label), teaching=Teaching(jnp.asarray(logit), jnp.asarray(fresh)))
  inputs = front_end(state.tables, zero_sinks(batch, config.model.width), batch, RECIPES["fp32"])
  optimizer = optax.adam(0.003)
  adapter = AdapterState(state.adapter.model, optimizer.init(state.adapter.model))
  fit = jax.jit(lambda adapter: recommender.fit_adapter(adapter, inputs, batch, optimizer))
  for _ in range(200):
    adapter, _, _ = fit(adapter)
  new_logit = jnp.asarray(rng.normal(scale=2, size=number), jnp.float32)
  true = sigmoid64(0.5 * new_logit - 1)
  best, raw, adapted = (
    cross_entropy64(z, true).mean() for z in (0.5 * new_logit - 1, new_logit, adapter.model(new_logit, inputs))
  )
  assert adapted - best < 0.2 * (raw - best)


# Whole runs.


def test_a_stopped_run_reaches_the_same_metrics_with_the_same_teacher_alone(taught, stale, tmp_path):
  config = taught(distillation__adapter=True)
  last = train(config, tmp_path / "whole")
  assert {"label_loss", "teacher_loss", "adapter_loss", "test_ne"} <= set(last)
  with pytest.raises(Preempted):
    train(config, tmp_path / "run", progress=StopAt(7))
  other = altered(stale, tmp_path / "other", lambda tree: jax.tree.map(lambda x: 2 * x, tree))
  with pytest.raises(UserError, match=r"had another teacher \(fingerprint [0-9a-f]{12}, now [0-9a-f]{12}\)"):
    train(config_io.overlay(config, {"distillation.teacher": str(other)}), tmp_path / "run")
  moved = shutil.copytree(stale, tmp_path / "moved")
  train(config_io.overlay(config, {"distillation.teacher": str(moved)}), tmp_path / "run")
  assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_run_without_a_teacher_does_not_go_on_with_one(taught, tmp_path):
  train(make_config(), tmp_path)
  with pytest.raises(UserError, match=r"had another teacher \(fingerprint none, now [0-9a-f]{12}\)"):
    train(taught(), tmp_path)


# Teachers that are refused.


def altered(stale, folder, change=lambda tree: tree, **metadata):
  """Folder of a copy of a teacher, with other parameters or other words about it."""
  config = config_io.overlay(make_config(), EARLIER)
  path = stale / "checkpoints" / str(STEPS)
  tree = checkpoint.load(path, make_init(config, parts_of(config).train)())
  saver = checkpoint.Saver(folder / "checkpoints", 1)
  tree = dataclasses.replace(tree, model=change(tree.model))
  saver.save(STEPS, tree, checkpoint.read_metadata(path) | metadata)
  saver.wait()
  return folder


def refused(config, said):
  with pytest.raises(UserError, match=said) as caught:
    RecommenderTask(config, lambda line: None)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"data__synthetic_seed": 1}, {"data__synthetic_users": 41}])
def test_a_teacher_of_other_interactions_is_refused(changes, taught):
  refused(
    taught(**changes), r"^distillation\.teacher='.*' was trained on other interactions than this run; give one of"
  )


def test_a_teacher_that_predicts_another_label_is_refused(taught):
  refused(taught(data__positive_from=3.0), r"predicts labels of data\.positive_from=4\.0, but this run has 3\.0; make")


def test_a_teacher_that_was_trained_on_an_event_that_judges_the_student_is_refused(taught):
  """The teacher has the first 40 % of the events in time; it may have no second that its student is judged by."""
  log = parts_of(make_config()).train.log
  number = len(log)
  held_out = 0.5 + 2 / number  # of 40 %, two events fewer
  config = taught(data__validation_fraction=held_out)
  leaked = len(parts_of(config_io.overlay(make_config(), EARLIER)).train) - len(parts_of(config).train)
  assert 1 <= leaked <= 2
  refused(
    config, rf"was trained on {leaked} of the [0-9,]+ events that judge this run; give one that was trained on earl"
  )
  refused(taught(data__split="user_time"), "events that judge this run")


def test_a_teacher_of_the_same_events_teaches_but_leaves_an_adapter_no_fresh_label(taught):
  samples = taught_samples(taught(data__validation_fraction=0.5))
  assert not samples.teaching.fresh_B.any()
  config = taught(data__validation_fraction=0.5, distillation__adapter=True)
  refused(
    config, r"distillation\.adapter=True, but .* was trained on all [0-9,]+ training events, and no label is fresh"
  )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_teacher_that_predicts_no_number_is_refused(value, taught, stale, tmp_path):
  spoil = lambda model: jax.tree.map(lambda x: jnp.full_like(x, value), model)
  folder = altered(stale, tmp_path / "spoilt", spoil)
  config = config_io.overlay(taught(), {"distillation.teacher": str(folder)})
  refused(config, r"predicts (nan|inf) for ([0-9,]+) of \2 events, first for event 0; give a run that did not diverge")


def test_a_teacher_that_is_no_finished_run_of_a_recommender_is_refused(stale, tmp_path):
  with_teacher = lambda folder: make_config(distillation__teacher=str(folder))
  refused(with_teacher(tmp_path / "missing"), r"missing' holds no checkpoint; give the --workdir of a finished run")
  refused(with_teacher(stale / "checkpoints" / str(STEPS)), "holds no checkpoint")
  unfinished = config_io.to_dict(config_io.overlay(make_config(), EARLIER | {"training.steps": STEPS + 1}))
  folder = altered(stale, tmp_path / "unfinished", config=unfinished)
  refused(with_teacher(folder), rf"is at step {STEPS} of {STEPS + 1}; finish that run first")
  folder = altered(stale, tmp_path / "language", config=config_io.to_dict(LmConfig()))
  refused(with_teacher(folder), "holds no run of a recommender of this version: model.vocab_size is unknown")


def test_a_damaged_teacher_is_refused(stale, taught, tmp_path):
  folder = shutil.copytree(stale, tmp_path / "damaged")
  arrays = max((path for path in (folder / "checkpoints" / str(STEPS)).rglob("*") if path.is_file()), key=size_of)
  content = bytearray(arrays.read_bytes())
  for place in range(len(content) // 4, len(content), 997):
    content[place] ^= 255
  arrays.write_bytes(content)
  refused(
    config_io.overlay(taught(), {"distillation.teacher": str(folder)}), r"is damaged \(.*\); restore it from a copy"
  )


def size_of(path):
  return path.stat().st_size


# The config.


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    ({"teacher": ""}, r"^distillation\.teacher='' names nothing"),
    ({"weight": -0.1}, r"^distillation\.weight=-0\.1 must be 0 or more, and finite$"),
    ({"weight": float("nan")}, r"^distillation\.weight=nan must be"),
    ({"weight": float("inf")}, r"^distillation\.weight=inf must be"),
    ({"adapter_width": 0}, r"^distillation\.adapter_width=0 must be at least 1$"),
    ({"adapter": True}, r"^distillation\.adapter=True, but distillation\.teacher=None; name a teacher"),
  ],
)
def test_a_config_that_cannot_work_is_refused_in_one_line(fields, said):
  config = RecsysConfig(distillation=DistillationConfig(**fields))
  with pytest.raises(UserError, match=said):
    config.validate()


@pytest.mark.parametrize("fields", [{}, {"weight": 0.0}, {"teacher": "a", "adapter": True, "adapter_width": 1}])
def test_the_smallest_values_are_allowed(fields):
  RecsysConfig(distillation=DistillationConfig(**fields)).validate()


def test_the_configs_of_a_teacher_and_its_students_fit_together(monkeypatch):
  root = Path(__file__).parents[2]
  monkeypatch.syspath_prepend(root)
  load = lambda role: load_config(f"{root}/configs/recsys/distill.py:{role}", RecsysConfig)
  configs = {role: load(role) for role in ("teacher", "alone", "student", "adapter")}
  for config in configs.values():
    config.validate()
  assert configs["teacher"].distillation == DistillationConfig()
  assert configs["teacher"].data.validation_fraction > configs["alone"].data.validation_fraction
  fields = lambda role: {
    name for name, _, _ in config_io.differences(*(config_io.to_dict(configs[one]) for one in ("alone", role)))
  }
  assert fields("student") == {"distillation.teacher"}
  assert fields("adapter") == {"distillation.teacher", "distillation.adapter"}
