"""Models for benchmarks have the number of non-zeros that they are asked for.

Dimension key: N layers, B sequences, L length.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparse_lm.config import ModelConfig, PrecisionConfig
from sparse_lm.models.sparsified import sparsified
from sparse_lm.models.transformer import Transformer


@pytest.mark.parametrize("kind", ["gated_relu", pytest.param("relu", marks=pytest.mark.slow)])
def test_every_layer_has_the_wanted_mean_of_non_zeros_and_late_tokens_have_their_part(kind):
  config = ModelConfig(vocab_size=500, context_length=64, num_layers=3, model_width=128, ffn_width=352, ffn_kind=kind)
  tokens_BL = np.random.default_rng(0).integers(0, 500, (12, 64)).astype(np.int32)
  late_BL = np.broadcast_to(np.arange(64) >= 48, (4, 64))

  def make():
    model = Transformer(config, PrecisionConfig("bf16"), rngs=nnx.Rngs(0))
    return sparsified(model, config, jnp.asarray(tokens_BL[:4]), 12.0)

  model = jax.jit(make, compiler_options={"xla_backend_optimization_level": 0})()
  l0_of = jax.jit(lambda tokens_BL, real_BL: model(tokens_BL, real_BL=real_BL)[1].l0 / jnp.sum(real_BL))
  np.testing.assert_allclose(l0_of(tokens_BL[:4], np.ones((4, 64), bool)), [12] * 3, rtol=0.03)
  np.testing.assert_allclose(l0_of(tokens_BL[4:], np.ones((8, 64), bool)), [12] * 3, rtol=0.15)  # it has not seen these
  assert (l0_of(tokens_BL[:4], late_BL) > 6).all()
