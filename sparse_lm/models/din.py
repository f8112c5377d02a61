"""Deep interest network: a sum over the history, weighted by what the item that is predicted has to do with each event.

  logit = MLP([x | sum_t w_t s_t]),   w_t = MLP([s_t | s_t * i | i])   (DIN, arXiv 1706.06978, section 4.3)

s_t is an event, i the item, x all tokens of the features. Weights are no softmax, so that the sum also tells how much
there was. The paper's activation (Dice, which normalises over the batch) is relu here: a score does not depend on who
shares the batch.

Dimension key: B samples, N interaction tokens, D width, E of a table's row, T packed events, S streams.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_lm.models.features import FeatureTokens, Inputs, LogitHead
from sparse_lm.models.mlp import MLP
from sparse_lm.models.packed import clear_padding, spread, total
from sparse_lm.precision.recipes import Recipe
from sparse_lm.recsys_config import RecommenderConfig


class Din(nnx.Module):
  """The module's equation. Its activation unit has `head_width / 2` hidden neurons."""

  def __init__(self, config: RecommenderConfig, features: int, numeric: int, recipe: Recipe, *, rngs: nnx.Rngs):
    width = config.table_width  # of events, and of the item that they are compared with
    self.tokens = FeatureTokens(config, features, numeric, recipe, rngs=rngs)
    self.activation_unit = MLP((3 * width, config.head_width // 2, 1), "relu", recipe, rngs=rngs)
    self.head = LogitHead(self.tokens.number * config.width + width, config, recipe, rngs=rngs)

  def __call__(self, inputs: Inputs) -> jax.Array:
    """logit_B."""
    (stream,) = inputs.streams
    s_TE = clear_padding(stream.events_TD, stream.offsets)
    item_TE = spread(inputs.item_BD, stream.offsets, len(s_TE))
    weight_T1 = self.activation_unit(jnp.concatenate([s_TE, s_TE * item_TE, item_TE], axis=1))
    interest_BE = total(weight_T1 * s_TE, stream.offsets)
    x_BND = self.tokens(inputs)
    return self.head(jnp.concatenate([x_BND.reshape(len(x_BND), -1), interest_BE], axis=1))

  def flops(self, lengths_SB: Sequence[Sequence[int]]) -> int:
    """Of a forward pass: those of the activation unit for each event, of the other parts for each sample."""
    (lengths,) = lengths_SB
    of_sample = self.tokens.flops() + self.head.flops()
    return sum(lengths) * self.activation_unit.flops() + len(lengths) * of_sample
