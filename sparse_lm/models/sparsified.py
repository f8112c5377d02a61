"""Untrained models as sparse as trained ones, for benchmarks: a given mean number of neurons fires in every layer.

A gate has no bias, so a feature carries one: feature 0 of the residual stream is 1 for every token, and no block writes
to it. The norm makes it some x_0 > 0, and a weight b on it, the same for all neurons of a layer, moves their threshold:
a neuron fires where p + b x_0 > 0, p being what the other features give. So b is minus a quantile of p / x_0 over
tokens and neurons.

The other features of an embedding have variance 1 too. With those of an initialised model, fifty times smaller, what
attention adds would decide how large a token's state is. It averages over ever more tokens, and the first ones of a
sequence would take nearly all non-zeros. Now they have several times the mean, as in trained models (TwELL, figure 7).

Dimension key: N layers, B sequences, L length, D model width, F hidden neurons.
"""

import jax
import jax.numpy as jnp

from sparse_lm.config import ModelConfig
from sparse_lm.models.feedforward import gate_parameter
from sparse_lm.models.transformer import Block, Transformer
from sparse_lm.parallel import sharding
from sparse_lm.precision.linear import linear


def sparsified(
  model: Transformer, config: ModelConfig, tokens_BL: jax.Array, non_zeros: float, first: int = 0
) -> Transformer:
  """Returns the model with other weights on and into feature 0, and larger embeddings.

  Args:
    model: as it is initialised.
    config: of the model, whose neurons ReLU can switch off.
    tokens_BL: on which it is to have this many non-zeros.
    non_zeros: mean over tokens, in every layer.
    first: position of the first token of a sequence that counts.
  """
  gate = gate_parameter(config.ffn_kind)

  def set_aside(path, w):
    name = sharding.parameter_name(path)
    if name == "embedding_VD":
      return _with_feature_0(w / config.init_std, 1.0)
    return _with_feature_0(w, 0.0) if name in ("w_out_HKD", "w_down_FD", gate) else w

  model = jax.tree_util.tree_map_with_path(set_aside, model)
  real_BL = jnp.ones_like(tokens_BL, dtype=bool)
  angles = model.angles(jnp.arange(tokens_BL.shape[1])[None, :])

  def layer(x_BLD, block: Block):
    q_BLHK, k_BLGK, v_BLGK = block.project(x_BLD, angles)
    o_BLHK = block.attention.attend(q_BLHK, k_BLGK, v_BLGK, None)
    in_BLD = block.feedforward_norm(x_BLD + block.attention.merge(o_BLHK))
    w_FD = getattr(block.feedforward, gate)[...]
    p_BLF = linear("BLD,FD->BLF", in_BLD, w_FD, model.recipe).astype(jnp.float32)
    ratio_BLF = sharding.gather(p_BLF / in_BLD[:, :, :1].astype(jnp.float32))
    bias = -jnp.quantile(ratio_BLF[:, first:], 1 - non_zeros / config.ffn_width)
    return biased(block, bias).finish(x_BLD, o_BLHK, real_BL)[0], bias

  def biased(blocks: Block, bias: jax.Array) -> Block:
    set_bias = lambda path, w: _with_feature_0(w, bias) if sharding.parameter_name(path) == gate else w
    return jax.tree_util.tree_map_with_path(set_bias, blocks)

  _, bias_N = jax.lax.scan(layer, model.embed(tokens_BL), model.blocks)
  model.blocks = biased(model.blocks, bias_N[:, None, None])
  return model


def _with_feature_0(w: jax.Array, value) -> jax.Array:
  """The matrix [..., D] with this value in its first column."""
  first = jax.lax.broadcasted_iota(jnp.int32, w.shape, w.ndim - 1) == 0
  return jnp.where(first, jnp.asarray(value, w.dtype), w)
