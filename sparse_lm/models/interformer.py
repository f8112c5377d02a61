"""InterFormer layer: interaction and sequence exchange summaries of each other (arXiv 2411.09852, section 4; gem, 2.4).

  X_sum = Gate(A X),   S_sum = Gate([CLS(S) | PMA(S) | recent(S)])
  X <- interaction([X | S_sum]),   S <- attention(pffn(S, X_sum))

Both sides read what the other one was before the layer. CLS tokens are the first layer's X_sum, put before each row's
events once (`packed.prepend`): rows here hold them too. After the last layer the head reads both summaries, which are
modules of their own, so that a model can have one more pair of them. A and the gates' MLPs are one matrix each.

Dimension key: T packed tokens of all rows (CLS tokens and events), B rows, D width, N interaction tokens, M summary
tokens, C CLS tokens, F features that a projection gives. `offsets` is i32[B + 1]; see `packed`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import jagged
from pallas_kernels.dispatch import Implementation
from sparse_lm.models.gate import Gate
from sparse_lm.models.initial import normal_weight
from sparse_lm.models.packed import first_tokens, last_tokens
from sparse_lm.models.seed_pooling import Pma
from sparse_lm.models.sequence import WindowAttention
from sparse_lm.precision.linear import linear
from sparse_lm.precision.recipes import Recipe


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

  def __call__(self, s_TD: jax.Array, offsets: jax.Array) -> jax.Array:
    """s_sum_BMD with M = cls_tokens + seeds + recent."""
    cls_BCD = first_tokens(s_TD, offsets, self.cls_tokens)
    recent_BMD = last_tokens(s_TD, offsets, self.recent, after=self.cls_tokens)
    return self.gate(jnp.concatenate([cls_BCD, self.pool(s_TD, offsets), recent_BMD], axis=1))


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


class InterFormerLayer(nnx.Module):
  """The layer of the module's equation: an exchange in both directions, then each side on its own."""

  def __init__(
    self,
    width: int,
    num_heads: int,
    recipe: Recipe,
    *,
    tokens: int,
    interaction: Callable[[jax.Array], jax.Array],
    cls_tokens: int = 4,
    seeds: int = 2,
    recent: int = 2,
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
    self.attention = WindowAttention(width, num_heads, recipe, implementation=implementation, rngs=rngs)

  def __call__(
    self,
    x_BND: jax.Array,
    s_TD: jax.Array,
    offsets: jax.Array,
    rotary: jagged.Rotary | None = None,
    *,
    schedule: jagged.Schedule | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Interaction tokens and sequence tokens of the next layer; `schedule` as of `attention.make_schedule`."""
    x_sum_BMD, s_sum_BMD = self.token_summary(x_BND), self.sequence_summary(s_TD, offsets)
    s_TD = self.attention(self.pffn(s_TD, x_sum_BMD, offsets), offsets, rotary, schedule=schedule)
    return self.interaction(jnp.concatenate([x_BND, s_sum_BMD], axis=1)), s_TD
