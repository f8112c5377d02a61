"""From a stream of any length to a fixed number of tokens, by learned queries ("seeds").

PMA: Z = attention(rms(seeds), S, S), one token a seed   (InterFormer, arXiv 2411.09852, section 4).
HSP: more seeds than tokens, and Y = sum_r A_r Z W_r^T takes them together (SumKronLinear; Kunlun, section 4.3.2).

Dimension key: T packed tokens of all rows, B rows, D width, E width of the result, H heads, K head width, S seeds,
N resulting tokens, R terms of the sum. `offsets` is i32[B + 1]; see `packed`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import jagged
from pallas_kernels.dispatch import Implementation
from sparse_lm.models.head_projections import HeadProjections
from sparse_lm.models.initial import normal_weight
from sparse_lm.models.packed import clear_padding
from sparse_lm.models.rms_norm import rms_norm
from sparse_lm.precision.linear import linear, operand
from sparse_lm.precision.recipes import Recipe


class Pma(nnx.Module):
  """Z_b = W_o softmax(q k^T / sqrt(K)) v, q = W_q rms(seeds), k = W_k S_b, v = W_v S_b: pooling by attention.

  The seeds are the same for all rows. A row without tokens gives zeros.
  """

  def __init__(
    self,
    width: int,
    num_heads: int,
    recipe: Recipe,
    *,
    seeds: int,
    implementation: Implementation | None = None,
    rngs: nnx.Rngs,
  ):
    self.seeds_SD = normal_weight((seeds, width), 1, rngs=rngs)
    self.heads = HeadProjections(width, num_heads, recipe, rngs=rngs)
    self.recipe = recipe
    self.implementation = implementation

  def __call__(self, s_TD: jax.Array, offsets: jax.Array, *, schedule: jagged.Schedule | None = None) -> jax.Array:
    """z_BSD."""
    s_TD = clear_padding(s_TD, offsets)
    seeds_SD = operand(self.seeds_SD[...], self.recipe)
    o_MHK = jagged.attention(  # M = B * S
      self.heads.query(rms_norm(seeds_SD)),
      self.heads.key(s_TD),
      self.heads.value(s_TD),
      None,
      offsets,
      broadcast_q=True,
      schedule=schedule,
      implementation=self.implementation,
    )
    return self.heads.merge(o_MHK).reshape(len(offsets) - 1, *seeds_SD.shape)

  def make_schedule(self, offsets: jax.Array, num_tokens: int) -> jagged.Schedule:
    """For all layers with as many seeds."""
    num_rows, seeds = len(offsets) - 1, len(self.seeds_SD[...])
    seed_offsets = seeds * jnp.arange(num_rows + 1, dtype=jnp.int32)
    return jagged.make_schedule(seed_offsets, offsets, num_queries=num_rows * seeds, num_keys=num_tokens)

  def flops(self, lengths: Sequence[int]) -> int:
    """Of a forward pass: 4 T D (D + S), 2 S D^2 for the seeds, and as much again for each row."""
    seeds, width = self.seeds_SD.shape
    return 4 * sum(lengths) * width * (width + seeds) + 2 * seeds * width**2 * (1 + len(lengths))


class SumKron(nnx.Module):
  """Y = sum_r A_r X W_r^T: a sum of Kronecker products that mixes tokens and features   (Kunlun, section 4.3.2).

  R (S N + D E) parameters, where one matrix from all of X to all of Y has S N D E.
  """

  def __init__(
    self, tokens_in: int, tokens_out: int, width_in: int, width_out: int, recipe: Recipe, *, terms: int, rngs: nnx.Rngs
  ):
    self.mix_RNS = normal_weight((terms, tokens_out, tokens_in), tokens_in, rngs=rngs)
    self.w_RED = normal_weight((terms, width_out, width_in), terms * width_in, rngs=rngs)
    self.recipe = recipe

  def __call__(self, x_BSD: jax.Array) -> jax.Array:
    """y_BNE. Tokens first: there are fewer of them afterwards."""
    x_BRND = linear("BSD,RNS->BRND", x_BSD, self.mix_RNS[...], self.recipe)
    return linear("BRND,RED->BNE", x_BRND, self.w_RED[...], self.recipe)

  def flops(self, num_rows: int) -> int:
    """Of a forward pass: 2 R N D (S + E) for each row."""
    (terms, tokens_out, tokens_in), (_, width_out, width_in) = self.mix_RNS.shape, self.w_RED.shape
    return 2 * num_rows * terms * tokens_out * width_in * (tokens_in + width_out)


class SeedPooling(nnx.Module):
  """HSP, hierarchical seed pooling: seeds gather from the stream, and fewer tokens from the seeds."""

  def __init__(
    self,
    width: int,
    num_heads: int,
    recipe: Recipe,
    *,
    seeds: int,
    tokens: int,
    terms: int,
    width_out: int | None = None,
    implementation: Implementation | None = None,
    rngs: nnx.Rngs,
  ):
    """`width_out` is that of the interaction side, where a stream has a width of its own; None: the same."""
    self.pool = Pma(width, num_heads, recipe, seeds=seeds, implementation=implementation, rngs=rngs)
    width_out = width if width_out is None else width_out
    self.compress = SumKron(seeds, tokens, width, width_out, recipe, terms=terms, rngs=rngs)

  def __call__(self, s_TD: jax.Array, offsets: jax.Array, *, schedule: jagged.Schedule | None = None) -> jax.Array:
    """y_BNE; `schedule` as of `pool.make_schedule`."""
    return self.compress(self.pool(s_TD, offsets, schedule=schedule))

  def flops(self, lengths: Sequence[int]) -> int:
    """Of a forward pass: those of its parts."""
    return self.pool.flops(lengths) + self.compress.flops(len(lengths))
