"""The GEM-style recommender: Kunlun's blocks, streams of a user's events on one side, interaction tokens on the other.

  X_sum = summary(X)
  S'    = attention(pffn(S, X_sum))            for each stream
  H     = pooling(S')                          for each stream
  X'    = Wukong([X | H | H of other streams])

CompSkip (Kunlun, section 4.4.1): even blocks leave out the attention; odd ones leave out pffn and pooling and take H
from the block before. A last block that is odd has nothing to do with its events, as nothing reads them.

Dimension key: B samples, N interaction tokens, M tokens of their summary, C tokens a stream is pooled to, D width,
E of a table's row, F outputs of an MLP, T packed events, S streams.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import jagged
from sparse_lm.models.age import AgeEmbedding
from sparse_lm.models.features import FeatureTokens, Inputs, LogitHead, Stream, to_width, wukong_config
from sparse_lm.models.interformer import TokenSummary
from sparse_lm.models.mlp import MLP
from sparse_lm.models.packed import clear_padding, spread, total
from sparse_lm.models.seed_pooling import Pma, SeedPooling
from sparse_lm.models.sequence import PersonalisedFfn, TimeRotary, WindowAttention
from sparse_lm.models.wukong import Wukong, WukongExperts
from sparse_lm.precision.recipes import Recipe
from sparse_lm.recsys_config import RecommenderConfig, StreamConfig

_ACTIVATION = "fast_gelu"  # of personalised feed-forward blocks; the one that published kernels are measured with
_TERMS = 2  # of the sum of Kronecker products that compresses seeds


class Context(NamedTuple):
  """What all blocks share of a stream: made once for a batch."""

  offsets: jax.Array
  rotary: jagged.Rotary
  feedforward: jagged.Schedule
  attention: jagged.Schedule | None  # None: no block attends
  pooling: jagged.Schedule


class WidePma(nnx.Module):
  """PMA, and its tokens made as wide as those of the interaction side."""

  def __init__(self, width_out: int, stream: StreamConfig, recipe: Recipe, *, rngs: nnx.Rngs):
    self.pool = Pma(stream.width, stream.num_heads, recipe, seeds=stream.seeds, rngs=rngs)
    self.widen = to_width(stream.width, width_out, recipe, rngs=rngs)
    self.seeds = stream.seeds

  def __call__(self, s_TD: jax.Array, offsets: jax.Array, *, schedule: jagged.Schedule | None = None) -> jax.Array:
    """h_BCD, C seeds."""
    return self.widen(self.pool(s_TD, offsets, schedule=schedule))

  def flops(self, lengths: Sequence[int]) -> int:
    """Of a forward pass: those of its parts."""
    return self.pool.flops(lengths) + len(lengths) * self.seeds * self.widen.flops()


class StreamBlock(nnx.Module):
  """A block's part on one stream; what a block leaves out is None."""

  feedforward: PersonalisedFfn | None
  attention: WindowAttention | None
  pooling: SeedPooling | WidePma | None

  def __init__(
    self,
    config: RecommenderConfig,
    stream: StreamConfig,
    longest: int,
    recipe: Recipe,
    *,
    transforms: bool,
    attends: bool,
    rngs: nnx.Rngs,
  ):
    sizes = (stream.width, stream.num_heads, recipe)
    self.feedforward = (
      PersonalisedFfn(
        *sizes,
        summary_tokens=config.summary_tokens,
        summary_width=config.width,
        neurons=stream.neurons,
        tau=max(longest, 1),
        activation=_ACTIVATION,
        rngs=rngs,
      )
      if transforms
      else None
    )
    self.attention = WindowAttention(*sizes, window=stream.window, block=stream.block, rngs=rngs) if attends else None
    self.pooling = _pooling(config, stream, recipe, rngs=rngs) if transforms else None

  def __call__(
    self, s_TD: jax.Array, x_sum_BMD: jax.Array | None, h_BCD: jax.Array | None, context: Context
  ) -> tuple[jax.Array, jax.Array]:
    """(s_TD, h_BCD); h is the block before's where this one does not pool, so that the first one must."""
    if self.feedforward is not None:
      assert x_sum_BMD is not None
      s_TD = self.feedforward(s_TD, x_sum_BMD, context.offsets, schedule=context.feedforward)
    if self.attention is not None:
      s_TD = self.attention(s_TD, context.offsets, context.rotary, schedule=context.attention)
    if self.pooling is not None:
      h_BCD = self.pooling(s_TD, context.offsets, schedule=context.pooling)
    assert h_BCD is not None
    return s_TD, h_BCD

  def flops(self, lengths: Sequence[int]) -> int:
    """Of a forward pass over rows of these lengths: those of its parts."""
    return sum(part.flops(lengths) for part in (self.feedforward, self.attention, self.pooling) if part is not None)


