"""The backward pass of the sparse route on Hopper, from the packed gate: no array of M x F, no atomics (TwELL, 3.4).

Three steps. `token_gradients` goes through each token's entries as the gather does, and writes d_x, and of each entry
what it multiplies tokens by. A stable sort brings the entries into the order of their neurons. `weight_gradients` adds
up tokens for each neuron, in segments, since some neurons fire for nearly all of them; `join` adds up the segments.

Entries of all tokens lie one after another, and there is room for so many a token in the mean. Rows beyond that, rows
that overflow, and those that are not finite are for the caller to compute densely (`Found.fits_M`).

Dimension key: M tokens, D model width, F neurons, S words of a tile, E entries, N segments, O gradients of weights.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.twell import gather_blocks, gradient_blocks, rows
from pallas_kernels.twell.format import ROW_CAPACITY
from pallas_kernels.twell.gradient_blocks import Entries

_ROOM = 0.016  # entries a token, as a share of F: a little more than where dense products are faster
_LEAST_ROOM = 32
_SEGMENT = 512  # entries that one block adds up
_JOINED = 32  # neurons whose segments one block adds up


_search = functools.partial(jnp.searchsorted, method="scan_unrolled")  # a loop would not stay in a CUDA graph


class Found(NamedTuple):
  d_x_MD: jax.Array
  d_gate_FD: jax.Array | None  # float32, as the next two
  d_up_FD: jax.Array
  d_down_FD: jax.Array
  fits_M: jax.Array  # bool[M]: the other rows are not in any of these


def gradients(x_MD, words_MTS, w_gate_FD, w_up_FD, w_down_FD, d_y_MD, d_l1, *, interpret: bool = False) -> Found:
  """Gradients of all rows that fit; the caller has checked shapes and dtypes.

  Args:
    x_MD: tokens.
    words_MTS: their packed gate; without a gate the packed up projection.
    w_gate_FD: None for the non-gated block.
    w_up_FD: row n belongs to neuron n.
    w_down_FD: likewise.
    d_y_MD: cotangent of y, in the dtype of x.
    d_l1: f32[], cotangent of the sum of |h|.
    interpret: run in Mosaic's interpreter.
  """
  num_neurons = w_up_FD.shape[0]
  first_M, total, room = _places(x_MD, d_y_MD, words_MTS, num_neurons)
  d_x_MD, entries = token_gradients(
    x_MD, words_MTS, w_gate_FD, w_up_FD, w_down_FD, d_y_MD, d_l1, first_M, room=room, interpret=interpret
  )
  present_E = jnp.arange(room) < total
  # Stable, so that a neuron's tokens stay in their order.
  neuron_E, order_E = lax.sort(
    (jnp.where(present_E, entries.neuron, num_neurons), jnp.arange(room, dtype=jnp.int32)), num_keys=1, is_stable=True
  )
  entries = jax.tree.map(lambda a_E: a_E[order_E], entries)
  bounds = _search(neuron_E, jnp.arange(num_neurons + 1, dtype=jnp.int32)).astype(jnp.int32)
  sums = _weight_gradients(x_MD, d_y_MD, entries, bounds, interpret)
  d_gate_FD = sums[0] if w_gate_FD is not None else None
  return Found(d_x_MD, d_gate_FD, sums[-2], sums[-1], first_M >= 0)


def _places(x_MD, d_y_MD, words_MTS, num_neurons: int) -> tuple[jax.Array, jax.Array, int]:
  """(where each token's entries begin, -1 for one that does not fit; their number; how many there is room for)."""
  num_tokens, tiles, words = words_MTS.shape
  counts_MT = words_MTS[:, :, 0].astype(jnp.int32)
  counts_M = jnp.sum(counts_MT, axis=1)
  row_capacity = min(tiles * (words - 1), ROW_CAPACITY)
  fits_M = jnp.all(counts_MT < words, axis=1) & (counts_M <= row_capacity)
  for a_MD in (x_MD, d_y_MD):
    fits_M &= jnp.all(jnp.isfinite(a_MD), axis=1)
  a_token = min(max(math.ceil(_ROOM * num_neurons), _LEAST_ROOM), row_capacity)
  room = -(-num_tokens * a_token // mosaic.LANES) * mosaic.LANES
  upto_M = jnp.cumsum(jnp.where(fits_M, counts_M, 0))
  fits_M &= upto_M <= room  # from the first that does not find room on: none
  upto_M = jnp.where(fits_M, upto_M, 0)
  return jnp.where(fits_M, upto_M - counts_M, -1), jnp.max(upto_M, initial=0), room


def token_gradients(
  x_MD, words_MTS, w_gate_FD, w_up_FD, w_down_FD, d_y_MD, d_l1, first_M, *, room: int, interpret: bool = False
) -> tuple[jax.Array, Entries]:
  """(d_x_MD, entries); first_M says where a token's entries go, -1 that its d_x is 0 and it writes none."""
  (num_tokens, width), (_, tiles, words) = x_MD.shape, words_MTS.shape
  team, gated = rows.Team.for_width(width), w_gate_FD is not None
  capacity = min(tiles * (words - 1), ROW_CAPACITY)
  kinds = [jnp.int32, jnp.int32, *[jnp.float32] * (2 + gated)]

  def body(x_ref, d_y_ref, words_ref, w_gate_ref, w_up_ref, w_down_ref, first_ref, d_l1_ref, d_x_ref, *rest):
    outs, (entries_smem, heads_smem, down_smem, *up_smem) = rest[: len(kinds)], rest[len(kinds) :]
    first = lax.axis_index("team") * team.tokens
    gather_blocks.list_entries(words_ref, first, entries_smem, heads_smem, team, words=words, interpret=interpret)
    products = [(d_y_ref, w_down_ref, down_smem)] + [(x_ref, w_up_ref, smem) for smem in up_smem]
    for a_ref, w_ref, smem in products:
      gather_blocks.multiply_rows(
        a_ref, w_ref, first, entries_smem, heads_smem, smem, team, unroll=1, interpret=interpret
      )
    gradient_blocks.add_gradient_rows(
      w_gate_ref, w_up_ref, first_ref, d_l1_ref, first, entries_smem, heads_smem, up_smem[0] if gated else None,
      down_smem, d_x_ref, _entries(outs), team, interpret=interpret,
    )  # fmt: skip

  dots = plgpu.SMEM((rows.WARPS, capacity), jnp.float32)
  d_x_MD, *found = mosaic.kernel(
    body,
    out_type=(jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype), *(jax.ShapeDtypeStruct((room,), kind) for kind in kinds)),
    grid=(-(-num_tokens // team.tokens),),
    grid_names=("team",),
    scratch_types=[
      plgpu.SMEM((rows.WARPS, capacity), jnp.uint32),
      plgpu.SMEM((rows.WARPS, gather_blocks.HEAD_WORDS), jnp.int32),
      *[dots] * (1 + gated),
    ],
    kernel_name="twell_token_gradients",
    interpret=interpret,
  )(
    x_MD, d_y_MD, words_MTS.reshape(num_tokens, tiles * words), w_gate_FD, w_up_FD, w_down_FD, first_M,
    d_l1.reshape(1).astype(jnp.float32),
  )  # fmt: skip
  return d_x_MD, _entries(found)


def _entries(arrays) -> Entries:
  """Of the arrays in order, that of the gate only where there is one."""
  neuron, token, *factors = arrays
  return Entries(neuron, token, factors[0] if len(factors) == 3 else None, *factors[-2:])


def _weight_gradients(x_MD, d_y_MD, entries: Entries, bounds, interpret: bool) -> list[jax.Array]:
  """f32[F, D] of each factor; `bounds` says which entries a neuron has."""
  num_neurons, width, room = len(bounds) - 1, x_MD.shape[1], len(entries.token)
  counts_F = jnp.diff(bounds)
  segments_F = -(-counts_F // _SEGMENT)
  # Neurons with several segments have rows for them behind those of the neurons.
  extra_F = jnp.where(segments_F > 1, segments_F, 0)
  first_extra_F = jnp.cumsum(extra_F) - extra_F
  most_extra, most = 2 * room // _SEGMENT, num_neurons + room // _SEGMENT
  upto_F = jnp.cumsum(segments_F)
  segment_N = jnp.arange(most, dtype=jnp.int32)
  neuron_N = jnp.minimum(_search(upto_F, segment_N, side="right"), num_neurons - 1).astype(jnp.int32)
  nth_N = segment_N - (upto_F - segments_F)[neuron_N]
  begin_N = bounds[neuron_N] + nth_N * _SEGMENT
  count_N = jnp.where(segment_N < upto_F[-1], jnp.minimum(bounds[neuron_N + 1] - begin_N, _SEGMENT), 0)
  extra_N = num_neurons + first_extra_F[neuron_N] + nth_N
  target_N = jnp.where(segments_F[neuron_N] > 1, extra_N, neuron_N)
  order_N = jnp.argsort(-count_N, stable=True)  # the longest first
  lists = jnp.stack([begin_N, count_N, target_N], axis=1)[order_N].astype(jnp.int32)
  sums = segment_sums(x_MD, d_y_MD, entries, lists, num_rows=num_neurons + most_extra, interpret=interpret)
  plan = jnp.stack([segments_F, num_neurons + first_extra_F], axis=1).astype(jnp.int32)
  return [joined(rows_of_neurons, plan, width=width, interpret=interpret) for rows_of_neurons in sums]


def segment_sums(
  x_MD, d_y_MD, entries: Entries, lists_N3, *, num_rows: int, interpret: bool = False
) -> tuple[jax.Array, ...]:
  """f32[num_rows, D] of each factor; segments are (first entry, number of entries, row), those of none write none."""
  width, gradients_of = x_MD.shape[1], 2 + (entries.of_gate is not None)
  team = rows.Team(width, rows.WARPS)

  def body(x_ref, d_y_ref, entries_ref, lists_ref, *out_refs):
    n = lax.axis_index("segment")
    begin, count, target = (lists_ref[n, field] for field in range(3))

    def add():
      gradient_blocks.sum_tokens(x_ref, d_y_ref, entries_ref, begin, count, target, out_refs, team, interpret=interpret)

    lax.cond(count > 0, add, lambda: None)

  return mosaic.kernel(
    body,
    out_type=tuple(jax.ShapeDtypeStruct((num_rows, width), jnp.float32) for _ in range(gradients_of)),
    grid=(len(lists_N3),),
    grid_names=("segment",),
    kernel_name="twell_segment_sums",
    interpret=interpret,
  )(x_MD, d_y_MD, entries, lists_N3)


def joined(rows_of_neurons, plan, *, width: int, interpret: bool = False) -> jax.Array:
  """f32[F, D]: a neuron's row, the sum of its segments' rows, or zeros if it has no entry.

  plan i32[F, 2]: number of its segments, and where the rows of several begin.
  """
  layout = plgpu.Layout.WG_STRIDED((width,), vec_size=1)

  def join(n, rows_ref, plan_ref, out_ref):
    number = plan_ref[n, 0]
    first = jnp.where(number > 1, plan_ref[n, 1], n)
    add = lambda k, total: total + plgpu.load(rows_ref.at[first + k], layout=layout)
    zeros = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
    out_ref[n] = lax.fori_loop(0, number, add, zeros)

  def body(*refs):
    first = lax.axis_index("block") * _JOINED
    last = jnp.minimum(first + _JOINED, len(plan))
    lax.fori_loop(first, last, lambda n, _: join(n, *refs), None)

  return mosaic.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((len(plan), width), jnp.float32),
    grid=(-(-len(plan) // _JOINED),),
    grid_names=("block",),
    kernel_name="twell_join_segments",
    interpret=interpret,
  )(rows_of_neurons, plan)
