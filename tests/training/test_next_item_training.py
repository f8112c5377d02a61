"""Training of next-item models: what a run learns, what it may not know, and that it goes on where it stopped."""

import jax
import numpy as np
import pytest
from run_helpers import StopAt, losses

from sparse_lm import config_io
from sparse_lm.errors import Preempted, UserError
from sparse_lm.next_item_config import MODEL_KINDS, NextItemConfig
from sparse_lm.training import next_item
from sparse_lm.training.next_item import NextItemTask, train

USERS, ITEMS = 30, 12


def write_events(path, *, changed=()):
  """Items in a circle, each user from another one on: what comes next is certain. Nine to twelve events a user.

  `changed`: which events of each user, counted from the last one, are of another item.
  """
  lines = ["userId,movieId,rating,timestamp"]
  lines += [f"999,{item},1,0" for item in range(ITEMS)]  # all items occur, in this order
  for user in range(USERS):
    number = 9 + user % 4
    for n in range(number):
      item = (user * 5 + n + 6 * (n - number in changed)) % ITEMS
      lines.append(f"{user},{item},4,{1000 + 60 * n}")
  path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def config(tmp_path):
  write_events(tmp_path / "ratings.csv")
  changes = {
    "model.kind": "hstu",
    "model.width": 8,
    "model.head_width": 8,
    "model.num_layers": 1,
    "model.dropout": 0.1,
    "data.source": "movielens",
    "data.path": str(tmp_path / "ratings.csv"),
    "data.longest": 12,
    "loss.negatives": 16,
    "training.steps": 100,
    "training.batch_size": 8,
    "training.learning_rate": 0.03,
    "training.warmup_steps": 2,
    "training.log_every": 5,
    "training.eval_every": 50,
    "checkpoint.every": 40,
  }
  return config_io.overlay(NextItemConfig(), changes)


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_run_learns_what_is_certain_and_popularity_does_not(kind, config, tmp_path):
  """The model has never seen the items of validation and test behind these users' rows."""
  last = train(config_io.overlay(config, {"model.kind": kind}), tmp_path / "run")
  entries = losses(tmp_path / "run")
  assert last["loss"] < 0.5 * entries[5]["loss"]
  assert last["validation_loss"] < 1 < np.log(ITEMS)
  for part in ("validation", "test"):
    assert last[f"{part}_ndcg@10"] > 0.9 > 0.6 > last[f"{part}_popularity_ndcg@10"]
  assert "test_loss" not in entries[50]


@pytest.mark.slow
def test_stopped_anywhere_a_run_reaches_the_same_metrics(config, tmp_path):
  """Dropout, negatives and the order of batches among what goes on."""
  train(config, tmp_path / "whole")
  for step in (5, 60):
    with pytest.raises(Preempted):
      train(config, tmp_path / "run", progress=StopAt(step))
  train(config, tmp_path / "run")
  assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_other_items_in_the_future_change_nothing_before(config, tmp_path):
  """Those of the test, and then those of validation."""
  found = {}
  for name, changed in {"as_it_was": (), "test": (-1,), "validation": (-2,)}.items():
    write_events(tmp_path / "ratings.csv", changed=changed)
    train(config, tmp_path / name)
    found[name] = losses(tmp_path / name)
  part_of = lambda entries, prefix: [
    {name: x for name, x in entry.items() if name.startswith(prefix)} for entry in entries.values()
  ]
  trained = lambda entries: [
    {name: x for name, x in entry.items() if not name.startswith(("validation", "test"))} for entry in entries.values()
  ]
  assert trained(found["as_it_was"]) == trained(found["test"]) == trained(found["validation"])
  assert part_of(found["as_it_was"], "validation") == part_of(found["test"], "validation")
  assert part_of(found["as_it_was"], "validation") != part_of(found["validation"], "validation")
  assert part_of(found["as_it_was"], "test") != part_of(found["test"], "test")


def test_what_a_test_row_ends_with_changes_its_metrics_but_no_score(config, tmp_path):
  scores = []
  for changed in ((), (-1,)):
    write_events(tmp_path / "ratings.csv", changed=changed)
    task = NextItemTask(config, lambda line: None)
    with jax.set_mesh(task.mesh):
      batch = task.place(task.parts.test.gather(np.arange(8)))
      scores.append(np.asarray(next_item._predict(task.make_init()().model, batch, temperature=1.0)[0]))
  np.testing.assert_array_equal(*scores)


def test_metrics_of_a_hand_worked_case(config, monkeypatch):
  """Of 31 users in four batches, the first three rank their item 1st, 3rd and last, the others share all scores."""
  task = NextItemTask(config, lambda line: None)
  targets = task.parts.validation.last_item_R
  seen = []

  def scores(model, batch, *, temperature):
    first = sum(seen)
    seen.append(int(np.sum(np.diff(batch.offsets) > 0)))
    scores_BV = np.zeros((8, ITEMS), np.float32)
    if first == 0:
      for row, better in enumerate((0, 2, ITEMS - 1)):
        others = [v for v in range(ITEMS) if v != targets[row]]
        scores_BV[row, targets[row]] = 0.5
        scores_BV[row, others[:better]] = 1.0
    return scores_BV, np.where(np.arange(8) < seen[-1], 2.0 + (first == 0), np.nan)

  monkeypatch.setattr(next_item, "_predict", scores)
  with jax.set_mesh(task.mesh):
    found = task._judge(None, task.parts.validation)
  assert seen == [8, 8, 8, 7]
  assert found["loss"] == pytest.approx((8 * 3 + 23 * 2) / 31)
  assert found["hr@10"] == pytest.approx(2 / 31)  # whoever shares all scores is 12th of 12
  assert found["ndcg@10"] == pytest.approx((1 + 1 / 2) / 31)
  assert found["hr@50"] == 1
  assert found["ndcg@50"] == pytest.approx((1 + 1 / 2 + 29 / np.log2(13)) / 31)