def _pooling(config: RecommenderConfig, stream: StreamConfig, recipe: Recipe, *, rngs: nnx.Rngs):
  if stream.pooled_tokens is None:
    return WidePma(config.width, stream, recipe, rngs=rngs)
  return SeedPooling(
    stream.width,
    stream.num_heads,
    recipe,
    seeds=stream.seeds,
    tokens=stream.pooled_tokens,
    terms=_TERMS,
    width_out=config.width,
    rngs=rngs,
  )


class Interaction(nnx.Module):
  """Wukong over all tokens, or the sum of experts, each with its share; zero tokens fill up the last share."""

  def __init__(self, config: RecommenderConfig, tokens: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.fill = -tokens % config.experts
    layer = wukong_config(config, 1)
    self.wukong: Wukong | WukongExperts = (
      Wukong(tokens, config.width, layer, recipe, rngs=rngs)
      if config.experts == 1
      else WukongExperts(tokens + self.fill, config.width, config.experts, layer, recipe, rngs=rngs)
    )

  def __call__(self, x_BND: jax.Array) -> jax.Array:
    """From [B, N, D] to [B, `config.tokens`, D]."""
    return self.wukong(jnp.pad(x_BND, ((0, 0), (0, self.fill), (0, 0))))

  def flops(self) -> int:
    """Of a sample."""
    return self.wukong.flops()


class GemBlock(nnx.Module):
  """One layer of the module's equation."""

  def __init__(
    self,
    config: RecommenderConfig,
    streams: Sequence[StreamConfig],
    tokens: int,
    longest: int,
    recipe: Recipe,
    *,
    transforms: bool = True,
    attends: bool = True,
    rngs: nnx.Rngs,
  ):
    """`transforms`: it has personalised feed-forward and pooling; `attends`: it has attention."""
    self.summary = (
      TokenSummary(config.width, recipe, tokens=tokens, summary_tokens=config.summary_tokens, rngs=rngs)
      if transforms
      else None
    )
    self.streams = nnx.List(
      [
        StreamBlock(config, stream, longest, recipe, transforms=transforms, attends=attends, rngs=rngs)
        for stream in streams
      ]
    )
    self.interact = Interaction(config, tokens + sum(stream.tokens for stream in streams), recipe, rngs=rngs)

  def __call__(
    self,
    x_BND: jax.Array,
    events: Sequence[jax.Array],
    pooled: Sequence[jax.Array | None],
    contexts: Sequence[Context],
  ) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """(x_BND, s_TD of each stream, h_BCD of each)."""
    x_sum_BMD = None if self.summary is None else self.summary(x_BND)
    results = [
      block(s_TD, x_sum_BMD, h_BCD, context)
      for block, s_TD, h_BCD, context in zip(self.streams, events, pooled, contexts, strict=True)
    ]
    events, fresh = [s_TD for s_TD, _ in results], [h_BCD for _, h_BCD in results]
    return self.interact(jnp.concatenate([x_BND, *fresh], axis=1)), events, fresh

  def flops(self, lengths_SB: Sequence[Sequence[int]]) -> int:
    """Of a forward pass over a batch whose streams have these lengths."""
    of_sample = self.interact.flops() + (0 if self.summary is None else self.summary.flops())
    of_streams = sum(block.flops(lengths) for block, lengths in zip(self.streams, lengths_SB, strict=True))
    return len(lengths_SB[0]) * of_sample + of_streams


class Meeting(nnx.Module):
  """What events have to do with the item that is predicted: [c_t | w_t] = MLP([e_t | e_t * i | i]). Our addition.

  e_t is the event and what its age says (`age`).
  s_t = e_t + c_t is what the blocks get: what they pool is otherwise a mean that knows the item by the personalised
  network alone. The head gets sum_t w_t e_t (as in DIN), which also tells how many events there are.
  """

  def __init__(self, config: RecommenderConfig, stream: StreamConfig, recipe: Recipe, *, rngs: nnx.Rngs):
    self.mlp = MLP((3 * config.table_width, config.head_width, stream.width + 1), "relu", recipe, rngs=rngs)
    self.widen = to_width(config.table_width, stream.width, recipe, rngs=rngs)
    self.age = AgeEmbedding(config.table_width, recipe)

  def __call__(self, stream: Stream, item_BE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(s_TD, interest_BE)."""
    e_TE = clear_padding(stream.events_TD, stream.offsets) + self.age(stream.age_T, stream.offsets)
    item_TE = spread(item_BE, stream.offsets, len(e_TE))
    met_TF = self.mlp(jnp.concatenate([e_TE, e_TE * item_TE, item_TE], axis=1))
    return met_TF[:, :-1] + self.widen(e_TE), total(met_TF[:, -1:] * e_TE, stream.offsets)

  def flops(self, lengths: Sequence[int]) -> int:
    """Those of its parts for each event."""
    return sum(lengths) * (self.mlp.flops() + self.widen.flops() + self.age.flops())


class GemRecommender(nnx.Module):
  """logit = MLP([X of the last block | X of the first | interest of each stream]).

  S begins as the events that met the item, X as the features.
  """

  def __init__(
    self, config: RecommenderConfig, features: int, numeric: int, longest: int, recipe: Recipe, *, rngs: nnx.Rngs
  ):
    streams = (config.stream,)
    self.tokens = FeatureTokens(config, features, numeric, recipe, rngs=rngs)
    self.meetings = nnx.List([Meeting(config, stream, recipe, rngs=rngs) for stream in streams])
    self.rotaries = tuple(
      TimeRotary(head_width=stream.width // stream.num_heads, t_scale=config.time_scale) for stream in streams
    )
    last = config.num_layers - 1
    self.blocks = nnx.List(
      [
        GemBlock(
          config,
          streams,
          config.tokens if n else self.tokens.number,
          longest,
          recipe,
          transforms=not config.comp_skip or n % 2 == 0,
          attends=not config.comp_skip or (n % 2 == 1 and n < last),
          rngs=rngs,
        )
        for n in range(config.num_layers)
      ]
    )
    flat = (config.tokens + self.tokens.number) * config.width + len(streams) * config.table_width
    self.head = LogitHead(flat, config, recipe, rngs=rngs)
    self.recompute = config.recompute

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    first_BND = x_BND = self.tokens(inputs)
    met = [meet(stream, inputs.item_BD) for meet, stream in zip(self.meetings, inputs.streams, strict=True)]
    events, interests = [s_TD for s_TD, _ in met], [interest_BE for _, interest_BE in met]
    contexts = self.contexts(inputs.streams)
    pooled: Sequence[jax.Array | None] = [None] * len(events)
    run = jax.checkpoint(GemBlock.__call__) if self.recompute else GemBlock.__call__
    for block in self.blocks:
      x_BND, events, pooled = run(block, x_BND, events, pooled, contexts)
    flat = [x.reshape(len(x), -1) for x in (x_BND, first_BND)]
    return self.head(jnp.concatenate([*flat, *interests], axis=1))

  def contexts(self, streams: Sequence[Stream]) -> list[Context]:
    """What all blocks share, of each stream. Blocks are alike, so the first that has a part speaks for all."""
    contexts = []
    for n, (stream, rotary) in enumerate(zip(streams, self.rotaries)):
      of_stream, size = [block.streams[n] for block in self.blocks], (stream.offsets, len(stream.events_TD))
      first = of_stream[0]
      assert first.feedforward is not None, "the first block transforms"
      assert first.pooling is not None, "and pools"
      attention = next((part.attention for part in of_stream if part.attention is not None), None)
      contexts.append(
        Context(
          offsets=stream.offsets,
          rotary=rotary(stream.age_T, stream.offsets),
          feedforward=first.feedforward.make_schedule(*size),
          attention=None if attention is None else attention.make_schedule(*size),
          pooling=first.pooling.pool.make_schedule(*size),
        )
      )
    return contexts

  def flops(self, lengths_SB: Sequence[Sequence[int]]) -> int:
    """Of a forward pass over a batch whose streams have these lengths; a multiply-add counts two."""
    of_events = sum(meet.flops(lengths) for meet, lengths in zip(self.meetings, lengths_SB, strict=True))
    of_samples = len(lengths_SB[0]) * (self.tokens.flops() + self.head.flops())
    return of_events + of_samples + sum(block.flops(lengths_SB) for block in self.blocks)
