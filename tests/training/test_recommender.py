"""Training of recommenders: what a step does to tables, what a run learns, and that it goes on where it stopped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import StopAt, losses

from sparse_lm import config_io
from sparse_lm.config import LmConfig
from sparse_lm.data.recsys import open_samples
from sparse_lm.errors import NonFiniteError, Preempted, UserError
from sparse_lm.flags import load_config
from sparse_lm.inference.opening import open_model
from sparse_lm.models.features import Lookup, front_end, lookups, zero_sinks
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.recsys_config import InteractionsConfig, RecsysConfig
from sparse_lm.training import language_model, recommender
from sparse_lm.training.recommender import train


@pytest.fixture
def config():
  changes = {
    "model.kind": "dlrm",
    "data.synthetic_users": 40,
    "data.synthetic_items": 30,
    "data.longest": 4,
    "training.steps": 30,
    "training.batch_size": 32,
    "training.warmup_steps": 2,
    "training.log_every": 1,
    "training.eval_every": 10,
    "checkpoint.every": 10,
  }
  return config_io.overlay(RecsysConfig(data=InteractionsConfig(source="synthetic")), changes)


def test_a_run_learns_and_says_how_well(config, tmp_path):
  last = train(config_io.overlay(config, {"training.steps": 60}), tmp_path)
  assert last["validation_ne"] < 1  # of always predicting the mean
  assert last["validation_bayes_ne"] < last["validation_ne"]
  assert 0.5 < last["validation_auc"] < 1
  assert {"test_loss", "test_ne", "test_auc", "test_gauc", "test_calibration", "samples_per_second"} <= set(last)
  assert "test_loss" not in losses(tmp_path)[10]


@pytest.mark.slow
def test_stopped_anywhere_a_run_reaches_the_same_metrics(config, tmp_path):
  train(config, tmp_path / "whole")
  for step in (4, 17):
    with pytest.raises(Preempted):
      train(config, tmp_path / "run", progress=StopAt(step))
  train(config, tmp_path / "run")
  assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_run_goes_on_with_its_own_config_and_interactions_alone(config, tmp_path):
  train(config, tmp_path)
  with pytest.raises(UserError, match=r"another config \(tables.learning_rate: 0.05 -> 0.1\)"):
    train(config_io.overlay(config, {"tables.learning_rate": 0.1}), tmp_path)
  assert train(config_io.overlay(config, {"training.log_every": 7}), tmp_path)["step"] == 30


def test_without_validation_the_test_part_is_still_judged_at_the_end(config, tmp_path):
  last = train(config_io.overlay(config, {"data.validation_fraction": 0.0}), tmp_path)
  assert "test_ne" in last
  assert "validation_ne" not in last


def test_a_model_that_has_become_nan_in_its_last_step_is_no_success(config, tmp_path):
  rates = {"training.learning_rate": 1e38, "tables.learning_rate": 1e38, "training.warmup_steps": 0}
  with pytest.raises(NonFiniteError, match=r"the validation loss is NaN or infinite after step 1; .*learning_rate"):
    train(config_io.overlay(config, rates | {"training.steps": 1, "model.kind": "dlrm"}), tmp_path)


@pytest.mark.parametrize(("part", "other"), [("validation", "test"), ("test", "validation")])
def test_an_evaluation_that_would_see_one_label_alone_is_refused_before_training(part, other, config, tmp_path):
  config = config_io.overlay(config, {f"data.{other}_fraction": 0.0, "training.eval_batches": 1})
  samples = getattr(open_samples(config, print), part)
  labels_N = samples.labels[samples.events_N]
  alike = int(np.argmax(labels_N != labels_N[0]))  # that many events, then one of the other label
  too_few = config_io.overlay(config, {"training.batch_size": alike})
  with pytest.raises(UserError, match=rf"^training\.eval_batches=1 judges {alike} of {len(samples)} {part} events, "):
    train(too_few, tmp_path)
  assert not (tmp_path / "metrics.jsonl").exists()
  enough = config_io.overlay(config, {"training.batch_size": alike + 1, "training.steps": 3})
  assert np.isfinite(train(enough, tmp_path)[f"{part}_ne"])


def test_a_teacher_that_is_certain_has_an_ne_too(config, tmp_path):
  """A single item of one category: with a long history the click's probability rounds to 1."""
  last = train(config_io.overlay(config, {"data.synthetic_items": 1, "data.synthetic_users": 100}), tmp_path)
  assert 0 < last["validation_bayes_ne"] < 1


@pytest.mark.parametrize(
  ("source", "changes"),
  [
    ("synthetic", {"positive_from": 3.0}),
    ("synthetic", {"label": "is_like"}),
    ("movielens_100k", {"synthetic_seed": 1}),
    ("movielens_100k", {"synthetic_users": 5}),
    ("movielens_100k", {"label": "is_like"}),
  ],
)
def test_a_field_that_a_source_would_ignore_is_refused(source, changes):
  ((name, value),) = changes.items()
  with pytest.raises(
    UserError, match=rf"^data.source='{source}' reads no data.{name}, but it is {value!r}; leave it out$"
  ):
    InteractionsConfig(source=source, **changes).validate()


