"""The public operations on arrays that are spread over a mesh: every device works on its own rows.

Tables and weights are on every device, and their gradients are summed over the mesh. One that is itself sharded is
refused, since the call would gather all of it behind the caller's back.

Jagged data is sharded by whole rows, and a device needs offsets that count its own tokens. So ids and offsets carry a
leading shard axis S, one entry for each device along `axes`: ids are i32[S, T] (each shard padded to the same T) and
offsets i32[S, B + 1] (each from 0). Results are joined by rows, [S * B, D], in the order of the shards.

Dimension key: S shards, V table rows, D row or model width, T ids or tokens of a shard, B bags or rows of a shard, M
tokens, F hidden neurons, H query heads, G key heads, K head width.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels import dispatch, embedding, jagged, row_offsets, twell

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def embedding_bag(
  table_VD: jax.Array,
  ids_ST: jax.Array,
  offsets_SB: jax.Array,
  weights_ST: jax.Array | None = None,
  *,
  mesh: Mesh | None = None,
  axes: str | tuple[str, ...],
  mode: embedding.reference.Mode = "sum",
  sink: jax.Array | None = None,
  implementation: dispatch.Implementation | None = None,
) -> jax.Array:
  """`embedding.bag` with the bags sharded over mesh axes and the table on every device.

  Args:
    table_VD: replicated.
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
  op = "sharding.embedding_bag"
  mesh, axes, shards = _over(op, mesh, axes)
  _check_bags(op, ids_ST, offsets_SB, axes, shards)
  _refuse_sharded(op, table_VD=table_VD)

  def local(table_VD, ids_ST, offsets_SB, weights_ST, sink_BD):
    weights_T = None if weights_ST is None else weights_ST[0]
    # Every device reads the whole table. Said as a cast, so that a gradient, if there were one, would be summed.
    table_VD = lax.pcast(table_VD, axes, to="varying")
    return embedding.bag(
      table_VD, ids_ST[0], offsets_SB[0], weights_T, mode=mode, sink=sink_BD, implementation=implementation
    )

  # None is a pytree without leaves, for which one spec is as good as another.
  rows = P(axes)
  run = jax.shard_map(local, mesh=mesh, in_specs=(P(), rows, rows, rows, rows), out_specs=rows, check_vma=True)
  return run(table_VD, ids_ST, offsets_SB, weights_ST, sink)


def jagged_attention(
  q_STHK: jax.Array,
  k_SXGK: jax.Array,
  v_SXGK: jax.Array,
  q_offsets_SB: jax.Array | None,
  k_offsets_SB: jax.Array | None = None,
  *,
  mesh: Mesh | None = None,
  axes: str | tuple[str, ...],
  num_targets_SB: jax.Array | None = None,
  bias: jagged.RelativeBias | None = None,
  rotary: jagged.Rotary | None = None,
  broadcast_q: bool = False,
  **options,
) -> jax.Array:
  """`jagged.attention` with the rows sharded over mesh axes.

  Args:
    q_STHK: [S, T, H, K], sharded along S, as are all arrays here; with broadcast_q [L, H, K], replicated.
    k_SXGK: [S, X, G, K], X keys of a shard.
    v_SXGK: likewise.
    q_offsets_SB: i32[S, B + 1], the offsets of each shard in its own tokens; None with broadcast_q.
    k_offsets_SB: of the keys; None: those of the queries.
    mesh: the mesh of `jax.set_mesh` if None.
    axes: the mesh axes along which the rows are sharded; S is the product of their sizes.
    num_targets_SB: i32[S, B].
    bias: its tables replicated, its timestamps i32[S, T].
    rotary: its angles f32[S, T, K / 2].
    broadcast_q: as for `jagged.attention`.
    **options: of `jagged.attention`, without `schedule`: each device makes its own.

  Returns:
    o[S, T, H, K], sharded along S; with broadcast_q [S, B * L, H, K].
  """
  op = "sharding.jagged_attention"
  if "schedule" in options:
    raise ValueError(f"{op}: schedule is of one device's offsets; leave it out, each device makes its own")
  mesh, axes, shards = _over(op, mesh, axes)
  sharded = dict(k_SXGK=k_SXGK, v_SXGK=v_SXGK, q_offsets_SB=q_offsets_SB, k_offsets_SB=k_offsets_SB)
  sharded |= dict(num_targets_SB=num_targets_SB, timestamps_ST=None if bias is None else bias.timestamps)
  if rotary is not None:
    sharded |= dict(cos_STP=rotary.cos_TP, sin_STP=rotary.sin_TP)
  if broadcast_q:
    _refuse_sharded(op, q_LHK=q_STHK)
  else:
    sharded["q_STHK"] = q_STHK
  tables = {} if bias is None else dict(position=bias.position, time=bias.time)
  _refuse_sharded(op, **tables)
  for name, x in sharded.items():
    if x is not None and (x.ndim < 2 or x.shape[0] != shards):
      raise ValueError(
        f"{op}: {name} must be [{shards}, ...], an entry for each shard over {axes}, got shape {x.shape}"
      )
  if q_offsets_SB is not None and not broadcast_q:
    tokens = [q_STHK.shape[1]] + ([k_SXGK.shape[1]] if k_offsets_SB is None else [])
    _check_offsets(op, "q_offsets_SB", q_offsets_SB, min(tokens))
  if k_offsets_SB is not None:
    _check_offsets(op, "k_offsets_SB", k_offsets_SB, k_SXGK.shape[1])

  def local(sharded, replicated):
    own = {name: None if x is None else x[0] for name, x in sharded.items()}
    # As casts, whose transpose sums the gradients of all devices.
    shared = {name: lax.pcast(x, axes, to="varying") for name, x in replicated.items()}
    own_bias = None
    if bias is not None:
      own_bias = jagged.RelativeBias(shared["position"], shared["time"], own["timestamps_ST"])
    own_rotary = None
    if rotary is not None:
      own_rotary = jagged.Rotary(own["cos_STP"], own["sin_STP"], values=rotary.values)
    o_THK = jagged.attention(
      shared["q_LHK"] if broadcast_q else own["q_STHK"],
      own["k_SXGK"],
      own["v_SXGK"],
      own["q_offsets_SB"],
      own["k_offsets_SB"],
      num_targets=own["num_targets_SB"],
      bias=own_bias,
      rotary=own_rotary,
      broadcast_q=broadcast_q,
      **options,
    )
    return o_THK[None]

  rows = P(axes)
  run = jax.shard_map(local, mesh=mesh, in_specs=(rows, P()), out_specs=rows, check_vma=True)
  return run(sharded, tables | (dict(q_LHK=q_STHK) if broadcast_q else {}))


