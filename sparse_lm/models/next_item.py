"""Next-item models: SASRec or HSTU blocks over a user's items, and similarities with all items   (gem, 2.6 and 6.3).

  x_t = dropout(sqrt(D) E[item_t] + P[t]),   u_t = blocks(x)_t / |blocks(x)_t|,   score of item v = u_t . E[v] / |E[v]|

u_t is who the user is after token t of a row. The table E is an ordinary parameter, unlike those of the recommenders:
the research models train it by AdamW together with the blocks, and as every item is a possible answer, all rows take
part in the scores anyway. Sizes are those of a catalogue whose moments fit beside it.

Dimension key: B rows of a batch, T packed tokens, D width, V items, L longest row, N negatives.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_lm.data.sequences import Batch
from sparse_lm.models.dropout import dropout
from sparse_lm.models.hstu import HstuBlock
from sparse_lm.models.initial import normal_weight
from sparse_lm.models.packed import clear_padding, places
from sparse_lm.models.sasrec import SasrecBlock
from sparse_lm.next_item_config import NextItemModelConfig
from sparse_lm.precision.recipes import Recipe

_INIT_STD = 0.02  # of items, as in the public code
_SHORTEST = 1e-6  # length that a vector is divided by at least
_DRAWN_TWICE = -5e4  # logit of a negative that is the right item


class NextItemModel(nnx.Module):
  """The model of the module's equation."""

  def __init__(self, config: NextItemModelConfig, num_items: int, longest: int, recipe: Recipe, *, rngs: nnx.Rngs):
    self.item_VD = nnx.Param(_INIT_STD * jax.random.normal(rngs.params(), (num_items, config.width)))
    self.position_LD = normal_weight((longest, config.width), config.width, rngs=rngs)
    self.blocks = nnx.List([_make_block(config, longest, recipe, rngs) for _ in range(config.num_layers)])
    self.dropout = config.dropout
    self.recipe = recipe

  def __call__(self, batch: Batch, *, key: jax.Array | None = None) -> jax.Array:
    """users_TD, float32 of length 1, zeros for padding; a row longer than the table of positions gives NaN.

    `key` is that of dropout; None: none.
    """
    offsets, num_tokens = jnp.asarray(batch.offsets), len(batch.item_T)
    keys = [None] * (1 + len(self.blocks)) if key is None else list(jax.random.split(key, 1 + len(self.blocks)))
    _, position_T = places(offsets, num_tokens)
    where_TD = self.position_LD[...].at[position_T].get(mode="fill", fill_value=jnp.nan)
    x_TD = self.item_VD[...][batch.item_T] * self.item_VD.shape[1] ** 0.5 + where_TD
    x_TD = dropout(clear_padding(x_TD, offsets), self.dropout, keys[0]).astype(self.recipe.compute_dtype)
    schedule = self.blocks[0].make_schedule(offsets, num_tokens)
    for block, block_key in zip(self.blocks, keys[1:], strict=True):
      when = (jnp.asarray(batch.time_T),) if isinstance(block, HstuBlock) else ()
      x_TD = block(x_TD, offsets, *when, key=block_key, schedule=schedule)
    return _of_length_1(clear_padding(x_TD, offsets))

  def items(self) -> jax.Array:
    """items_VD, float32 of length 1."""
    return _of_length_1(self.item_VD[...])

  def scores(self, batch: Batch) -> jax.Array:
    """f32[B, V] in [-1, 1], of all items, for what each row ends with; rows have two tokens at least, or do not count.

    An item that the row holds is scored as any other.
    """
    last_BD = self(batch)[jnp.maximum(batch.offsets[1:] - 2, 0)]
    return jnp.einsum("bd,vd->bv", last_BD, self.items(), precision=jax.lax.Precision.HIGHEST)


def next_items(batch: Batch) -> tuple[jax.Array, jax.Array]:
  """(item_T, exists_T): the item that follows each token in its row, and whether there is one."""
  row_T, _ = places(jnp.asarray(batch.offsets), len(batch.item_T))
  num_rows = len(batch.offsets) - 1
  exists_T = (row_T == jnp.append(row_T[1:], num_rows)) & (row_T < num_rows)
  return jnp.roll(batch.item_T, -1), exists_T


def sampled_softmax(
  users_TD: jax.Array,
  items_VD: jax.Array,
  right_T: jax.Array,
  exists_T: jax.Array,
  negative_TN: jax.Array,
  *,
  temperature: float,
) -> jax.Array:
  """Mean of -log p(right item) among it and its negatives, in nats, over the positions that exist; 0 for none.

  Args:
    users_TD: of length 1, as `items_VD`; logits are their products / temperature.
    items_VD: the whole catalogue.
    right_T: items.
    exists_T: whether there is a right item.
    negative_TN: drawn items; one that is the right item has a logit of -5e4, so that it has no part.
    temperature: positive.
  """
  # All items are scored, by one product, and the drawn ones picked: N scalars a token are gathered, and scattered in
  # the gradient, not N rows. For D = 50, N = 128 and 1,682 items that takes half the time on two cores.
  logit_TV = jnp.einsum("td,vd->tv", users_TD, items_VD, precision=jax.lax.Precision.HIGHEST) / temperature
  right_T1 = right_T[:, None]
  right_logit_T1 = jnp.take_along_axis(logit_TV, right_T1, axis=1)
  logit_TN = jnp.where(negative_TN == right_T1, _DRAWN_TWICE, jnp.take_along_axis(logit_TV, negative_TN, axis=1))
  all_logits = jnp.concatenate([right_logit_T1, logit_TN], axis=1)
  loss_T = jax.nn.logsumexp(all_logits, axis=1) - right_logit_T1[:, 0]
  return jnp.sum(jnp.where(exists_T, loss_T, 0)) / jnp.maximum(jnp.sum(exists_T), 1)


def _make_block(config: NextItemModelConfig, longest: int, recipe: Recipe, rngs: nnx.Rngs) -> HstuBlock | SasrecBlock:
  width, heads = config.width, config.num_heads
  if config.kind == "hstu":
    return HstuBlock(width, heads, config.head_width, recipe, max_length=longest, dropout=config.dropout, rngs=rngs)
  # The network of a token is as wide as the token, as in the paper.
  return SasrecBlock(width, heads, recipe, neurons=width, dropout=config.dropout, rngs=rngs)


def _of_length_1(x_TD: jax.Array) -> jax.Array:
  """x / max(|x|, 1e-6), in float32; the gradient of zeros is finite."""
  x_TD = x_TD.astype(jnp.float32)
  square_T1 = jnp.sum(jnp.square(x_TD), axis=1, keepdims=True)
  return x_TD * jax.lax.rsqrt(jnp.maximum(square_T1, _SHORTEST**2))
