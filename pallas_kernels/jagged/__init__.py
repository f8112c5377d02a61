"""Attention on packed rows of different lengths: flash softmax, GDPA, block, window, HSTU, seed pooling."""

from pallas_kernels.jagged.activations import ACTIVATIONS as ACTIVATIONS
from pallas_kernels.jagged.api import attention as attention
from pallas_kernels.jagged.api import make_schedule as make_schedule
from pallas_kernels.jagged.bias import RelativeBias as RelativeBias
from pallas_kernels.jagged.dense import dense_to_jagged as dense_to_jagged
from pallas_kernels.jagged.dense import jagged_dense_matmul as jagged_dense_matmul
from pallas_kernels.jagged.dense import jagged_softmax as jagged_softmax
from pallas_kernels.jagged.dense import jagged_to_dense as jagged_to_dense
from pallas_kernels.jagged.rotary import Rotary as Rotary
from pallas_kernels.jagged.schedule import Schedule as Schedule
