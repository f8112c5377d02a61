"""Sparse feed-forward blocks: the packed format, packing inside a matrix product, and computing with what it holds."""

from pallas_kernels.twell.api import KEPT as KEPT
from pallas_kernels.twell.api import Stats as Stats
from pallas_kernels.twell.api import feedforward as feedforward
from pallas_kernels.twell.api import gated_feedforward as gated_feedforward
from pallas_kernels.twell.api import pack as pack
from pallas_kernels.twell.format import Spec as Spec
from pallas_kernels.twell.format import Twell as Twell
from pallas_kernels.twell.format import from_dense as from_dense
from pallas_kernels.twell.format import to_dense as to_dense
from pallas_kernels.twell.neurons import Neurons as Neurons
from pallas_kernels.twell.neurons import prune_dead as prune_dead
from pallas_kernels.twell.neurons import sort_neurons as sort_neurons
from pallas_kernels.twell.routing import DENSE as DENSE
from pallas_kernels.twell.routing import SPARSE as SPARSE
