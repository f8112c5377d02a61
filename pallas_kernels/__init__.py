"""Sparse and jagged kernels for Hopper GPUs in JAX, with a plain jnp reference for each. Usable without sparse_lm."""

from pallas_kernels import embedding as embedding
from pallas_kernels import jagged as jagged
from pallas_kernels import sharding as sharding
from pallas_kernels import twell as twell
