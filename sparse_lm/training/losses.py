"""The objective: cross-entropy plus the L1 penalty on hidden activations.

Dimension key: B batch, L length, V vocabulary.

Everything is a sum over tokens, divided by totals of the global batch, so that micro-batches and devices add up to what
the whole batch would give.

The penalty has three readings. The paper's equation 2 averages |h| over tokens and over hidden units; the authors' code
sums over hidden units (a factor F, 5632 in the paper); and their trainer multiplies the term by batch / micro-batch of
one device (64 in the paper's runs) because it adds it, unscaled, once for each micro-batch. `sparsity.l1_reduction`
chooses between the first two and `sparsity.l1_multiplier` states the third, so a coefficient means the same on any
number of devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_lm.config import LmConfig
from sparse_lm.models.feedforward import Stats
from sparse_lm.models.transformer import Transformer


class Totals(NamedTuple):
  """Sizes of a batch that sums are divided by."""

  targets: jax.Array  # f32[], sum of target weights
  tokens: jax.Array  # f32[], tokens that are no padding

  def divisors(self) -> "Totals":
    """At least 1 each, so that the mean over nothing is 0 and not NaN."""
    return Totals(jnp.maximum(self.targets, 1.0), jnp.maximum(self.tokens, 1.0))


class Sums(NamedTuple):
  """What a part of the batch contributes."""

  cross_entropy: jax.Array  # f32[], nats
  stats: Stats  # stacked over layers


def totals(batch: dict[str, jax.Array]) -> Totals:
  """Counts of a batch of any leading shape."""
  return Totals(
    targets=jnp.sum(batch["weights_BL"], dtype=jnp.float32),
    tokens=jnp.sum(batch["segments_BL"] > 0, dtype=jnp.float32),
  )


def add(a, b):
  """Adds trees of sums; whether a neuron fired combines by or."""
  return jax.tree.map(lambda x, y: x | y if x.dtype == bool else x + y, a, b)


@jax.custom_vjp
def cross_entropy(logits_BLV: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array) -> jax.Array:
  """Sum over targets of weight * -log p(target), in nats and float32.

  Targets of weight 0 reach neither it nor a gradient, even as NaN. A target outside the vocabulary gives NaN, which
  stops a run. The backward pass keeps the logits in the compute dtype and one number for each target.
  """
  return _cross_entropy(logits_BLV, targets_BL, weights_BL)[0]


def _cross_entropy(logits_BLV, targets_BL, weights_BL):
  # select here as well as below: 0 * NaN is NaN
  counted_BL, logits_BLV32 = weights_BL > 0, logits_BLV.astype(jnp.float32)
  scores_BLV = jnp.where(counted_BL[:, :, None], logits_BLV32, 0.0)
  vocab_size = scores_BLV.shape[-1]
  # A sum of one term, and not an indexed read, which would gather over shards.
  picked_BL = jnp.sum(scores_BLV, axis=-1, where=jax.nn.one_hot(targets_BL, vocab_size, dtype=bool))
  picked_BL = jnp.where((targets_BL >= 0) & (targets_BL < vocab_size), picked_BL, jnp.nan)
  log_sum_BL = jax.nn.logsumexp(scores_BLV, axis=-1)
  nats_BL = jnp.where(counted_BL, log_sum_BL - picked_BL, 0.0)
  # log_sum is kept: were it computed anew, nothing would ask for the value before the backward pass is over, and the
  # logits, the largest array of a step, would wait for that.
  return jnp.sum(weights_BL * nats_BL), (logits_BLV, targets_BL, weights_BL, log_sum_BL, nats_BL)


def _cross_entropy_gradient(kept, d_sum):
  logits_BLV, targets_BL, weights_BL, log_sum_BL, nats_BL = kept
  p_BLV = jnp.exp(logits_BLV.astype(jnp.float32) - log_sum_BL[:, :, None])
  p_BLV -= jax.nn.one_hot(targets_BL, logits_BLV.shape[-1], dtype=jnp.float32)
  d_logits_BLV = jnp.where(weights_BL[:, :, None] > 0, (d_sum * weights_BL)[:, :, None] * p_BLV, 0.0)
  return d_logits_BLV.astype(logits_BLV.dtype), None, d_sum * nats_BL


cross_entropy.defvjp(_cross_entropy, _cross_entropy_gradient)


def forward(model: Transformer, batch: dict[str, jax.Array], *, document_mask: bool) -> Sums:
  """Runs the model on one (micro-)batch."""
  real_BL = batch["segments_BL"] > 0
  x_BLD, stats = model(batch["inputs_BL"], real_BL=real_BL, segments_BL=batch["segments_BL"] if document_mask else None)
  return Sums(cross_entropy(model.logits(x_BLD), batch["targets_BL"], batch["weights_BL"]), stats)


def l1_scale(config: LmConfig) -> float:
  """What the mean over layers and tokens of sum_n |h_n| is multiplied by before the coefficient."""
  per_unit = 1.0 / config.model.ffn_width if config.sparsity.l1_reduction == "mean" else 1.0
  return config.sparsity.l1_multiplier * per_unit


def objective(model, batch, sizes: Totals, coefficient, config: LmConfig) -> tuple[jax.Array, Sums]:
  """This part's share of `CE + coefficient * multiplier * L1` of the global batch, and its sums."""
  sums = forward(model, batch, document_mask=config.data.document_mask)
  divisors = sizes.divisors()
  l1 = jnp.mean(sums.stats.l1) / divisors.tokens * l1_scale(config)
  return sums.cross_entropy / divisors.targets + coefficient * l1, sums


def summarize(sums: Sums, sizes: Totals) -> dict[str, jax.Array]:
  """Means of a batch or of a validation set: nats a target; |h| and non-zeros a token, for each layer."""
  divisors = sizes.divisors()
  return {
    "cross_entropy": sums.cross_entropy / divisors.targets,
    "l1_per_layer": sums.stats.l1 / divisors.tokens,
    "l0_per_layer": sums.stats.l0 / divisors.tokens,
    "dead_per_layer": jnp.sum(~sums.stats.active_F, axis=-1),
  }
