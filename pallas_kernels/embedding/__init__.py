"""Embedding tables: pooled lookup of rows."""

from pallas_kernels.embedding.api import bag as bag
