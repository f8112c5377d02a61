"""The backward pass of the sparse route on Hopper, from kept entries: no array of M x F, no atomics (TwELL, 3.4).

Three steps. `token_gradients` goes through each token's entries as the gather does, and writes d_x, and of each entry
what it multiplies tokens by. A stable sort brings the entries into the order of their neurons. `segment_sums` adds up
tokens for each neuron, in segments, since some neurons fire for nearly all of them; `joined` adds up the segments.

Dimension key: M tokens, D model width, F neurons, E entries, N segments.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.twell import gather_blocks, gradient_blocks, kept_blocks, rows
from pallas_kernels.twell.format import ROW_CAPACITY
from pallas_kernels.twell.gradient_blocks import Entries, Scratch
from pallas_kernels.twell.kept import Kept

_SEGMENT = 512  # entries that one block adds up
_JOINED = 32  # neurons whose segments one block adds up
_search = functools.partial(jnp.searchsorted, method="scan_unrolled")  # a loop would not stay in a CUDA graph


class Found(NamedTuple):
  d_x_MD: jax.Array
  d_gate_FD: jax.Array | None  # float32, as the next two
  d_up_FD: jax.Array
  d_down_FD: jax.Array
  fits_M: jax.Array  # bool[M]: the other rows are not in the gradients of weights, and their d_x means nothing


def gradients(x_MD, kept: Kept, w_gate_FD, w_up_FD, w_down_FD, d_y_MD, d_l1, *, interpret: bool = False) -> Found:
  """Gradients of all rows that fit; the caller has checked shapes and dtypes.

  Rows that have no place, and those that are not finite, are for the caller to compute densely.

  Args:
    x_MD: tokens.
    kept: of the forward pass.
    w_gate_FD: None for the non-gated block.
    w_up_FD: row n belongs to neuron n.
    w_down_FD: likewise.
    d_y_MD: cotangent of y, in the dtype of x.
    d_l1: f32[], cotangent of the sum of |h|.
    interpret: run in Mosaic's interpreter.
  """
  num_neurons = w_up_FD.shape[0]
  fits_M = kept.places.first_M >= 0
  for a_MD in (x_MD, d_y_MD):
    fits_M &= jnp.all(jnp.isfinite(a_MD), axis=1)
  d_x_MD, entries = token_gradients(
    kept, fits_M.astype(jnp.int32), w_gate_FD, w_up_FD, w_down_FD, d_y_MD, d_l1, interpret=interpret
  )
  place_E = jnp.arange(len(entries.neuron), dtype=jnp.int32)
  neuron_E = jnp.where(place_E < kept.places.total, entries.neuron, num_neurons)
  # Stable, so that a neuron's tokens stay in their order.
  neuron_E, order_E = lax.sort((neuron_E, place_E), num_keys=1, is_stable=True)
  entries = jax.tree.map(lambda a_E: a_E[order_E], entries)
  bounds = _search(neuron_E, jnp.arange(num_neurons + 1, dtype=jnp.int32)).astype(jnp.int32)
  sums = _weight_gradients(x_MD, d_y_MD, entries, bounds, interpret)
  d_gate_FD = sums[0] if w_gate_FD is not None else None
  return Found(d_x_MD, d_gate_FD, sums[-2], sums[-1], fits_M)


def token_gradients(
  kept: Kept, takes_part_M, w_gate_FD, w_up_FD, w_down_FD, d_y_MD, d_l1, *, interpret: bool = False
) -> tuple[jax.Array, Entries]:
  """(d_x_MD, entries at their kept places); takes_part_M i32[M], 0 where only a token's place is filled."""
  (num_tokens, width), num_entries, gated = d_y_MD.shape, len(kept.lists.entries_E), w_gate_FD is not None
  team = rows.Team.for_width(width)
  kinds = [jnp.int32, jnp.int32, *[jnp.float32] * (2 + gated)]

  def body(kept_refs, takes_part_ref, w_gate_ref, w_up_ref, w_down_ref, d_y_ref, d_l1_ref, d_x_ref, *rest):
    out, scratch = _entries(rest[: len(kinds)]), rest[len(kinds) :]
    lists = Scratch(*scratch) if gated else Scratch(*scratch[:2], None, *scratch[2:])
    first = lax.axis_index("team") * team.tokens
    kept_blocks.load_lists(kept_refs, first, lists.entries, lists.up, lists.heads, team, interpret=interpret)
    gather_blocks.multiply_rows(
      d_y_ref, w_down_ref, first, lists.entries, lists.heads, lists.down, team, unroll=1, interpret=interpret
    )
    first_ref = kept_refs.places.first_M
    gradient_blocks.find_factors(
      first_ref, takes_part_ref, d_l1_ref, first, lists, out, d_x_ref.dtype, w_up_ref.shape[0], team,
      interpret=interpret,
    )  # fmt: skip
    gradient_blocks.add_factored_rows(w_gate_ref, w_up_ref, first, lists, d_x_ref, team, interpret=interpret)

  floats = plgpu.SMEM((rows.WARPS, ROW_CAPACITY), jnp.float32)
  d_x_MD, *found = mosaic.kernel(
    body,
    out_type=(
      jax.ShapeDtypeStruct(d_y_MD.shape, d_y_MD.dtype),
      *(jax.ShapeDtypeStruct((num_entries,), kind) for kind in kinds),
    ),
    grid=(-(-num_tokens // team.tokens),),
    grid_names=("team",),
    scratch_types=[
      plgpu.SMEM((rows.WARPS, ROW_CAPACITY), jnp.uint32),
      plgpu.SMEM((rows.WARPS, gather_blocks.HEAD_WORDS), jnp.int32),
      *[floats] * (2 + gated),
    ],
    kernel_name="twell_token_gradients",
    interpret=interpret,
  )(kept, takes_part_M, w_gate_FD, w_up_FD, w_down_FD, d_y_MD, d_l1.reshape(1).astype(jnp.float32))
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