def test_evaluation_can_be_of_the_first_batches_alone(config):
  config = config_io.overlay(config, {"training.eval_batches": 2})
  task = NextItemTask(config, lambda line: None)
  with jax.set_mesh(task.mesh):
    model = task.make_init()().model
    batches = [task.place(task.parts.validation.gather(np.arange(n, n + 8))) for n in (0, 8)]
    loss_R = np.concatenate([next_item._predict(model, batch, temperature=0.05)[1] for batch in batches])
    assert task._judge(model, task.parts.validation)["loss"] == pytest.approx(np.mean(loss_R))


def test_the_validation_loss_is_that_of_softmax_over_all_items(config):
  task = NextItemTask(config, lambda line: None)
  with jax.set_mesh(task.mesh):
    batch = task.place(task.parts.test.gather(np.arange(3)))
    scores_BV, loss_B = next_item._predict(task.make_init()().model, batch, temperature=0.05)
  logits = np.asarray(scores_BV[:3], np.float64) / 0.05
  right = logits[np.arange(3), task.parts.test.last_item_R[:3]]
  np.testing.assert_allclose(loss_B[:3], np.log(np.sum(np.exp(logits), axis=1)) - right, rtol=1e-4)


def test_a_run_goes_on_with_its_own_config_and_interactions_alone(config, tmp_path):
  train(config, tmp_path / "run")
  with pytest.raises(UserError, match=r"another config \(loss.temperature: 0.05 -> 0.1\)"):
    train(config_io.overlay(config, {"loss.temperature": 0.1}), tmp_path / "run")
  assert train(config_io.overlay(config, {"training.log_every": 7}), tmp_path / "run")["step"] == 100
  write_events(tmp_path / "ratings.csv", changed=(-1,))
  with pytest.raises(UserError, match=r"were trained on other interactions .* give another --workdir"):
    train(config, tmp_path / "run")


def test_the_loss_of_a_model_that_has_become_nan_is_nan_and_nothing_is_found_by_it(config):
  """The loop stops for such a loss."""
  task = NextItemTask(config, lambda line: None)
  with jax.set_mesh(task.mesh):
    model = jax.tree.map(lambda w: w * np.nan, task.make_init()().model)
    found = task._judge(model, task.parts.validation)
  assert np.isnan(found["loss"])
  assert found["hr@10"] == 0


def test_rows_that_fill_up_a_batch_have_no_part_in_a_step(config):
  """Nor have the items behind them."""
  task = NextItemTask(config, lambda line: None)
  rows = task.parts.train.gather(np.arange(3))
  end = rows.offsets[-1]
  other = rows._replace(item_T=np.where(np.arange(len(rows.item_T)) < end, rows.item_T, 7).astype(np.int32))
  with jax.set_mesh(task.mesh):
    step, init = next_item.make_train_step(config), task.make_init()
    results = [jax.tree.map(np.array, step(init(), task.place(batch))) for batch in (rows, other)]
  jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model.kind": "gru"}, r"model.kind='gru' is unknown; allowed: sasrec, hstu"),
    ({"model.num_layers": 0}, r"model.num_layers=0 must be at least 1"),
    ({"model.dropout": 1.0}, r"model.dropout=1.0 must lie in \[0, 1\)"),
    ({"model.kind": "sasrec", "model.num_heads": 3}, r"model.width=50 is not divisible by model.num_heads=3"),
    ({"data.source": "books"}, r"data.source='books' is unknown; allowed: movielens_100k, movielens"),
    ({"data.source": "movielens"}, r"data.source='movielens' needs data.path"),
    ({"data.path": "x"}, r"data.source='movielens_100k' reads no data.path, but it is 'x'"),
    ({"data.longest": 1}, r"data.longest=1 must be at least 2"),
    ({"data.loader": "torch"}, r"data.loader='torch' is unknown; allowed: auto, grain, numpy"),
    ({"loss.negatives": 0}, r"loss.negatives=0 must be at least 1"),
    ({"loss.temperature": 0.0}, r"loss.temperature=0.0 must be positive"),
    ({"loss.temperature": float("nan")}, r"loss.temperature=nan must be positive"),
    ({"training.accumulation_steps": 2}, r"training.accumulation_steps=2, but .* set 1"),
    ({"checkpoint.restore_path": "x"}, r"checkpoint.restore_path is for language models"),
    ({"seed": -1}, r"seed=-1 must lie in \[0, 2\*\*32\)"),
  ],
  ids=str,
)
def test_a_config_that_cannot_work_is_refused(changes, message):
  NextItemConfig().validate()
  with pytest.raises(UserError, match=message):
    config_io.overlay(NextItemConfig(), changes).validate()
