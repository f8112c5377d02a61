"""What steers sparsity during training, and what follows it.

That is the coefficient's warm-up, the L0 controller, the revival of dead neurons, and the time from which twell pays.
"""

import jax
import jax.numpy as jnp

from sparse_lm.config import LmConfig
from sparse_lm.models.feedforward import gate_parameter
from sparse_lm.parallel import sharding

# The controller multiplies the coefficient, because L0 answers to its ratio and not to its difference. It sums the
# error slowly (integral) and answers its present value at once (proportional). An L0 more than e times too high, as
# every run starts with, counts as e times, so that the start does not wind it up; one that has collapsed counts for
# more, since neurons that stay silent for long do not come back.
INTEGRAL_GAIN = 0.02
PROPORTIONAL_GAIN = 0.3
ERROR_RANGE = -4.0, 1.0  # of log(l0 / target)

# Early gates are dense, and plain autodiff of dense blocks is faster than twell. The host waits for each decision, so
# they are few; the way back is longer, so that an L0 near the limit does not change the step at every one of them.
DECISION_EVERY = 16  # steps
BACK_TO_DENSE = 1.25  # times the L0 below which a run turns sparse


def warmup(step: jax.Array, config: LmConfig) -> jax.Array:
  """Share of the L1 coefficient in force: 0 up to l1_warmup_start, 1 from l1_warmup_end, linear between."""
  start, end = config.sparsity.l1_warmup_start, config.sparsity.l1_warmup_end
  if end == start:
    return jnp.where(step >= end, 1.0, 0.0)
  return jnp.clip((step - start) / (end - start), 0.0, 1.0)


def control(coefficient: jax.Array, l0: jax.Array, ramp: jax.Array, target: float) -> tuple[jax.Array, jax.Array]:
  """One step of the L0 controller.

  Args:
    coefficient: f32[], the one it keeps.
    l0: f32[], non-zeros a token of the step before; a negative value says that there is none yet.
    ramp: f32[], share of the L1 warm-up that is done; the controller waits for 1.
    target: wanted l0.

  Returns:
    (coefficient to keep, coefficient to use in this step).
  """
  error = jnp.clip(jnp.log(jnp.maximum(l0, 1e-3) / target), *ERROR_RANGE)
  error = jnp.where((l0 >= 0) & (ramp >= 1), error, 0.0)
  coefficient = coefficient * jnp.exp(INTEGRAL_GAIN * error)
  return coefficient, coefficient * jnp.exp(PROPORTIONAL_GAIN * error)


def l0_limits(config: LmConfig) -> tuple[float, float]:
  """Non-zeros a token: below the first in every layer a run turns sparse, above the second in any layer dense again."""
  below = config.sparsity.sparse_below * config.model.ffn_width
  return below, BACK_TO_DENSE * below


def decide(
  is_sparse: jax.Array, step: jax.Array, l0_per_layer: jax.Array, no_tokens: jax.Array, config: LmConfig
) -> jax.Array:
  """Whether the steps after this one are to be sparse.

  Args:
    is_sparse: bool[], the decision in force.
    step: i32[], number of the step that was just taken, from 1; others than every DECISION_EVERY-th decide nothing.
    l0_per_layer: f32[layers], non-zeros a token in that step.
    no_tokens: bool[], it saw padding alone, which decides nothing.
    config: gives the limits.
  """
  below, above = l0_limits(config)
  largest = jnp.max(l0_per_layer)
  decides = (step % DECISION_EVERY == 0) & ~no_tokens
  return jnp.where(decides, jnp.where(is_sparse, largest <= above, largest < below), is_sparse)


def revive_dead(model, active: jax.Array, key: jax.Array, config: LmConfig):
  """Targeted re-initialisation (TwELL, appendix C.3) of dead neurons' gate rows: w <- (1 - rate) w + rate N(0, std^2).

  Args:
    model: parameters after the optimiser's update.
    active: bool[layers, F], fired at least once during the whole global step.
    key: random key of this step.
    config: gives rate, standard deviation and which matrix is the gate.
  """
  rate, std = config.sparsity.reinit_rate, config.sparsity.reinit_std
  gate = gate_parameter(config.model.ffn_kind)

  def revive(path, w):
    if sharding.parameter_name(path) != gate:
      return w
    fresh = std * jax.random.normal(key, w.shape, w.dtype, out_sharding=jax.typeof(w).sharding)
    return jnp.where(active[:, :, None], w, (1 - rate) * w + rate * fresh)

  return jax.tree_util.tree_map_with_path(revive, model)
