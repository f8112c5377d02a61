"""Operations counted one multiplication at a time, for a model small enough to do so."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from sparse_lm.config import ModelConfig
from sparse_lm.training import mfu

TINY = ModelConfig(
  vocab_size=10, context_length=5, num_layers=3, model_width=8, num_heads=4, num_kv_heads=2, ffn_width=6
)
H200 = SimpleNamespace(device_kind="NVIDIA H200")


def product(m, k, n):
  """A multiplication and an addition for each of k terms of each of m x n results."""
  return 2 * m * k * n


def counted(*, kv_heads=2, matrices=3, layers=3):
  """Operations of the forward pass over the whole context, divided by its 5 tokens: heads of width 2, 4 of them."""
  total = 0
  for _ in range(layers):
    total += product(5, 8, 4 * 2)  # queries
    total += product(5, 8, kv_heads * 2) * 2  # keys, values
    total += product(5, 4 * 2, 8)  # output projection
    total += product(5, 8, 6) * matrices  # the down projection has as many weights as the others
    for query in range(5):
      for _key in range(query + 1):  # each causal pair once; there are 15 of 25
        total += 4 * (product(1, 2, 1) + product(1, 1, 2))  # score, and the value it weighs
  return (total + product(5, 8, 10)) / 5  # the head; looking a row of the embedding up costs nothing


@pytest.mark.parametrize(
  ("changes", "count"),
  [
    ({}, counted()),
    ({"num_kv_heads": None}, counted(kv_heads=4)),
    ({"num_kv_heads": 1}, counted(kv_heads=1)),
    ({"ffn_kind": "gated_silu"}, counted()),
    ({"ffn_kind": "relu"}, counted(matrices=2)),
    ({"ffn_kind": "none"}, counted(matrices=0)),
    ({"num_layers": 1}, counted(layers=1)),
  ],
  ids=["grouped_query", "multi_head", "one_kv_head", "silu", "non_gated", "no_ffn", "one_layer"],
)
def test_forward_operations_equal_a_count_of_every_multiplication(changes, count):
  assert mfu.forward_flops_per_token(dataclasses.replace(TINY, **changes)) == count


def test_forward_operations_equal_a_number_worked_out_on_paper():
  """A layer: 8*8 + 2*8*4 + 8*8 = 192 weights of attention, 3*8*6 = 144 of the FFN, 4*8*3 = 96 for scores; head 2*80."""
  assert mfu.forward_flops_per_token(TINY) == 3 * (2 * (192 + 144) + 96) + 160


def test_causal_attention_is_counted_once_and_not_twice():
  """F31: 15 pairs of 25, so 4 * 8 operations for each of 3 keys a token sees on average."""
  longer = dataclasses.replace(TINY, context_length=7)
  per_key = 3 * 4 * 8
  assert mfu.forward_flops_per_token(longer) - mfu.forward_flops_per_token(TINY) == per_key * (4 - 3)


def test_the_head_counts_once_whether_it_is_tied_or_not_and_can_be_left_out():
  tied, untied = TINY, dataclasses.replace(TINY, tie_embeddings=False)
  assert mfu.forward_flops_per_token(tied) == mfu.forward_flops_per_token(untied)
  assert mfu.forward_flops_per_token(tied) - mfu.forward_flops_per_token(tied, with_head=False) == 2 * 8 * 10


def test_training_counts_three_forward_passes_over_the_peak_of_all_devices():
  speed = 1e9
  assert mfu.training_mfu(TINY, speed, [H200] * 4) == pytest.approx(3 * counted() * speed / (4 * 989e12))


def test_the_formula_as_it_is_printed_gives_the_number_beside_it():
  numbers = {
    "tokens/s": 1e9,
    "projection weights": 3 * (192 + 144) + 80,
    "layers": 3,
    "model width": 8,
    "context": 5,
    "devices": 2,
    "peak FLOP/s": 989e12,
  }
  name, formula = mfu.FORMULA.split(" = ")
  for words, number in numbers.items():
    assert words in formula
    formula = formula.replace(words, repr(number))
  assert name == "MFU"
  assert mfu.training_mfu(TINY, 1e9, [H200] * 2) == pytest.approx(eval(formula))


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA GeForce RTX 4090", "AMD H200", ""])
def test_a_device_whose_peak_is_unknown_has_no_mfu(kind):
  unknown = SimpleNamespace(device_kind=kind)
  assert mfu.peak_flops([unknown]) is None
  assert mfu.training_mfu(TINY, 1e9, [unknown]) is None


def test_the_cpu_that_runs_these_tests_has_no_mfu():
  assert mfu.training_mfu(TINY, 1e9, jax.devices()[:1]) is None or jax.default_backend() != "cpu"


def test_a_device_is_known_by_the_beginning_of_its_name():
  h100 = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
  assert mfu.peak_flops([h100] * 8) == 8 * 989e12