def twell_gated_feedforward(
  x_MD: jax.Array,
  w_gate_FD: jax.Array,
  w_up_FD: jax.Array,
  w_down_FD: jax.Array,
  *,
  mesh: Mesh | None = None,
  axes: str | tuple[str, ...],
  **options,
) -> tuple[jax.Array, twell.Stats]:
  """`twell.gated_feedforward` with the tokens sharded over mesh axes and the weights on every device.

  Args:
    x_MD: sharded along M, the same number of tokens on each device.
    w_gate_FD: replicated, as the other weights.
    w_up_FD: likewise.
    w_down_FD: likewise.
    mesh: the mesh of `jax.set_mesh` if None.
    axes: the mesh axes along which the tokens are sharded.
    **options: of `twell.gated_feedforward`. Each device chooses its own route.

  Returns:
    y_MD, sharded as x_MD, and Stats of all tokens, replicated; their route is DENSE if every device took that.
  """
  weights = dict(w_gate_FD=w_gate_FD, w_up_FD=w_up_FD, w_down_FD=w_down_FD)
  return _twell(twell.gated_feedforward, x_MD, weights, mesh, axes, options)


def twell_feedforward(
  x_MD: jax.Array,
  w_up_FD: jax.Array,
  w_down_FD: jax.Array,
  *,
  mesh: Mesh | None = None,
  axes: str | tuple[str, ...],
  **options,
) -> tuple[jax.Array, twell.Stats]:
  """`twell.feedforward` on sharded tokens. Arguments as for `twell_gated_feedforward`."""
  return _twell(twell.feedforward, x_MD, dict(w_up_FD=w_up_FD, w_down_FD=w_down_FD), mesh, axes, options)


def _twell(call: Callable, x_MD, weights: dict[str, jax.Array], mesh, axes, options):
  op = f"sharding.twell_{call.__name__}"
  mesh, axes, shards = _over(op, mesh, axes)
  _refuse_sharded(op, **weights)
  if x_MD.shape[0] % shards:
    raise ValueError(f"{op}: M={x_MD.shape[0]} tokens do not divide over the {shards} shards of {axes}; pad x_MD")

  def anywhere(flags):
    return lax.psum(flags.astype(jnp.int32), axes) > 0

  def local(x_MD, *weights_FD):
    # As casts, whose transpose sums the gradients of all devices.
    y_MD, stats = call(x_MD, *(lax.pcast(w_FD, axes, to="varying") for w_FD in weights_FD), **options)
    return y_MD, twell.Stats(
      l1=lax.pmean(stats.l1, axes),
      l0=lax.pmean(stats.l0, axes),
      overflow_rows=lax.psum(stats.overflow_rows, axes),
      route=jnp.where(anywhere(stats.route == twell.SPARSE), twell.SPARSE, twell.DENSE).astype(jnp.int32),
      active=None if stats.active is None else anywhere(stats.active),
    )

  in_specs = (P(axes), *(P() for _ in weights))
  run = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(P(axes), P()), check_vma=True)
  return run(x_MD, *weights.values())


def _over(op: str, mesh: Mesh | None, axes: str | tuple[str, ...]) -> tuple[Mesh, tuple[str, ...], int]:
  """Returns the mesh, its axes that hold the shards, and the number of shards."""
  mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  axes = (axes,) if isinstance(axes, str) else tuple(axes)
  if unknown := [a for a in axes if a not in mesh.shape]:
    raise ValueError(f"{op}: axes {unknown} are not among the axes {tuple(mesh.shape)} of the mesh")
  return mesh, axes, math.prod(mesh.shape[a] for a in axes)


def _refuse_sharded(op: str, **replicated: jax.Array) -> None:
  for name, x in replicated.items():
    if (spec := dispatch.partition(x)) is not None:
      raise ValueError(f"{op}: {name} is sharded as {spec}; replicate it, a call would gather all of it on each device")


def _check_bags(op: str, ids_ST, offsets_SB, axes: tuple[str, ...], shards: int) -> None:
  for name, x in (("ids_ST", ids_ST), ("offsets_SB", offsets_SB)):
    if x.ndim != 2 or x.shape[0] != shards:
      raise ValueError(
        f"{op}: {name} must be [{shards}, ...], an entry for each shard over {axes}, got shape {x.shape}"
      )
  _check_offsets(op, "offsets_SB", offsets_SB, ids_ST.shape[1])


def _check_offsets(op: str, name: str, offsets_SB, num_tokens: int) -> None:
  # On several hosts each sees only its own shards; their values are not checked there.
  if not isinstance(offsets_SB, jax.core.Tracer) and getattr(offsets_SB, "is_fully_addressable", True):
    for shard, offsets in enumerate(np.asarray(offsets_SB)):
      row_offsets.check(op, f"{name}[{shard}]", offsets, num_tokens)
