"""InterFormer: interaction and sequence exchange summaries of each other (arXiv 2411.09852, section 4; gem, 2.4).

  X_sum = Gate(A X),   S_sum = Gate([CLS(S) | PMA(S) | recent(S)])
  X <- interaction([X | S_sum]),   S <- attention(pffn(S, X_sum))
  logit = MLP([X_sum | S_sum]) after the last layer

Both sides read what the other one was before the layer. CLS tokens are the first layer's X_sum, put before each row's
events once (`packed.prepend`): rows here hold them too. A and the gates' MLPs are one matrix each.

Dimension key: T packed tokens of all rows (CLS tokens and events), B rows, D width, N interaction tokens, M summary
tokens, C CLS tokens, F features that a projection gives, S streams. `offsets` is i32[B + 1]; see `packed`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import jagged
from pallas_kernels.dispatch import Implementation
from sparse_lm.models.dhen import Interaction
from sparse_lm.models.features import FeatureTokens, Inputs, LogitHead, to_width, wukong_config
from sparse_lm.models.gate import Gate
from sparse_lm.models.initial import normal_weight
from sparse_lm.models.packed import clear_padding, first_tokens, last_tokens, prepend
from sparse_lm.models.seed_pooling import Pma
from sparse_lm.models.sequence import TimeRotary, WindowAttention
from sparse_lm.models.wukong import Wukong
from sparse_lm.precision.linear import linear
from sparse_lm.precision.recipes import Recipe
from sparse_lm.recsys_config import RecommenderConfig

_RECENT = 2  # events that a summary of the sequence ends with; the public setting


class TokenSummary(nnx.Module):
  """X_sum = Gate(A X): each of M tokens a weighted sum of the N interaction tokens."""

  def __init__(self, width: int, recipe: Recipe, *, tokens: int, summary_tokens: int, rngs: nnx.Rngs):
    self.mix_MN = normal_weight((summary_tokens, tokens), tokens, rngs=rngs)
    self.gate = Gate(width, (), "silu", recipe, rngs=rngs)
    self.width = width
    self.recipe = recipe

  def __call__(self, x_BND: jax.Array) -> jax.Array:
    """x_sum_BMD."""
    return self.gate(linear("BND,MN->BMD", x_BND, self.mix_MN[...], self.recipe))

  def flops(self) -> int:
    """2 M N D, and the gate, of a sample."""
    summary_tokens, tokens = self.mix_MN.shape
    return 2 * summary_tokens * tokens * self.width + self.gate.flops(tokens=summary_tokens)


class SequenceSummary(nnx.Module):
  """S_sum = Gate([CLS(S) | PMA(S) | recent(S)]): a row's first C tokens, its pooled seeds, its last events.

  Zeros stand in for what a row does not have: CLS tokens are no events, and come in once.
  """

  def __init__(
    self,
    width: int,
    num_heads: int,
    recipe: Recipe,
    *,
    cls_tokens: int,
    seeds: int,
    recent: int,
    implementation: Implementation | None = None,
    rngs: nnx.Rngs,
  ):
    self.pool = Pma(width, num_heads, recipe, seeds=seeds, implementation=implementation, rngs=rngs)
    self.gate = Gate(width, (), "silu", recipe, rngs=rngs)
    self.cls_tokens = cls_tokens
    self.recent = recent
    self.tokens = cls_tokens + seeds + recent

  def __call__(self, s_TD: jax.Array, offsets: jax.Array, *, schedule: jagged.Schedule | None = None) -> jax.Array:
    """s_sum_BMD with M = `tokens`; `schedule` as of `pool.make_schedule`."""
    cls_BCD = first_tokens(s_TD, offsets, self.cls_tokens)
    recent_BMD = last_tokens(s_TD, offsets, self.recent, after=self.cls_tokens)
    return self.gate(jnp.concatenate([cls_BCD, self.pool(s_TD, offsets, schedule=schedule), recent_BMD], axis=1))

  def flops(self, lengths: Sequence[int]) -> int:
    """Of a forward pass over rows of these lengths: those of pooling, and of the gate of each row."""
    return self.pool.flops(lengths) + len(lengths) * self.gate.flops(tokens=self.tokens)


class MatrixFfn(nnx.Module):
  """SiLU(S_t W_b) with W_b = X_sum[b]^T W_p: one whole matrix [D, D] for each row   (PFFN; section 4).

  Kunlun's `sequence.PersonalisedFfn` does without these matrices.
  """

  def __init__(self, width: int, recipe: Recipe, *, summary_tokens: int, rngs: nnx.Rngs):
    self.w_FM = normal_weight((width, summary_tokens), summary_tokens * width, rngs=rngs)
    self.recipe = recipe

  def __call__(self, s_TD: jax.Array, x_sum_BMD: jax.Array, offsets: jax.Array) -> jax.Array:
    """Tokens [T, D]."""
    w_BDF = linear("BMD,FM->BDF", x_sum_BMD, self.w_FM[...], self.recipe)
    return jax.nn.silu(jagged.jagged_dense_matmul(s_TD, w_BDF, offsets))

  def flops(self, lengths: Sequence[int]) -> int:
    """Of a forward pass: 2 M D^2 to make the matrix of each row, 2 D^2 for each token."""
    width, summary_tokens = self.w_FM.shape
    return 2 * width**2 * (len(lengths) * summary_tokens + sum(lengths))


class InterFormerLayer(nnx.Module):
  """The layer of the module's equation: an exchange in both directions, then each side on its own."""

  def __init__(
    self,
    width: int,
    num_heads: int,
    recipe: Recipe,
    *,
    tokens: int,
    interaction: Interaction,
    cls_tokens: int = 4,
    seeds: int = 2,
    recent: int = _RECENT,
    window: int | None = None,
    block: int | None = None,
    implementation: Implementation | None = None,
    rngs: nnx.Rngs,
  ):
    """The three lengths are those of the public setting.

    Args:
      width: D of both sides.
      num_heads: of pooling and of self-attention.
      recipe: number formats.
      tokens: N.
      interaction: a module from [B, N + cls_tokens + seeds + recent, D] to the next layer's [B, N', D].
      cls_tokens: at the start of each row, and as many in X_sum.
      seeds: tokens from pooling.
      recent: tokens from a row's end.
      window: of self-attention, as `block` is; CLS tokens count as the first ones of a row. The paper has neither.
      block: see `WindowAttention`.
      implementation: of attention and pooling.
      rngs: initial weights.
    """
    self.token_summary = TokenSummary(width, recipe, tokens=tokens, summary_tokens=cls_tokens, rngs=rngs)
    self.sequence_summary = SequenceSummary(
      width,
      num_heads,
      recipe,
      cls_tokens=cls_tokens,
      seeds=seeds,
      recent=recent,
      implementation=implementation,
      rngs=rngs,
    )
    self.interaction = interaction
    self.pffn = MatrixFfn(width, recipe, summary_tokens=cls_tokens, rngs=rngs)
    self.attention = WindowAttention(
      width, num_heads, recipe, window=window, block=block, implementation=implementation, rngs=rngs
    )

  def __call__(
    self,
    x_BND: jax.Array,
    s_TD: jax.Array,
    offsets: jax.Array,
    rotary: jagged.Rotary | None = None,
    *,
    schedule: jagged.Schedule | None = None,
    pooling: jagged.Schedule | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Interaction tokens and sequence tokens of the next layer.

    `schedule` is as of `attention.make_schedule`, `pooling` as of `sequence_summary.pool.make_schedule`.
    """
    x_sum_BMD, s_sum_BMD = self.token_summary(x_BND), self.sequence_summary(s_TD, offsets, schedule=pooling)
    s_TD = self.attention(self.pffn(s_TD, x_sum_BMD, offsets), offsets, rotary, schedule=schedule)
    return self.interaction(jnp.concatenate([x_BND, s_sum_BMD], axis=1)), s_TD

  def flops(self, lengths: Sequence[int]) -> int:
    """Of a forward pass over rows of these lengths, their CLS tokens among them: those of its parts."""
    of_sample = self.token_summary.flops() + self.interaction.flops()
    of_rows = sum(part.flops(lengths) for part in (self.sequence_summary, self.pffn, self.attention))
    return len(lengths) * of_sample + of_rows


def _layer(config: RecommenderConfig, tokens: int, recipe: Recipe, *, rngs: nnx.Rngs) -> InterFormerLayer:
  stream = config.stream
  both = tokens + config.summary_tokens + stream.seeds + _RECENT
  return InterFormerLayer(
    config.width,
    stream.num_heads,
    recipe,
    tokens=tokens,
    interaction=Wukong(both, config.width, wukong_config(config, 1), recipe, rngs=rngs),
    cls_tokens=config.summary_tokens,
    seeds=stream.seeds,
    recent=_RECENT,
    window=stream.window,
    block=stream.block,
    rngs=rngs,
  )


class InterformerRecommender(nnx.Module):
  """Layers whose interaction is one Wukong layer, and one more pair of summaries for the head.

  Both sides have one width, so events are brought to it once. The sizes of the sequence are those of `config.stream`;
  its seeds are not compressed. A CLS token is as old as the event that is predicted: it is made from its features.
  """

  def __init__(self, config: RecommenderConfig, features: int, numeric: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.tokens = FeatureTokens(config, features, numeric, recipe, rngs=rngs)
    self.widen = to_width(config.table_width, config.width, recipe, rngs=rngs)
    self.rotary = TimeRotary(head_width=config.width // config.stream.num_heads, t_scale=config.time_scale)
    self.layers = nnx.List(
      [_layer(config, config.tokens if n else self.tokens.number, recipe, rngs=rngs) for n in range(config.num_layers)]
    )
    self.token_summary = TokenSummary(
      config.width, recipe, tokens=config.tokens, summary_tokens=config.summary_tokens, rngs=rngs
    )
    self.sequence_summary = SequenceSummary(
      config.width,
      config.stream.num_heads,
      recipe,
      cls_tokens=config.summary_tokens,
      seeds=config.stream.seeds,
      recent=_RECENT,
      rngs=rngs,
    )
    flat = (config.summary_tokens + self.sequence_summary.tokens) * config.width
    self.head = LogitHead(flat, config, recipe, rngs=rngs)

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    (stream,) = inputs.streams
    x_BND = self.tokens(inputs)
    first = self.layers[0]
    # The first layer makes this summary again; under jit it is computed once.
    cls_BCD = first.token_summary(x_BND)
    events_TD = self.widen(clear_padding(stream.events_TD, stream.offsets))
    s_TD, offsets = prepend(cls_BCD, events_TD, stream.offsets)
    age_T, _ = prepend(jnp.zeros(cls_BCD.shape[:2], stream.age_T.dtype), stream.age_T, stream.offsets)
    rotary = self.rotary(age_T, offsets)
    schedule = first.attention.make_schedule(offsets, len(s_TD))
    pooling = first.sequence_summary.pool.make_schedule(offsets, len(s_TD))
    for layer in self.layers:
      x_BND, s_TD = layer(x_BND, s_TD, offsets, rotary, schedule=schedule, pooling=pooling)
    both_BMD = [self.token_summary(x_BND), self.sequence_summary(s_TD, offsets, schedule=pooling)]
    return self.head(jnp.concatenate(both_BMD, axis=1).reshape(len(x_BND), -1))

  def flops(self, lengths_SB: Sequence[Sequence[int]]) -> int:
    """Of a forward pass over a batch whose streams have these lengths; a multiply-add counts two."""
    (lengths,) = lengths_SB
    with_cls = [self.sequence_summary.cls_tokens + length for length in lengths]
    of_sample = self.tokens.flops() + self.token_summary.flops() + self.head.flops()
    of_rows = sum(layer.flops(with_cls) for layer in self.layers) + self.sequence_summary.flops(with_cls)
    return len(lengths) * of_sample + sum(lengths) * self.widen.flops() + of_rows
