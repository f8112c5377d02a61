"""AdamW as the models on interactions use it."""

import jax
import optax

from sparse_lm.config import TrainingConfig
from sparse_lm.training.state import learning_rate


def adamw(training: TrainingConfig) -> optax.GradientTransformation:
  """After clipping by the global norm; vectors, such as biases, do not decay."""
  return optax.chain(
    optax.clip_by_global_norm(training.clip_norm),
    optax.adamw(
      learning_rate(training),
      b1=training.beta1,
      b2=training.beta2,
      eps=training.epsilon,
      weight_decay=training.weight_decay,
      mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
  )
