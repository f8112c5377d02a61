"""bench_recsys without a GPU: every case runs on a small model, and the padded baseline computes the same."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import padded_attention, recsys_ladder, recsys_modules
from experiments.recsys_problem import FEATURES, TableSizes, draw_batch, draw_lengths
from pallas_kernels import jagged
from sparse_lm import config_io
from sparse_lm.flags import load_config
from sparse_lm.models.features import front_end, zero_sinks
from sparse_lm.precision.recipes import RECIPES
from sparse_lm.recsys_config import RecsysConfig
from sparse_lm.training.recommender_state import make_init

SMALL = {
  "model.width": 8,
  "model.embedding_width": 6,
  "model.head_width": 8,
  "model.num_layers": 2,
  "model.rank": 2,
  "model.tokens": 4,
  "model.mlp_width": 8,
  "model.mlp_layers": 1,
  "model.summary_tokens": 2,
  "model.stream.width": 8,
  "model.stream.num_heads": 2,
  "model.stream.neurons": 4,
  "model.stream.seeds": 4,
  "model.stream.pooled_tokens": 2,
  "data.longest": 12,
  "training.batch_size": 5,
  "precision.recipe": "fp32",
}
SIZES = TableSizes.of(items=50, others=9)


@pytest.fixture
def config():
  return config_io.overlay(load_config("configs/recsys/bench.py", RecsysConfig), SMALL)


def test_a_batch_has_every_feature_and_histories_in_the_order_of_time():
  lengths_B = draw_lengths(7, 20, seed=0)
  batch = draw_batch(SIZES, lengths_B, seed=1)
  assert len(batch.bags) == FEATURES
  np.testing.assert_array_equal(np.diff(batch.history.offsets), lengths_B)
  ages = np.split(np.asarray(batch.history.age_T), np.asarray(batch.history.offsets)[1:])
  assert all((np.diff(row) <= 0).all() for row in ages[:-1])
  assert all(int(bag.ids_T.max()) < SIZES.table_sizes[name] for name, bag in batch.bags.items())


def logits(config, lengths, stand_in):
  batch = draw_batch(SIZES, np.array(lengths), seed=1)
  state, recipe = make_init(config, SIZES)(), RECIPES["fp32"]

  def loss(model):
    inputs = front_end(state.tables, zero_sinks(batch, config.model.table_width), batch, recipe)
    out = model(inputs)
    return jnp.sum(out * jnp.arange(1.0, len(lengths) + 1)), out

  with stand_in:
    (_, out), d_model = jax.jit(jax.value_and_grad(loss, has_aux=True))(state.model)
  return [out, *jax.tree.leaves(d_model)]


@pytest.mark.parametrize("name", recsys_ladder.rungs())
def test_what_stands_in_for_our_code_computes_the_same(name, config):
  """Also for a sample without events, and for one of the longest."""
  rung = recsys_ladder.rungs()[name]
  own = config_io.overlay(config, rung.changes)
  lengths = [3, 0, 12, 1, 7]
  found = logits(own, lengths, rung.stand_in(own))
  expected = logits(own, lengths, recsys_ladder.Rung(changes={}).stand_in(own))
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1, float(np.abs(b).max())))


@pytest.mark.parametrize("mask", [{"window": 2}, {"block": 4}])
def test_padded_attention_sees_what_jagged_attention_sees(mask):
  offsets = jnp.array([0, 5, 5, 14], jnp.int32)
  q, k, v = (jax.random.normal(jax.random.key(n), (14, 2, 4)) for n in range(3))
  expected = jagged.attention(q, k, v, offsets, **mask)
  np.testing.assert_allclose(padded_attention.attention(q, k, v, offsets, longest=9, **mask), expected, atol=1e-5)


def test_ladder_and_modules_time_every_case_and_fill_their_tables(config, monkeypatch):
  monkeypatch.setattr(recsys_ladder, "_PADDED_BATCH", 3)
  monkeypatch.setattr(recsys_modules, "_SAMPLES", 1)
  names = list(itertools.islice(recsys_ladder.rungs(), 3))
  ladder = list(recsys_ladder.time_ladder(config, SIZES, names, calls=1, repeats=1))
  assert [case["samples"] for case in ladder] == [3, 5, 5]
  assert ladder[1]["flops"] == ladder[2]["flops"]
  lines = recsys_ladder.table(ladder).splitlines()
  assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == names
  found = list(recsys_modules.time_modules(config, SIZES, ["attention", "interaction"]))
  assert [(case["name"], case["number"]) for case in found] == [("attention", 2), ("interaction", 2)]
  assert "each module alone" in recsys_modules.table(found)


def test_a_rung_that_does_not_fit_says_so_in_the_table():
  facts = {"what": "ladder", "changes": {}, "samples": 4, "events": 8, "peak_flops": 1e12, "flops": 10**9}
  fits = facts | {"name": "fits", "seconds": 0.5, "loss": 1.0, "temporary_bytes": 2**30}
  text = recsys_ladder.table([fits, facts | {"name": "does not", "error": "RESOURCE_EXHAUSTED"}])
  assert "| fits | 4 | 500.0 | 8 | 1.00 x | 0.00 | 0.6% | 1.0 |" in text
  assert "| does not | 4 | RESOURCE_EXHAUSTED | - | - | - | - | - |" in text
