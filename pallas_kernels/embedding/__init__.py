"""Embedding tables: pooled lookup of rows, and the update of the rows that were looked up."""

from pallas_kernels.embedding.adagrad import rowwise_adagrad as rowwise_adagrad
from pallas_kernels.embedding.api import bag as bag
