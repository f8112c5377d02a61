"""Every test sees eight virtual CPU devices, NNX in tree mode, and an error where rank promotion could hide a bug.

Compiled programs are kept in .jax_cache: the tests start the same few programs dozens of times, and compiling them
takes far longer than running them.
"""

import os
from pathlib import Path

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax
from flax import nnx

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
nnx.set_graph_mode(False)
nnx.set_graph_updates(False)
