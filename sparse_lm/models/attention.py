"""Causal self-attention with rotary positions, multi-head or grouped-query.

Dimension key: B batch, L length, D model width, H query heads, G key-value heads, K head width.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_lm.config import ModelConfig
from sparse_lm.parallel import sharding
from sparse_lm.precision.linear import linear
from sparse_lm.precision.recipes import Recipe


def rotary_angles(positions_BL: jax.Array, head_width: int, theta: float) -> jax.Array:
  """Angles f32[B, L, K/2]: position p turns pair i by p * theta^(-2i/K) (RoFormer, section 3.2); B may be 1."""
  frequency = theta ** (-jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)
  return positions_BL.astype(jnp.float32)[:, :, None] * frequency[None, None, :]


def rotate(x_BLHK: jax.Array, angles: jax.Array) -> jax.Array:
  """Turns each pair (i, i + K/2) of a head, the half-split pairing of Llama checkpoints."""
  cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
  first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BLHK.dtype)


def attend(
  q_BLHK, k_BLGK, v_BLGK, segments_BL, *, implementation: Literal["xla", "cudnn"], precision: jax.lax.Precision
) -> jax.Array:
  """softmax(q k^T / sqrt(K)) v over earlier tokens of the same segment; segments None: over all earlier tokens."""
  same_document = None if segments_BL is None else segments_BL[:, None, :, None] == segments_BL[:, None, None, :]
  with _matmul_precision(precision):
    return jax.nn.dot_product_attention(
      q_BLHK, k_BLGK, v_BLGK, mask=same_document, is_causal=True, implementation=implementation
    )


def _matmul_precision(precision: jax.lax.Precision):
  """For what takes no precision of its own."""
  return jax.default_matmul_precision(precision.name.lower() if precision != jax.lax.Precision.DEFAULT else None)


class Attention(nnx.Module):
  """Projections and the attention between them. A weight holds a row of D for each output, as in Llama checkpoints."""

  def __init__(self, config: ModelConfig, recipe: Recipe, *, rngs: nnx.Rngs):
    normal = functools.partial(nnx.initializers.normal(config.init_std), dtype=jnp.float32)
    heads, groups, width, head_width = config.num_heads, config.kv_heads, config.model_width, config.head_width
    self.w_query_HKD = nnx.Param(normal(rngs.params(), (heads, head_width, width)))
    self.w_key_GKD = nnx.Param(normal(rngs.params(), (groups, head_width, width)))
    self.w_value_GKD = nnx.Param(normal(rngs.params(), (groups, head_width, width)))
    self.w_out_HKD = nnx.Param(normal(rngs.params(), (heads, head_width, width)))
    self.recipe = recipe
    self.implementation = config.attention_implementation

  def project(self, x_BLD: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys (both rotated) and values."""
    q_BLHK = linear("BLD,HKD->BLHK", x_BLD, self.w_query_HKD[...], self.recipe)
    k_BLGK = linear("BLD,GKD->BLGK", x_BLD, self.w_key_GKD[...], self.recipe)
    v_BLGK = linear("BLD,GKD->BLGK", x_BLD, self.w_value_GKD[...], self.recipe)
    return rotate(q_BLHK, angles), rotate(k_BLGK, angles), v_BLGK

  def attend(self, q_BLHK, k_BLGK, v_BLGK, segments_BL: jax.Array | None) -> jax.Array:
    """The weighted mean of values. cuDNN's kernel is opaque to the partitioner, so each device takes its own rows."""
    implementation = self._implementation(q_BLHK)
    attend_ = functools.partial(attend, implementation=implementation, precision=self.recipe.matmul_precision)
    if segments_BL is None:
      return sharding.per_device_batch(functools.partial(attend_, segments_BL=None))(q_BLHK, k_BLGK, v_BLGK)
    return sharding.per_device_batch(attend_)(q_BLHK, k_BLGK, v_BLGK, segments_BL)

  def attend_cached(self, q_B1HK, keys_BSGK, values_BSGK, positions_B) -> jax.Array:
    """As `attend`, for one query a sequence, over slots of which slot s holds position s (S slots)."""
    with _matmul_precision(self.recipe.matmul_precision):
      return jax.nn.dot_product_attention(
        q_B1HK,
        keys_BSGK,
        values_BSGK,
        query_seq_lengths=jnp.ones_like(positions_B),
        # A sequence that has ended goes on beside those that have not, past its last slot.
        key_value_seq_lengths=jnp.minimum(positions_B + 1, keys_BSGK.shape[1]),
        implementation=self._implementation(q_B1HK),
      )

  def _implementation(self, q_BLHK: jax.Array) -> Literal["cudnn", "xla"]:
    cudnn = self.implementation == "cudnn"
    if self.implementation == "auto":
      cudnn = jax.default_backend() == "gpu" and q_BLHK.dtype == jnp.bfloat16
    return "cudnn" if cudnn else "xla"

  def merge(self, o_BLHK: jax.Array) -> jax.Array:
    """Output projection."""
    return linear("BLHK,HKD->BLD", o_BLHK, self.w_out_HKD[...], self.recipe)
