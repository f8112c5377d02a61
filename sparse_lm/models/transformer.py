"""Llama-like decoder ("Transformer++" of the TwELL paper, table 2): pre-norm blocks, scanned over layers.

Dimension key: B batch, L length, D model width, F hidden neurons, V vocabulary. The stacked parameters of all blocks
carry one more axis in front, the layer.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import twell
from sparse_lm.config import ModelConfig, PrecisionConfig
from sparse_lm.models.attention import Attention, rotary_angles
from sparse_lm.models.embedding import embed
from sparse_lm.models.feedforward import Stats, make_feedforward
from sparse_lm.models.normalization import RmsNorm
from sparse_lm.precision.linear import linear
from sparse_lm.precision.recipes import RECIPES, Recipe


def _remat(policy: str) -> tuple[Callable, Callable]:
  """(wrapper of the whole block, wrapper of its parts around attention) for a named rematerialisation policy."""
  policies = jax.checkpoint_policies
  # What sparse blocks keep takes the place of the results of their projections.
  of_sparse = policies.save_only_these_names(twell.KEPT)
  keep_dots = functools.partial(
    jax.checkpoint, policy=policies.save_from_both_policies(policies.dots_saveable, of_sparse)
  )
  identity = lambda f: f
  wrappers: dict[str, tuple[Callable, Callable]] = {
    "none": (identity, identity),  # keeps whatever the backward pass reads
    "full": (jax.checkpoint, identity),  # keeps the block's input only
    "dots": (keep_dots, identity),  # keeps results of projections, recomputes elementwise work and attention
    "dots_and_attention": (identity, keep_dots),  # keeps what attention's own backward wants as well
  }
  return wrappers[policy]


class Block(nnx.Module):
  """x + attention(norm(x)), then + feedforward(norm(.))."""

  def __init__(self, config: ModelConfig, recipe: Recipe, *, rngs: nnx.Rngs):
    self.attention_norm = RmsNorm(config.model_width, config.norm_epsilon)
    self.attention = Attention(config, recipe, rngs=rngs)
    self.feedforward_norm = RmsNorm(config.model_width, config.norm_epsilon)
    self.feedforward = make_feedforward(config, recipe, rngs=rngs)
    self.remat = config.remat

  def __call__(self, x_BLD, real_BL, segments_BL, angles) -> tuple[jax.Array, Stats]:
    """segments_BL None: attention sees all earlier tokens."""
    whole, part = _remat(self.remat)

    def run(block, x_BLD):
      q_BLHK, k_BLGK, v_BLGK = part(Block.project)(block, x_BLD, angles)
      o_BLHK = block.attention.attend(q_BLHK, k_BLGK, v_BLGK, segments_BL)
      return part(Block.finish)(block, x_BLD, o_BLHK, real_BL)

    return whole(run)(self, x_BLD)

  def project(self, x_BLD: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All that comes before attention: its queries, keys and values."""
    return self.attention.project(self.attention_norm(x_BLD), angles)

  def finish(self, x_BLD: jax.Array, o_BLHK: jax.Array, real_BL: jax.Array) -> tuple[jax.Array, Stats]:
    """All that comes after attention: the block's output, and statistics of its hidden units."""
    x_BLD = x_BLD + self.attention.merge(o_BLHK)
    y_BLD, stats = self.feedforward(self.feedforward_norm(x_BLD), real_BL)
    return x_BLD + y_BLD, stats


class Transformer(nnx.Module):
  """A decoder. `__call__` gives hidden states, `logits` the scores of the next token.

  Needs NNX tree mode (`nnx.set_graph_mode(False)`, `nnx.set_graph_updates(False)`), as entry points set it.
  """

  def __init__(self, config: ModelConfig, precision: PrecisionConfig, *, rngs: nnx.Rngs):
    recipe = RECIPES[precision.recipe]
    normal = nnx.initializers.normal(config.init_std)
    shape_VD = (config.vocab_size, config.model_width)
    make_block = lambda key: Block(config, recipe, rngs=nnx.Rngs(key))
    self.embedding_VD = nnx.Param(normal(rngs.params(), shape_VD, jnp.float32))
    self.blocks = jax.vmap(make_block)(jax.random.split(rngs.params(), config.num_layers))
    self.final_norm = RmsNorm(config.model_width, config.norm_epsilon)
    self.head_VD = None if config.tie_embeddings else nnx.Param(normal(rngs.params(), shape_VD, jnp.float32))
    self.recipe = recipe
    self.head_width = config.head_width
    self.rope_theta = config.rope_theta

  def __call__(self, tokens_BL, *, real_BL=None, segments_BL=None) -> tuple[jax.Array, Stats]:
    """Hidden states after the final norm, and statistics stacked over layers.

    Args:
      tokens_BL: i32 ids below the vocabulary size; checked by the data layer, not here.
      real_BL: bool, False for padding, which statistics leave out; None: all tokens are real.
      segments_BL: i32 document numbers; attention stays inside a document. None: no document mask.
    """
    if real_BL is None:
      real_BL = jnp.ones_like(tokens_BL, dtype=bool)
    angles = self.angles(jnp.arange(tokens_BL.shape[1])[None, :])
    x_BLD = self.embed(tokens_BL)
    x_BLD, stats = jax.lax.scan(lambda x, block: block(x, real_BL, segments_BL, angles), x_BLD, self.blocks)
    return self.final_norm(x_BLD), stats

  def with_ffn(self, implementation: str) -> "Transformer":
    """The same parameters with feed-forward blocks computed this way, "dense" or "twell"."""
    model = jax.tree.map(lambda w: w, self)  # a module of its own
    model.blocks.feedforward.implementation = implementation
    return model

  def embed(self, tokens_BL: jax.Array) -> jax.Array:
    """What the first block reads."""
    return embed(self.embedding_VD[...], tokens_BL, self.recipe)

  def angles(self, positions_BL: jax.Array) -> jax.Array:
    """Rotary angles at these positions, counted from the start of a sequence."""
    return rotary_angles(positions_BL, self.head_width, self.rope_theta)

  def logits(self, x_BLD: jax.Array) -> jax.Array:
    """Scores of the next token, in the compute dtype."""
    head_VD = self.embedding_VD if self.head_VD is None else self.head_VD
    return linear("BLD,VD->BLV", x_BLD, head_VD[...], self.recipe)
