"""The sequence side of a Kunlun block: time-aware rotary angles, local self-attention, personalised feed-forward.

S <- S + pffn(S, X_sum), then S <- S + attention(norm(S))   (Kunlun, arXiv 2602.10016; gem, 2.5).

Of the paper we know what others report (its text was not to be had): where that leaves a choice, we say so.

Dimension key: T packed tokens of all rows, B rows, D width, H heads, K head width, P = K / 2 pairs of features,
M summary tokens of the other features and E their width, F tokens generated from them. `offsets` is i32[B + 1]; see
`packed`.

A `schedule` made once for a batch (by the module's `make_schedule`) serves all layers that are alike.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import jagged
from pallas_kernels.dispatch import Implementation
from sparse_lm.models.head_projections import HeadProjections, head_width
from sparse_lm.models.initial import normal_weight
from sparse_lm.models.packed import clear_padding, places
from sparse_lm.models.rms_norm import rms_norm
from sparse_lm.precision.linear import linear
from sparse_lm.precision.recipes import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeRotary:
  """theta[t, p] = position_t w_p + log(1 + dt_t / t_scale) w'_p   (ROTE; Kunlun, section 4.2).

  Frequencies fall geometrically from 1 to nearly 1 / base. They, and how positions and times share a head, are our
  choice: "split" gives half of its pairs to each (so that w or w' is zero), "sum" every pair to both.
  """

  head_width: int
  t_scale: float  # in the unit of dt; events much younger are told apart by position alone
  mode: Literal["split", "sum"] = "split"
  position_base: float = 10_000.0
  time_base: float = 100.0  # the logarithm of a time is below 20, while positions run into thousands

  def __post_init__(self):
    if self.mode not in ("split", "sum"):
      raise ValueError(f"TimeRotary: mode={self.mode!r} must be 'split' or 'sum'")
    pairs = 4 if self.mode == "split" else 2
    if self.head_width < pairs or self.head_width % pairs:
      raise ValueError(f"TimeRotary: head_width={self.head_width} must be a multiple of {pairs} for mode={self.mode!r}")
    if not self.t_scale > 0:
      raise ValueError(f"TimeRotary: t_scale={self.t_scale} must be positive")

  def __call__(self, dt_T: jax.Array, offsets: jax.Array) -> jagged.Rotary:
    """Sines and cosines for all layers. dt_T: time from each event to the request; below 0 counts as 0."""
    _, position_T = places(offsets, len(dt_T))
    time_T = jnp.log1p(jnp.maximum(dt_T.astype(jnp.float32), 0) / self.t_scale)
    position_P, time_P = self._frequencies()
    angle_TP = position_T[:, None] * position_P[None, :] + time_T[:, None] * time_P[None, :]
    return jagged.Rotary(jnp.cos(angle_TP), jnp.sin(angle_TP))

  def _frequencies(self) -> tuple[jax.Array, jax.Array]:
    pairs = self.head_width // (4 if self.mode == "split" else 2)
    exponent = -jnp.arange(pairs, dtype=jnp.float32) / pairs
    position, time = self.position_base**exponent, self.time_base**exponent
    if self.mode == "sum":
      return position, time
    zeros = jnp.zeros_like(position)
    return jnp.concatenate([position, zeros]), jnp.concatenate([zeros, time])


class WindowAttention(nnx.Module):
  """S + W_o softmax(q k^T / sqrt(K)) v, with x = rms(S), q = rms(W_q x), k = rms(W_k x), v = W_v x.

  A token sees those at most `window` away, or those of its block of `block` tokens (counted from its row's start), or
  its whole row. q and k are normalised head by head before they are turned, so that scores stay within sqrt(K).
  """

  def __init__(
    self,
    width: int,
    num_heads: int,
    recipe: Recipe,
    *,
    window: int | None = None,
    block: int | None = None,
    implementation: Implementation | None = None,
    rngs: nnx.Rngs,
  ):
    self.heads = HeadProjections(width, num_heads, recipe, rngs=rngs)
    self.window, self.block = window, block
    self.implementation = implementation

  def __call__(
    self,
    s_TD: jax.Array,
    offsets: jax.Array,
    rotary: jagged.Rotary | None = None,
    *,
    schedule: jagged.Schedule | None = None,
  ) -> jax.Array:
    """Tokens [T, D], each changed by those it sees."""
    s_TD = clear_padding(s_TD, offsets)
    x_TD = rms_norm(s_TD)
    o_THK = jagged.attention(
      rms_norm(self.heads.query(x_TD)),
      rms_norm(self.heads.key(x_TD)),
      self.heads.value(x_TD),
      offsets,
      window=self.window,
      block=self.block,
      rotary=rotary,
      schedule=schedule,
      implementation=self.implementation,
    )
    return s_TD + self.heads.merge(o_THK)

  def make_schedule(self, offsets: jax.Array, num_tokens: int) -> jagged.Schedule:
    """For all layers with this mask."""
    return jagged.make_schedule(offsets, num_queries=num_tokens, window=self.window, block=self.block)

  def flops(self, lengths: Sequence[int]) -> int:
    """Of a forward pass: 8 T D^2 + 4 D (visible pairs)."""
    _, _, width = self.heads.w_query_HKD.shape
    return 8 * sum(lengths) * width**2 + 4 * width * sum(map(self._visible_pairs, lengths))

  def _visible_pairs(self, length: int) -> int:
    """Of one row: a diagonal band in each block, of which the last one may be short."""
    blocks, rest = divmod(length, length + 1 if self.block is None else self.block)
    return blocks * self._band(self.block or 0) + self._band(rest)

  def _band(self, length: int) -> int:
    reach = length - 1 if self.window is None else min(self.window, length - 1)
    return length * (2 * reach + 1) - reach * (reach + 1)


class PersonalisedFfn(nnx.Module):
  """S + act(S K_b^T / tau) V_b for each head, K_b and V_b made from the row's summary   (GDPA-PFFN; Kunlun, 4.3.1).

  Generalised dot-product attention from the row's tokens to F generated ones: a feed-forward block whose F neurons
  belong to the row. The activation is elementwise, never a softmax. Keys and values are

    K_b[f, h] = sum_m A[h, f, m] (W_h X_sum[b, m]),

  likewise V_b, so for each head they lie in a space of M dimensions. How they are made from X_sum is our choice.
  """

  def __init__(
    self,
    width: int,
    num_heads: int,
    recipe: Recipe,
    *,
    summary_tokens: int,
    neurons: int,
    tau: float,
    summary_width: int | None = None,
    activation: str = "gelu",
    implementation: Implementation | None = None,
    rngs: nnx.Rngs,
  ):
    """`tau` is the longest row's length in the paper; `activation` one of `jagged.ACTIVATIONS`.

    `summary_width` is that of X_sum, where the tokens have a width of their own; None: the same.
    """
    if activation not in jagged.ACTIVATIONS:
      raise ValueError(
        f"PersonalisedFfn: activation={activation!r} must be one of {', '.join(jagged.ACTIVATIONS)}; a softmax over"
        " neurons is no feed-forward block"
      )
    summary_width = width if summary_width is None else summary_width
    shape_HKE = (num_heads, head_width(width, num_heads), summary_width)
    shape_HFM = (num_heads, neurons, summary_tokens)
    self.w_key_HKE = normal_weight(shape_HKE, summary_width, rngs=rngs)
    self.w_value_HKE = normal_weight(shape_HKE, summary_width, rngs=rngs)
    self.mix_key_HFM = normal_weight(shape_HFM, summary_tokens, rngs=rngs)
    self.mix_value_HFM = normal_weight(shape_HFM, summary_tokens, rngs=rngs)
    self.recipe = recipe
    self.tau = tau
    self.activation = activation
    self.implementation = implementation

  def __call__(
    self, s_TD: jax.Array, x_sum_BME: jax.Array, offsets: jax.Array, *, schedule: jagged.Schedule | None = None
  ) -> jax.Array:
    """Tokens [T, D], each changed by the neurons of its row."""
    heads, width, _ = self.w_key_HKE.shape
    s_TD = clear_padding(s_TD, offsets)
    o_THK = jagged.attention(
      s_TD.reshape(-1, heads, width),
      self._generated(x_sum_BME, self.w_key_HKE, self.mix_key_HFM),
      self._generated(x_sum_BME, self.w_value_HKE, self.mix_value_HFM),
      offsets,
      self._neuron_offsets(offsets),
      activation=self.activation,
      pre_scale=1 / self.tau,
      schedule=schedule,
      implementation=self.implementation,
    )
    return s_TD + o_THK.reshape(s_TD.shape)

  def _generated(self, x_sum_BME: jax.Array, w_HKE: nnx.Param, mix_HFM: nnx.Param) -> jax.Array:
    """[B * F, H, K]: the F tokens of each row, packed."""
    x_BMHK = linear("BME,HKE->BMHK", x_sum_BME, w_HKE[...], self.recipe)
    x_BFHK = linear("BMHK,HFM->BFHK", x_BMHK, mix_HFM[...], self.recipe)
    return x_BFHK.reshape(-1, *x_BFHK.shape[2:])

  def _neuron_offsets(self, offsets: jax.Array) -> jax.Array:
    _, neurons, _ = self.mix_key_HFM.shape
    return neurons * jnp.arange(len(offsets), dtype=jnp.int32)

  def make_schedule(self, offsets: jax.Array, num_tokens: int) -> jagged.Schedule:
    """For all layers with as many neurons."""
    neuron_offsets = self._neuron_offsets(offsets)
    num_rows, (_, neurons, _) = len(offsets) - 1, self.mix_key_HFM.shape
    return jagged.make_schedule(offsets, neuron_offsets, num_queries=num_tokens, num_keys=num_rows * neurons)

  def flops(self, lengths: Sequence[int]) -> int:
    """Of a forward pass: 4 T F D, and for each row 4 M D (E + F) to make its neurons."""
    (heads, of_head, summary_width), (_, neurons, summary_tokens) = self.w_key_HKE.shape, self.mix_key_HFM.shape
    width = heads * of_head
    of_row = 4 * summary_tokens * width * (summary_width + neurons)
    return 4 * sum(lengths) * neurons * width + len(lengths) * of_row
