"""Wukong against a float64 oracle that forms the dots of all pairs, what holds at its edges, and its operations."""

import dataclasses

import interaction_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparse_lm.models.wukong import FMB, LCB, InteractionConfig, Wukong, WukongConfig, WukongExperts
from sparse_lm.precision.recipes import RECIPES

FP32 = RECIPES["fp32"]
SMALL = WukongConfig(num_layers=1, fmb_tokens=2, lcb_tokens=3, rank=4, hidden=(6,))
WIDTH = 4
# (batch, tokens, changes of the config)
VARIANTS = {
  "two_layers": (3, 7, {"num_layers": 2}),
  "more_tokens_than_before": (1, 3, {}),
  "as_many_tokens_as_before": (2, 5, {}),
  "one_token": (2, 1, {}),
  "deep_mlp_with_silu": (2, 5, {"hidden": (6, 5, 4), "activation": "silu"}),
  "rank_one_and_no_hidden_layers": (2, 5, {"rank": 1, "hidden": ()}),
  "no_linear_compression": (2, 3, {"lcb_tokens": 0}),
}


def make(tokens, width=WIDTH, *, recipe=FP32, **changes):
  return lambda rngs: Wukong(tokens, width, dataclasses.replace(SMALL, **changes), recipe, rngs=rngs)


def make_experts(tokens, width=WIDTH, *, experts=3, **changes):
  return lambda rngs: WukongExperts(tokens, width, experts, dataclasses.replace(SMALL, **changes), FP32, rngs=rngs)


@pytest.mark.parametrize(("batch", "tokens", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_equals_a_float64_oracle_with_its_gradients(batch, tokens, changes):
  act = oracle.silu if changes.get("activation") == "silu" else oracle.relu
  module = oracle.built(make(tokens, **changes))
  oracle.assert_equals(module, lambda p, x: oracle.wukong(p, x, act), oracle.inputs(batch, tokens, WIDTH))


@pytest.mark.parametrize(("batch", "tokens", "experts", "layers"), [(8, 6, 3, 1), (1, 3, 1, 2), (2, 2, 2, 1)])
def test_experts_equal_the_sum_of_oracles_over_parts_of_the_tokens(batch, tokens, experts, layers):
  module = oracle.built(make_experts(tokens, experts=experts, num_layers=layers))
  oracle.assert_equals(module, oracle.wukong_experts, oracle.inputs(batch, tokens, WIDTH))


def test_a_batch_may_be_empty():
  oracle.assert_a_batch_of_none_works(oracle.built(make_experts(6)), 6, WIDTH)


def test_nan_stays_in_its_sample():
  oracle.assert_nan_stays_in_its_sample(oracle.built(make_experts(6)), oracle.inputs(8, 6, WIDTH))


def test_parts_of_the_tokens_reach_their_own_expert_only():
  """Where the tokens of one expert are zero, it has nothing to multiply its weights with, and they get no gradient."""
  module, x_BND = oracle.built(make_experts(6)), oracle.inputs(8, 6, WIDTH)
  x_BND[:, 2:4] = 0
  _, d_module, _ = oracle.value_and_gradients(module, x_BND, oracle.inputs(8, 5, WIDTH))
  d_w_ECN = np.asarray(d_module.experts.layers[0].lcb.w_CN[...])
  np.testing.assert_array_equal((d_w_ECN != 0).any((1, 2)), [True, False, True])


def test_experts_start_from_different_weights():
  experts = oracle.jit(lambda: make_experts(6, hidden=())(nnx.Rngs(0)))().experts
  w_EFD = np.asarray(experts.layers[0].fmb.mlp.layers[0].w_FD[...])
  assert len(np.unique(w_EFD)) == w_EFD.size


def test_outputs_are_tokens_of_mean_zero_and_unit_variance_without_any_parameter_of_a_norm():
  module = oracle.built(make(7))
  y_BND = np.asarray(oracle.jit(lambda m, x: m(x))(module, 10 * oracle.inputs(3, 7, WIDTH)))
  np.testing.assert_allclose(y_BND.mean(-1), 0, atol=1e-5)
  np.testing.assert_allclose(y_BND.std(-1), 1, atol=1e-3)
  names = {jax.tree_util.keystr(path).split(".")[-2] for path, _ in jax.tree_util.tree_flatten_with_path(module)[0]}
  assert names == {"y_RN", "w_CN", "w_FD", "b_F"}


def test_operations_are_those_that_xla_counts_and_do_not_grow_with_the_square_of_the_tokens():
  flops = lambda module: module.flops()
  inner = InteractionConfig(rank=4, hidden=(64,))
  # 2 N^2 D would be sixteen times the 4 N R D here
  oracle.assert_flops(lambda rngs: FMB(128, 4, 128, inner, FP32, rngs=rngs), flops, 128, 128)
  oracle.assert_flops(lambda rngs: LCB(64, 16, 32, FP32, rngs=rngs), flops, 64, 32)
  sizes = {"fmb_tokens": 8, "lcb_tokens": 8, "rank": 8, "hidden": (512, 512), "num_layers": 2}
  oracle.assert_flops(make(24, 64, **sizes), flops, 24, 64)
  oracle.assert_flops(make_experts(48, 64, **sizes), flops, 48, 64)


@pytest.mark.parametrize(("tokens", "compression"), [(16, 0), (20, 2 * 16 * 20 * 160)])
def test_operations_follow_the_formula_of_the_paper(tokens, compression):
  """A row of its scaling ladder: l = 2, n_L = n_F = 8, k = 24, MLP 3 x 2048; of tokens of width 160."""
  sizes = {"fmb_tokens": 8, "lcb_tokens": 8, "rank": 24, "hidden": (2048, 2048, 2048), "num_layers": 2}
  k, d, h = 24, 160, 2048
  layer = lambda n: 2 * (2 * n * k * d) + 2 * (n * k * h + 2 * h * h + h * 8 * d) + 2 * 8 * n * d
  module = jax.eval_shape(lambda: make(tokens, 160, **sizes)(nnx.Rngs(0)))
  assert module.flops() == layer(tokens) + layer(16) + compression


def test_bf16_computes_in_bf16_within_its_precision():
  module = oracle.built(make(7, 32, recipe=RECIPES["bf16"]))
  x_BND = jnp.asarray(oracle.inputs(3, 7, 32), jnp.bfloat16)
  y_BND = oracle.jit(lambda m, x: m(x))(module, x_BND)
  assert y_BND.dtype == jnp.bfloat16
  exact = np.array([oracle.wukong(oracle.parameters(module), x) for x in np.asarray(x_BND, np.float64)])
  assert np.linalg.norm(np.asarray(y_BND, np.float64) - exact) < 0.03 * np.linalg.norm(exact)


def test_on_eight_devices_values_and_gradients_are_those_of_one():
  module = oracle.built(make_experts(6))
  oracle.assert_same_on_eight_devices(module, oracle.inputs(8, 6, WIDTH), oracle.inputs(8, 5, WIDTH))


def test_tokens_that_the_experts_do_not_divide_are_refused():
  with pytest.raises(ValueError, match=r"tokens=7 do not divide into num_experts=3"):
    make_experts(7)(nnx.Rngs(0))
