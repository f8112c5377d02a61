"""SASRec block (Kang & McAuley, 2018, section III-B) in pre-norm form: causal attention, then a pointwise network.

  x <- x + dropout(W_o softmax(q k^T / sqrt(K)) v),   x <- x + dropout(W_2 relu(W_1 LN(x) + b_1) + b_2)

q, k and v are projections of LN(x). Norms have no parameters: the projection that follows holds their scale.

Dimension key: T packed tokens of all rows, D width, H heads, K head width, F hidden neurons. `offsets` is i32[B + 1];
see `packed`.
"""

from collections.abc import Sequence

import jax
from flax import nnx

from pallas_kernels import jagged
from pallas_kernels.dispatch import Implementation
from sparse_lm.models.dropout import dropout
from sparse_lm.models.head_projections import HeadProjections
from sparse_lm.models.layer_norm import layer_norm
from sparse_lm.models.mlp import MLP
from sparse_lm.models.packed import clear_padding
from sparse_lm.precision.recipes import Recipe


class SasrecBlock(nnx.Module):
  """The block of the module's equation; positions come with the tokens."""

  def __init__(
    self,
    width: int,
    num_heads: int,
    recipe: Recipe,
    *,
    neurons: int,
    dropout: float = 0.0,
    implementation: Implementation | None = None,
    rngs: nnx.Rngs,
  ):
    self.heads = HeadProjections(width, num_heads, recipe, rngs=rngs)
    self.pointwise = MLP((width, neurons, width), "relu", recipe, rngs=rngs)
    self.dropout = dropout
    self.implementation = implementation

  def __call__(
    self,
    x_TD: jax.Array,
    offsets: jax.Array,
    *,
    key: jax.Array | None = None,
    schedule: jagged.Schedule | None = None,
  ) -> jax.Array:
    """Tokens [T, D], oldest events first; `key` of dropout, None: none."""
    attention_key, pointwise_key = (None, None) if key is None else jax.random.split(key)
    x_TD = clear_padding(x_TD, offsets)
    y_TD = self._attended(layer_norm(x_TD), offsets, schedule)
    x_TD = x_TD + dropout(y_TD, self.dropout, attention_key)
    return x_TD + dropout(self.pointwise(layer_norm(x_TD)), self.dropout, pointwise_key)

  def _attended(self, x_TD: jax.Array, offsets: jax.Array, schedule: jagged.Schedule | None) -> jax.Array:
    o_THK = jagged.attention(
      self.heads.query(x_TD),
      self.heads.key(x_TD),
      self.heads.value(x_TD),
      offsets,
      causal=True,
      schedule=schedule,
      implementation=self.implementation,
    )
    return self.heads.merge(o_THK)

  def make_schedule(self, offsets: jax.Array, num_tokens: int) -> jagged.Schedule:
    """For all blocks."""
    return jagged.make_schedule(offsets, num_queries=num_tokens, causal=True)

  def flops(self, lengths: Sequence[int]) -> int:
    """Of a forward pass: 4 T D (2 D + F), and 4 D for each of the L (L + 1) / 2 pairs of a row."""
    _, _, width = self.heads.w_query_HKD.shape
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return sum(lengths) * (8 * width**2 + self.pointwise.flops()) + 4 * width * pairs