def test_a_recommender_has_no_text_to_generate(config, tmp_path):
  train(config, tmp_path)
  with pytest.raises(UserError, match="is of a recommender, which has no text; give the run of a language model"):
    open_model(tmp_path)


def test_a_language_model_s_run_is_told_that_this_folder_is_none(config, tmp_path):
  train(config, tmp_path)
  (tmp_path / "config.json").unlink()
  with pytest.raises(UserError, match="holds a run that is no language model; give another --workdir"):
    language_model.train(load_config("configs/lm/tiny.py", LmConfig), tmp_path)


@pytest.fixture
def step(config):
  """(config, state, batch) with histories, as gem's are, of which the last samples are missing. The model is small."""
  part = open_samples(config_io.overlay(config, {"model.kind": "gem"}), lambda line: None).train
  batch = jax.tree.map(jnp.asarray, part.gather(np.arange(1000, 1020)))
  assert batch.history.offsets[-1] > 20
  return config, recommender.make_init(config, part)(), batch


def test_tables_take_one_step_on_the_gradient_that_a_dense_model_would_give_them(step):
  """Items are read as a feature and in histories, and both count."""
  config, state, batch = step
  recipe, reads = RECIPES["fp32"], lookups(batch)

  def loss(inputs):
    return recommender.cross_entropy(state.model(inputs), batch.label_B, batch.weight_B)

  def dense(tables):  # by indexing; its gradient is as large as the tables
    def bags(read):
      bag_T = jnp.searchsorted(read.offsets, jnp.arange(len(read.ids_T)), side="right") - 1
      count_B = jnp.maximum(jnp.diff(read.offsets), 1)
      sums_BD = jax.ops.segment_sum(tables[read.table][read.ids_T], bag_T, num_segments=len(read.offsets))[:-1]
      return sums_BD / count_B[:, None]

    found = {name: bags(read) for name, read in reads.items()}
    inputs = front_end(state.tables, zero_sinks(batch, config.model.width), batch, recipe)
    tokens = jnp.stack([found[name] for name in sorted(batch.bags)], axis=1)
    stream = inputs.streams[0]._replace(events_TD=found["history.item"] + found["history.action"])
    return loss(inputs._replace(tokens_BFD=tokens, streams=(stream,)))

  g = jax.grad(dense)(state.tables)
  sinks = zero_sinks(batch, config.model.width)
  d_sinks = jax.grad(lambda sinks: loss(front_end(state.tables, sinks, batch, recipe)))(sinks)
  tables, moments = recommender.update_tables(state.tables, state.moments, reads, d_sinks, learning_rate=0.1, eps=1e-6)
  for name, table_VD in state.tables.items():
    m_V = np.mean(np.square(g[name]), axis=1)
    expected = table_VD - 0.1 * g[name] / (np.sqrt(m_V) + 1e-6)[:, None]
    np.testing.assert_allclose(moments[name], m_V, rtol=1e-4, atol=1e-12)
    np.testing.assert_allclose(tables[name], expected, rtol=1e-3, atol=2e-5)


def test_what_fills_up_a_batch_changes_nothing_even_as_nan(step):
  config, state, batch = step
  poisoned = batch._replace(
    numeric_BN=jnp.where(batch.weight_B[:, None] > 0, batch.numeric_BN, jnp.nan),
    label_B=jnp.where(batch.weight_B > 0, batch.label_B, jnp.nan),
  )
  kept = lambda x: jax.tree.map(np.array, x)  # a step consumes its state
  start = kept(state)
  results = [recommender.make_train_step(config)(jax.tree.map(jnp.asarray, start), b) for b in (batch, poisoned)]
  jax.tree.map(np.testing.assert_array_equal, *map(kept, results))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["logistic", "dcnv2", "wukong", "interformer", "gem"])
def test_every_kind_of_model_learns_and_predicts_one_sample_as_among_others(kind, config, tmp_path):
  width = 1 if kind == "logistic" else 16
  config = config_io.overlay(config, {"model.kind": kind, "model.width": width, "training.steps": 60})
  assert train(config, tmp_path)["validation_ne"] < 1
  part = open_samples(config, lambda line: None).train
  state = recommender.make_init(config, part)()
  chosen = lambda numbers: dataclasses.replace(part, events_N=part.events_N[numbers])
  predict = lambda numbers: recommender.predict(state.model, state.tables, chosen(numbers), len(numbers), recipe="fp32")
  np.testing.assert_allclose(predict([1500])[0], predict([1400, 1500, 3])[1], rtol=1e-5, atol=1e-6)


def test_joined_lookups_read_what_each_reads():
  read = lambda ids, offsets: Lookup("t", jnp.array(ids, jnp.int32), jnp.array(offsets, jnp.int32))
  ids, offsets, d_out = recommender._joined(
    [read([1, 2, 9], [0, 1, 2]), read([3, 9], [0, 0, 1])], [jnp.ones((2, 1)), jnp.full((2, 1), 2.0)]
  )
  np.testing.assert_array_equal(ids, [1, 2, 9, 3, 9])
  np.testing.assert_array_equal(offsets, [0, 1, 2, 3, 3, 4])
  np.testing.assert_array_equal(d_out[:, 0], [1, 1, 0, 2, 2])  # the third bag is the first lookup's padding
