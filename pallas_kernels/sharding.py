"""The public operations on arrays that are spread over a mesh: every device works on its own rows.

Jagged data is sharded by whole rows, and a device needs offsets that count its own tokens. So ids and offsets carry a
leading shard axis S, one entry for each device along `axes`: ids are i32[S, T] (each shard padded to the same T) and
offsets i32[S, B + 1] (each from 0). Results are joined by rows, [S * B, D], in the order of the shards.

Dimension key: S shards, V table rows, D row width, T ids of a shard, B bags of a shard.
"""

import math

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels import dispatch, embedding, row_offsets


def embedding_bag(
  table_VD: jax.Array,
  ids_ST: jax.Array,
  offsets_SB: jax.Array,
  weights_ST: jax.Array | None = None,
  *,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
  axes: str | tuple[str, ...],
  mode: embedding.reference.Mode = "sum",
  sink: jax.Array | None = None,
  implementation: dispatch.Implementation | None = None,
) -> jax.Array:
  """`embedding.bag` with the bags sharded over mesh axes and the table on every device.

  Args:
    table_VD: replicated; a table that is itself sharded is refused, since this would gather all of it.
    ids_ST: sharded along S, as are the next two.
    offsets_SB: i32[S, B + 1], the offsets of each shard in its own ids.
    weights_ST: float32[S, T], or None.
    mesh: the mesh of `jax.set_mesh` if None.
    axes: the mesh axes along which the bags are sharded; S is the product of their sizes.
    mode: as for `embedding.bag`.
    sink: float32[S * B, D] of zeros, sharded as the result; its gradient is d_out.
    implementation: as for `embedding.bag`.

  Returns:
    out[S * B, D], sharded along its rows.
  """
  mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  axes = (axes,) if isinstance(axes, str) else tuple(axes)
  _check_embedding_bag(table_VD, ids_ST, offsets_SB, mesh, axes)

  def local(table_VD, ids_ST, offsets_SB, weights_ST, sink_BD):
    weights_T = None if weights_ST is None else weights_ST[0]
    # Every device reads the whole table. Said as a cast, so that a gradient, if there were one, would be summed.
    table_VD = jax.lax.pcast(table_VD, axes, to="varying")
    return embedding.bag(
      table_VD, ids_ST[0], offsets_SB[0], weights_T, mode=mode, sink=sink_BD, implementation=implementation
    )

  # None is a pytree without leaves, for which one spec is as good as another.
  rows = P(axes)
  run = jax.shard_map(local, mesh=mesh, in_specs=(P(), rows, rows, rows, rows), out_specs=rows, check_vma=True)
  return run(table_VD, ids_ST, offsets_SB, weights_ST, sink)


def _check_embedding_bag(table_VD, ids_ST, offsets_SB, mesh, axes) -> None:
  op = "sharding.embedding_bag"
  if unknown := [a for a in axes if a not in mesh.shape]:
    raise ValueError(f"{op}: axes {unknown} are not among the axes {tuple(mesh.shape)} of the mesh")
  shards = math.prod(mesh.shape[a] for a in axes)
  for name, x in (("ids_ST", ids_ST), ("offsets_SB", offsets_SB)):
    if x.ndim != 2 or x.shape[0] != shards:
      raise ValueError(
        f"{op}: {name} must be [{shards}, ...], an entry for each shard over {axes}, got shape {x.shape}"
      )
  if (spec := dispatch.partition(table_VD)) is not None:
    raise ValueError(
      f"{op}: table_VD is sharded as {spec}; replicate it, a lookup would gather all of it on each device"
    )
  # On several hosts each sees only its own shards; their values are not checked there.
  if not isinstance(offsets_SB, jax.core.Tracer) and getattr(offsets_SB, "is_fully_addressable", True):
    for shard, offsets in enumerate(np.asarray(offsets_SB)):
      row_offsets.check(op, f"offsets_SB[{shard}]", offsets, ids_ST.shape[1])
