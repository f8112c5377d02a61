"""A token at a time, with the keys and values of earlier ones kept.

Slot s of the cache holds position s of its sequence, and a query at position p reads the slots up to p. So prompts of
different lengths stand side by side, each from slot 0: what a short one has in the slots behind its end is never read
before its own tokens replace it.

Dimension key: B sequences, L tokens of the longest prompt, S slots, D model width, H query heads, G key-value heads,
K head width, V vocabulary.
"""

import copy
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_lm.inference.sampling import Sampling, choose
from sparse_lm.models.transformer import Block, Transformer
from sparse_lm.training.state import COMPILER_OPTIONS

Cache = tuple[tuple[jax.Array, jax.Array], ...]  # (keys, values) of each layer, [B, S, G, K]


class Sequences(NamedTuple):
  """Where a batch of sequences stands."""

  tokens_B: jax.Array  # i32, the newest token of each, chosen but not read yet
  positions_B: jax.Array  # i32, where it stands in its sequence
  cache: Cache  # of all before it


class Decoder:
  """A model whose layers lie apart, so that no step copies a layer's weights or cache out of a stack."""

  def __init__(self, model: Transformer):
    self._outer = copy.copy(model)
    self._outer.blocks = None  # type: ignore[assignment]  # what is left has none
    self._layers = _unstacked(model.blocks)

  def prefill(self, tokens_BL: jax.Array, lengths_B: jax.Array, *, slots: int) -> tuple[jax.Array, Cache]:
    """Reads the prompts; returns logits_BV after the last token of each, and the cache.

    Args:
      tokens_BL: i32, each prompt from column 0, with any ids below the vocabulary size behind its end.
      lengths_B: i32, tokens of each prompt, at least 1.
      slots: of the cache, at least L.
    """
    return _prefill_compiled(self._outer, self._layers, tokens_BL, lengths_B, slots)

  def step(self, sequences: Sequences) -> tuple[jax.Array, Cache]:
    """Reads the newest tokens; returns logits_BV of the next ones, and the cache with them. Consumes the old cache."""
    return _step_compiled(self._outer, self._layers, sequences.cache, sequences.tokens_B, sequences.positions_B)

  def start(
    self, tokens_BL: jax.Array, lengths_B: jax.Array, keys_B: jax.Array, *, slots: int, sampling: Sampling
  ) -> Sequences:
    """`prefill`, and the choice of the first token of each sequence, with a random key of its own."""
    return _start_compiled(self._outer, self._layers, tokens_BL, lengths_B, keys_B, slots, sampling)

  def advance(self, sequences: Sequences, keys_B: jax.Array, *, sampling: Sampling) -> Sequences:
    """`step`, and the choice of the next token of each sequence. Consumes the old cache."""
    tokens_B, positions_B, cache = sequences
    return _advance_compiled(self._outer, self._layers, cache, tokens_B, positions_B, keys_B, sampling)


@jax.jit
def _unstacked(blocks: Block) -> tuple[Block, ...]:
  num_layers = jax.tree.leaves(blocks)[0].shape[0]
  return tuple(jax.tree.map(operator.itemgetter(layer), blocks) for layer in range(num_layers))


def _prefill(outer: Transformer, layers: tuple[Block, ...], tokens_BL, lengths_B, slots: int):
  x_BLD, real_BL = outer.embed(tokens_BL), jnp.ones_like(tokens_BL, dtype=bool)
  angles = outer.angles(jnp.arange(tokens_BL.shape[1])[None, :])
  empty = ((0, 0), (0, slots - tokens_BL.shape[1]), (0, 0), (0, 0))
  cache = []
  for block in layers:
    q_BLHK, k_BLGK, v_BLGK = block.project(x_BLD, angles)
    x_BLD, _ = block.finish(x_BLD, block.attention.attend(q_BLHK, k_BLGK, v_BLGK, None), real_BL)
    cache.append((jnp.pad(k_BLGK, empty), jnp.pad(v_BLGK, empty)))
  last_B1D = jnp.take_along_axis(x_BLD, lengths_B[:, None, None] - 1, axis=1)
  return outer.logits(outer.final_norm(last_B1D))[:, 0], tuple(cache)


def _step(outer: Transformer, layers: tuple[Block, ...], cache: Cache, tokens_B, positions_B):
  tokens_B1, positions_B1 = tokens_B[:, None], positions_B[:, None]
  x_B1D, real_B1 = outer.embed(tokens_B1), jnp.ones_like(tokens_B1, dtype=bool)
  angles = outer.angles(positions_B1)
  rows_B1 = jnp.arange(tokens_B1.shape[0])[:, None]
  longer = []
  for block, (keys_BSGK, values_BSGK) in zip(layers, cache):
    q_B1HK, k_B1GK, v_B1GK = block.project(x_B1D, angles)
    keys_BSGK = keys_BSGK.at[rows_B1, positions_B1].set(k_B1GK, unique_indices=True, indices_are_sorted=True)
    values_BSGK = values_BSGK.at[rows_B1, positions_B1].set(v_B1GK, unique_indices=True, indices_are_sorted=True)
    o_B1HK = block.attention.attend_cached(q_B1HK, keys_BSGK, values_BSGK, positions_B)
    x_B1D, _ = block.finish(x_B1D, o_B1HK, real_B1)
    longer.append((keys_BSGK, values_BSGK))
  return outer.logits(outer.final_norm(x_B1D))[:, 0], tuple(longer)


def _start(outer, layers, tokens_BL, lengths_B, keys_B, slots: int, sampling: Sampling) -> Sequences:
  logits_BV, cache = _prefill(outer, layers, tokens_BL, lengths_B, slots)
  return _chosen(logits_BV, lengths_B, cache, keys_B, sampling)


def _advance(outer, layers, cache: Cache, tokens_B, positions_B, keys_B, sampling: Sampling) -> Sequences:
  logits_BV, cache = _step(outer, layers, cache, tokens_B, positions_B)
  return _chosen(logits_BV, positions_B + 1, cache, keys_B, sampling)


def _chosen(logits_BV, positions_B, cache: Cache, keys_B, sampling: Sampling) -> Sequences:
  """The draw depends on the sequence's own key and the position, not on what else is in the batch."""
  tokens_B = choose(logits_BV, jax.vmap(jax.random.fold_in)(keys_B, positions_B), sampling)
  return Sequences(tokens_B, positions_B, cache)


# XLA merges products of one operand, and to do so copies their weights side by side: 47 MB a layer in every step.
_OPTIONS = COMPILER_OPTIONS | {"xla_gpu_dot_merger_threshold_mb": 0}
_jit = functools.partial(jax.jit, compiler_options=_OPTIONS)
_prefill_compiled = _jit(_prefill, static_argnames="slots")
_step_compiled = _jit(_step, donate_argnums=2)
_start_compiled = _jit(_start, static_argnames=("slots", "sampling"))
_advance_compiled = _jit(_advance, static_argnames="sampling", donate_argnums=2)
