"""Every test sees eight virtual CPU devices, Flax NNX in tree mode, and an error where NumPy-style rank promotion hides a bug."""

import jax
from flax import nnx

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
nnx.set_graph_mode(False)
nnx.set_graph_updates(False)
