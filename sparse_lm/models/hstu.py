"""HSTU block, the research model behind the public tables (arXiv 2402.17152, section 3; gem, 2.6).

  u, v, q, k = SiLU(LN(x) W^T),   A = SiLU(q k^T + rab) / N for j <= i,   y = x + W_o dropout(LN(A v) * u)

Norms have no parameters, projections no bias, and N is the longest row that the model is made for, not the row's own
length: gates and sums of attention carry how much has happened.

Dimension key: T packed tokens of all rows, D width, H heads, K head width, P = 2 N - 1 distances in position, C classes
of distances in time. `offsets` is i32[B + 1]; see `packed`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import jagged
from pallas_kernels.dispatch import Implementation
from sparse_lm.models.dropout import dropout
from sparse_lm.models.layer_norm import layer_norm
from sparse_lm.models.packed import clear_padding
from sparse_lm.parallel import sharding
from sparse_lm.precision.linear import linear
from sparse_lm.precision.recipes import Recipe

_INIT_STD, _EPSILON = 0.02, 1e-6  # of the public code
_TIME_CLASSES = 129  # of jagged.RelativeBias


def _over_heads(o_THK: jax.Array) -> jax.Array:
  """LayerNorm over the features of all heads together."""
  _, heads, head_width = o_THK.shape
  return layer_norm(o_THK.reshape(-1, heads * head_width), _EPSILON).reshape(o_THK.shape)


class HstuBlock(nnx.Module):
  """The block of the module's equation, with a relative bias of its own. Heads may be of any width K."""

  def __init__(
    self,
    width: int,
    num_heads: int,
    head_width: int,
    recipe: Recipe,
    *,
    max_length: int,
    dropout: float = 0.0,
    implementation: Implementation | None = None,
    rngs: nnx.Rngs,
  ):
    normal = nnx.initializers.normal(_INIT_STD)
    draw = lambda *shape: nnx.Param(normal(rngs.params(), shape, jnp.float32))
    shape_HKD = (num_heads, head_width, width)
    self.w_gate_HKD = draw(*shape_HKD)
    self.w_value_HKD = draw(*shape_HKD)
    self.w_query_HKD = draw(*shape_HKD)
    self.w_key_HKD = draw(*shape_HKD)
    xavier = nnx.initializers.variance_scaling(1.0, "fan_avg", "uniform", in_axis=(0, 1), out_axis=2)
    self.w_out_HKD = nnx.Param(xavier(rngs.params(), shape_HKD, jnp.float32))
    self.position_P = draw(2 * max_length - 1)
    self.time_C = draw(_TIME_CLASSES)
    self.recipe = recipe
    self.max_length = max_length
    self.dropout = dropout
    self.implementation = implementation

  def __call__(
    self,
    x_TD: jax.Array,
    offsets: jax.Array,
    timestamps_T: jax.Array,
    *,
    key: jax.Array | None = None,
    schedule: jagged.Schedule | None = None,
  ) -> jax.Array:
    """y_TD.

    Args:
      x_TD: oldest events first.
      offsets: rows longer than `max_length` give NaN.
      timestamps_T: int32, in seconds for the published buckets; those of a row are less than 2^31 apart.
      key: of dropout; None: none.
      schedule: of `make_schedule`.
    """
    x_TD = clear_padding(x_TD, offsets)
    normal_TD = layer_norm(x_TD, _EPSILON)
    o_THK = jagged.attention(
      self._projected(normal_TD, self.w_query_HKD),
      self._projected(normal_TD, self.w_key_HKD),
      self._projected(normal_TD, self.w_value_HKD),
      offsets,
      activation="silu",
      post_scale=1 / self.max_length,
      causal=True,
      bias=self._bias(timestamps_T),
      schedule=schedule,
      implementation=self.implementation,
    )
    gated_THK = _over_heads(o_THK) * self._projected(normal_TD, self.w_gate_HKD)
    gated_THK = dropout(gated_THK, self.dropout, key)
    return x_TD + linear("THK,HKD->TD", gated_THK, self.w_out_HKD[...], self.recipe)

  def _projected(self, normal_TD: jax.Array, w_HKD: nnx.Param) -> jax.Array:
    return jax.nn.silu(linear("TD,HKD->THK", normal_TD, w_HKD[...], self.recipe))

  def _bias(self, timestamps_T: jax.Array) -> jagged.RelativeBias:
    # In float32 whatever the recipe: scores are.
    position_P, time_C = (sharding.gather(w[...]) for w in (self.position_P, self.time_C))
    return jagged.RelativeBias(position_P, time_C, timestamps_T)

  def make_schedule(self, offsets: jax.Array, num_tokens: int) -> jagged.Schedule:
    """For all blocks."""
    return jagged.make_schedule(offsets, num_queries=num_tokens, causal=True)

  def flops(self, lengths: Sequence[int]) -> int:
    """Of a forward pass: 10 T D H K, and 4 H K for each of the L (L + 1) / 2 pairs of a row."""
    heads, head_width, width = self.w_gate_HKD.shape
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return heads * head_width * (10 * sum(lengths) * width + 4 * pairs)
