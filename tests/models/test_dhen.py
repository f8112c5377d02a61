"""DHEN against a float64 oracle, each interaction alone and all together."""

import interaction_oracle as oracle
import pytest
from flax import nnx

from sparse_lm.models.dhen import INTERACTIONS, Dhen, DhenConfig
from sparse_lm.precision.recipes import RECIPES

ALL = tuple(INTERACTIONS)
WIDTH = 4


def make(tokens, interactions=ALL, *, width=WIDTH, out_tokens=3, num_layers=1, rank=2, hidden=(6,)):
  config = DhenConfig(num_layers=num_layers, tokens=out_tokens, interactions=interactions, rank=rank, hidden=hidden)
  return lambda rngs: Dhen(tokens, width, config, RECIPES["fp32"], rngs=rngs)


# (batch, tokens, interactions, layers)
VARIANTS = {
  **{f"{name}_from_four_tokens_to_three": (2, 4, (name,), 1) for name in INTERACTIONS},
  "all_of_them": (8, 4, ALL, 1),
  "the_number_of_tokens_kept": (1, 3, ("cross", "fm"), 1),
  "one_kind_twice_in_two_layers": (2, 4, ("linear", "low_rank_cross", "linear"), 2),
  "one_token_has_no_pairs": (2, 1, ("dots", "linear"), 1),
}


@pytest.mark.parametrize(("batch", "tokens", "names", "layers"), VARIANTS.values(), ids=VARIANTS)
def test_equals_a_float64_oracle_with_its_gradients(batch, tokens, names, layers):
  module = oracle.built(make(tokens, names, num_layers=layers))
  assert len(module.layers) == layers
  oracle.assert_equals(module, lambda p, x: oracle.dhen(p, x, names), oracle.inputs(batch, tokens, WIDTH))


def test_a_batch_may_be_empty():
  oracle.assert_a_batch_of_none_works(oracle.built(make(4)), 4, WIDTH)


def test_nan_stays_in_its_sample():
  oracle.assert_nan_stays_in_its_sample(oracle.built(make(4)), oracle.inputs(8, 4, WIDTH))


def test_operations_are_those_that_xla_counts():
  for names in (("cross",), ("low_rank_cross",), ("dots",), ("mlp",), ALL):
    module = make(256, names, width=16, out_tokens=128, rank=64, hidden=(256,))
    oracle.assert_flops(module, lambda m: m.flops(), 256, 16)


def test_on_eight_devices_values_and_gradients_are_those_of_one():
  module = oracle.built(make(4))
  oracle.assert_same_on_eight_devices(module, oracle.inputs(8, 4, WIDTH), oracle.inputs(8, 3, WIDTH))


def test_an_interaction_without_that_name_is_refused_with_the_names_there_are():
  with pytest.raises(ValueError, match=r"\['dcn'\] must each be one of cross, low_rank_cross, dots, fm, linear, mlp"):
    make(4, ("fm", "dcn"))(nnx.Rngs(0))
