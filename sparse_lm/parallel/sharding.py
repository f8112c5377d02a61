"""From the dimension key to the mesh: which axis of an array lies on which axis of the mesh.

The suffix of an array's name is its logical shape, so the rules are one line a letter. Weights are shared along `fsdp`
and gathered where they are used; activations are split along the batch and never along anything else.
"""

import dataclasses

import jax
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class ShardingRules:
  """Mesh axes of each logical axis; None is replicated."""

  batch: tuple[str, ...] = ("data", "fsdp")  # B of activations
  width: str | None = "fsdp"  # D of weights
  neurons: str | None = None  # F of weights
  heads: str | None = None  # H, G of weights
  vocabulary: str | None = None  # V of weights

  def weight(self, name: str, ndim: int) -> P:
    """Spec of the parameter `name`, e.g. `w_gate_FD`; axes that the suffix does not name (stacked layers) come first.

    Raises:
      ValueError: two axes of the weight would land on one mesh axis.
    """
    suffix = name.rsplit("_", 1)[-1]
    axis_of = {"D": self.width, "F": self.neurons, "H": self.heads, "G": self.heads, "V": self.vocabulary, "K": None}
    axes = [axis_of[letter] for letter in suffix]
    used = [axis for axis in axes if axis is not None]
    if len(used) != len(set(used)):
      raise ValueError(f"{name}: two of its axes land on one mesh axis ({axes}); change one rule of {self}")
    return P(*[None] * (ndim - len(axes)), *axes)

  def activations(self, ndim: int) -> P:
    """Spec of an activation whose first axis is the batch."""
    return P(self.batch, *[None] * (ndim - 1))


RULES = ShardingRules()


def under_mesh() -> bool:
  """Whether arrays are laid out over the mesh of `jax.set_mesh`, which may have one device."""
  return not jax.sharding.get_abstract_mesh().empty


def gather(w: jax.Array) -> jax.Array:
  """The whole weight on every device. Its transpose is the reduce-scatter of the gradient."""
  return jax.sharding.reshard(w, P(*[None] * w.ndim)) if under_mesh() else w


def activations(ndim: int) -> P | None:
  """`out_sharding` of an activation, for operations whose result layout JAX will not guess; None without a mesh."""
  return RULES.activations(ndim) if under_mesh() else None


def per_device_batch(f):
  """f runs on each device's own rows of the batch: for operations that cannot be partitioned automatically.

  Takes and returns arrays whose first axis is the batch, or in a result whatever a device adds to it.
  """

  def run(*arrays):
    if not under_mesh():
      return f(*arrays)
    specs = tuple(RULES.activations(x.ndim) for x in arrays)
    out = jax.eval_shape(f, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    return jax.shard_map(f, in_specs=specs, out_specs=jax.tree.map(lambda o: RULES.activations(o.ndim), out))(*arrays)

  return run


def parameter_name(path: tuple) -> str:
  """The attribute that holds a parameter, from its path in a tree of NNX state."""
  return [str(getattr(key, "key", getattr(key, "name", ""))) for key in path if getattr(key, "name", "") != "value"][-1]


def shard_parameters(params):
  """Lays every parameter out by the rules; call it where parameters are made, under `jax.set_mesh`."""

  def place(path, x):
    return jax.sharding.reshard(x, RULES.weight(parameter_name(path), x.ndim)) if under_mesh() else x

  return jax.tree_util.tree_map_with_path(place, params)
