"""The feed-forward blocks of a trained model under the clock: as they are, and without dead neurons and sorted.

The text is cut in two. The first half says which neurons are dead and which fire most, the second is timed: a neuron
that was dead may fire there, and what is left out with it is counted and measured, not assumed to be nothing.

Dimension key: B sequences, L length, M tokens, D model width, F hidden neurons.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments import ffn_measurement as measurement
from experiments.ffn_measurement import Json, Problem
from pallas_kernels import twell
from pallas_kernels.twell import hopper
from pallas_kernels.twell.shapes import Weights
from sparse_lm import data
from sparse_lm.errors import UserError
from sparse_lm.evaluation import feedforward_inputs
from sparse_lm.evaluation.feedforward_inputs import Captured
from sparse_lm.inference import OpenedModel, open_model


class Text(NamedTuple):
  """A model and what it reads."""

  opened: OpenedModel
  contexts_BL: np.ndarray  # one half for counting, the other for timing


def read(model: str, paths: str, tokens: int) -> Text:
  """Opens a model and at most `tokens` tokens of text for either half.

  Raises:
    UserError: there is no such model or text, or the kernels cannot serve the model.
  """
  texts = data.texts(paths, "--text")
  say = lambda line: print(line, file=sys.stderr, flush=True)
  opened = open_model(model, recipe="bf16", ffn_implementation="dense", report=say)
  feedforward_inputs.require_neurons(opened)
  _refuse_unsupported(opened)
  return Text(opened, halves(opened, texts, tokens))


def halves(opened: OpenedModel, texts: list[str], tokens: int) -> np.ndarray:
  """i32[B, L] of an even number of contexts."""
  config = opened.config
  contexts_BL = feedforward_inputs.contexts(opened, texts, 2 * max(tokens, config.context_length))
  if len(contexts_BL) < 2:
    raise UserError(f"--text holds one context of {config.context_length} tokens; two are needed, one to count on")
  return contexts_BL[: len(contexts_BL) // 2 * 2]


def _refuse_unsupported(opened: OpenedModel) -> None:
  """Raises UserError for a model that the kernels cannot serve, and that would be timed without them."""
  config = opened.config
  if reason := hopper.unsupported(jnp.bfloat16, config.ffn_width, config.model_width, twell.Spec()):
    raise UserError(f"model.ffn_width={config.ffn_width}, model.model_width={config.model_width}: {reason}")


def measure(text: Text, *, samples: int) -> Iterator[Json]:
  """Yields two cases a layer: `trained/layer N` and `trained/layer N sorted`.

  Raises:
    AssertionError: a route is wrong; it gets no time.
  """
  rates, length = measurement.limits(), text.contexts_BL.shape[1]
  for n, layer in enumerate(feedforward_inputs.capture(*text)):
    yield from measure_layer(f"trained/layer {n}", layer, length, rates, samples=samples)


def measure_layer(name: str, layer: Captured, length: int, rates: dict[str, float], *, samples: int) -> Iterator[Json]:
  """Yields both cases of one layer, whose sequences have `length` tokens."""
  weights = Weights(layer.w_gate_FD, layer.w_up_FD, layer.w_down_FD)
  counted_MD, x_MD = map(jnp.asarray, np.split(layer.x_MD, 2))
  counted = measurement.count(counted_MD, weights.firing_FD, jnp.ones(weights.firing_FD.shape[0], bool))
  del counted_MD  # half a gigabyte
  problem = Problem(x_MD, [weights])
  first_B = measurement.count(x_MD, weights.firing_FD, problem.cold_F).nonzeros_M[::length]
  facts = {"dead_share": float(np.mean(counted.tokens_F == 0)), "nonzeros_first": float(first_B.mean())}
  yield measurement.measured(name, problem, rates, samples=samples) | facts

  problem = measurement.pruned_and_sorted(x_MD, weights, counted.tokens_F, len(x_MD))
  facts = measurement.pruning(name, problem, weights, counted.tokens_F, len(x_MD))
  yield measurement.measured(f"{name} sorted", problem, rates, samples=samples) | facts
