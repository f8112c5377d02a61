"""The feed-forward block for a few tokens, on Hopper: two kernels, bound by the bytes of the weights that they read.

`hidden` reads the gate once: a block multiplies 64 neurons with all tokens on the tensor cores, sees which fire for
which token, and reads the rows of Wu of those alone (or multiplies again, if they are many). `combine` reads their rows
of Wd: a block has 128 columns of a token. There is no packed form and so no overflow.

A neuron is listed if its gate is not 0 after ReLU, or is -inf before: 0 * (x . w_up) is NaN if the token is not finite,
as it is in the dense block.

Dimension key: M tokens (P: padded to a multiple of 8), D model width, F neurons, N the 64 neurons of a block, W words
of 32 neurons, a bit each.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import mosaic, ptx
from pallas_kernels.twell import bits, rows
from pallas_kernels.twell.reference import Sums

_NEURONS = 64  # of a block of `hidden`: the rows of one wgmma
_MANY_PAIRS = 48  # of token and neuron in a block; more are faster by a second product, 0.1 us each against 5 us
_STAGE_BYTES = 180 * 1024  # of operands on their way; a block reads 256 KB of the gate at D = 2048
_COLUMNS = 128  # of a block of `combine`, four a lane
_MANY_WARPS = 16  # of a block of `combine`; each has its share of the neurons
_MANY_BLOCKS = 264  # two for each SM
_UNROLL = 8  # rows of Wd on their way


def feedforward(
  x_MD: jax.Array,
  w_gate_FD: jax.Array | None,
  w_up_FD: jax.Array,
  w_down_FD: jax.Array,
  *,
  with_active: bool,
  interpret: bool,
) -> tuple[jax.Array, Sums]:
  """y_MD and sums over the tokens, at most `routing.FEW_TOKENS`; the caller has checked shapes and dtypes."""
  num_tokens, num_neurons = x_MD.shape[0], w_up_FD.shape[0]
  if num_tokens == 0:
    zero, active_F = jnp.zeros((), jnp.float32), jnp.zeros((num_neurons,), bool)
    return jnp.zeros_like(x_MD), Sums(zero, zero, jnp.int32(0), active_F if with_active else None)
  x_PD = jnp.pad(x_MD, ((0, -num_tokens % 8), (0, 0)))
  h_PF, listed_PW, fires_PW = hidden(x_PD, w_gate_FD, w_up_FD, w_down_FD, interpret=interpret)
  y_MD = combine(h_PF, listed_PW, w_down_FD, num_tokens=num_tokens, interpret=interpret)
  listed_MF, fires_MF = (bits.expand(words_PW[:num_tokens]) for words_PW in (listed_PW, fires_PW))
  # Made from results, not by the kernels: XLA leaves out what nobody reads.
  return y_MD, Sums(
    l1=jnp.sum(jnp.where(listed_MF, jnp.abs(h_PF[:num_tokens]), 0)),
    l0=jnp.sum(fires_MF, dtype=jnp.float32),
    overflow_rows=jnp.zeros_like(fires_PW[0, 0], jnp.int32),
    active_F=jnp.any(fires_MF, axis=0) if with_active else None,
  )


@functools.partial(jax.jit, static_argnames="interpret")
def hidden(
  x_PD: jax.Array, w_gate_FD: jax.Array | None, w_up_FD: jax.Array, w_down_FD: jax.Array, *, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Hidden values of the neurons that are listed; the others' places are not written.

  Returns:
    h f32[P, F]; u32[P, W] twice: who is listed, and who fires.
  """
  (num_tokens, width), num_neurons = x_PD.shape, w_up_FD.shape[0]
  gated = w_gate_FD is not None
  step_width = 256 if width % 256 == 0 else 128
  stages = min(width // step_width, _STAGE_BYTES // ((_NEURONS + num_tokens) * step_width * 2))
  transforms = mosaic.operand_transforms()
  words_type = jax.ShapeDtypeStruct((num_tokens, num_neurons // bits.BITS), jnp.uint32)
  return mosaic.kernel(
    functools.partial(_hidden_kernel, gated=gated, interpret=interpret),
    out_type=(jax.ShapeDtypeStruct((num_tokens, num_neurons), jnp.float32), words_type, words_type),
    grid=(num_neurons // _NEURONS,),
    grid_names=("block",),
    scratch_types=[
      plgpu.SMEM((stages, num_tokens, step_width), x_PD.dtype, transforms=transforms),
      plgpu.SMEM((stages, _NEURONS, step_width), x_PD.dtype, transforms=transforms),
      plgpu.SMEM((_NEURONS, num_tokens), jnp.float32),
      plgpu.SMEM((num_tokens, _NEURONS // bits.BITS), jnp.uint32),
      plgpu.SMEM((num_tokens * _NEURONS,), jnp.uint16),
      plgpu.SMEM((1,), jnp.int32),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    ],
    kernel_name="twell_decode_hidden",
    interpret=interpret,
  )(x_PD, w_gate_FD if gated else w_up_FD, w_down_FD, *[w_up_FD] * gated)


def _hidden_kernel(x_ref, firing_ref, w_down_ref, *rest, gated: bool, interpret: bool):
  *up_ref, h_ref, listed_ref, fires_ref, x_smem, w_smem, gate_smem, bits_smem, pairs_smem, count_smem, full = rest
  block = lax.axis_index("block")
  stages, num_tokens, step_width = x_smem.shape
  steps = x_ref.shape[1] // step_width

  def product(w_ref, earlier_steps: int):
    """f32[N, P], this block's neurons times the tokens."""

    def fetch(step):
      slot, columns = lax.rem(earlier_steps + step, stages), pl.ds(step * step_width, step_width)
      plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(block * _NEURONS, _NEURONS), columns], w_smem.at[slot], full.at[slot])
      plgpu.copy_gmem_to_smem(x_ref.at[:, columns], x_smem.at[slot], full.at[slot])

    lax.fori_loop(0, stages, lambda step, _: fetch(step), None)

    def multiply(acc):
      def step(k, _):
        slot = lax.rem(earlier_steps + k, stages)
        plgpu.barrier_wait(full.at[slot])
        plgpu.wgmma(acc, w_smem.at[slot], x_smem.at[slot].transpose((1, 0)))
        if steps > stages:
          plgpu.wgmma_wait(1)  # the step before has been read
          pl.when((k > 0) & (k - 1 + stages < steps))(lambda: fetch(k - 1 + stages))

      lax.fori_loop(0, steps, step, None)
      return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((_NEURONS, num_tokens), jnp.float32))

  gate_NP = product(firing_ref, 0)
  rounded_NP = gate_NP.astype(x_ref.dtype).astype(jnp.float32)
  # -inf stays: it is listed, though it does not fire.
  kept_NP = jnp.where(gate_NP == -jnp.inf, gate_NP, jnp.maximum(rounded_NP, 0))
  gate_smem[...] = kept_NP
  plgpu.commit_smem()
  read = (w_down_ref, *up_ref)
  _list(gate_smem, read, listed_ref, fires_ref, bits_smem, pairs_smem, count_smem, block, interpret=interpret)

  def few():
    refs = x_ref, h_ref, gate_smem, bits_smem, pairs_smem, count_smem
    _write_pairs(*refs, up_ref[0] if gated else None, block, interpret=interpret)

  def many():
    gate_smem[...] = jnp.maximum(kept_NP, 0) * (product(up_ref[0], steps) if gated else 1)
    plgpu.commit_smem()
    _write_all(gate_smem, h_ref, block, interpret=interpret)

  lax.cond(count_smem[0] > _MANY_PAIRS, many, few)


def _list(
  gate_smem, weight_refs, listed_ref, fires_ref, bits_smem, pairs_smem, count_smem, block, *, interpret: bool
) -> None:
  """Says who is listed and who fires, to memory; lists the pairs of token and neuron, and their number.

  The rows of the weights that will be read start on their way to L2.
  """
  num_tokens = gate_smem.shape[1]
  if interpret:
    gate_NP = gate_smem[...]
    own_words = pl.ds(block * (_NEURONS // bits.BITS), _NEURONS // bits.BITS)
    bits_smem[...] = listed_ref[:, own_words] = bits.join(gate_NP.T != 0)
    fires_ref[:, own_words] = bits.join(jnp.maximum(gate_NP, 0).T != 0)
    count_smem[0] = jnp.sum(gate_NP != 0, dtype=jnp.int32)
    return

  width = weight_refs[0].shape[1]
  refs = [gate_smem, listed_ref, fires_ref, bits_smem, pairs_smem, count_smem, *weight_refs]

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * len(refs)), return_type=None)
  def run(ctx, block, gates, listed_ref, fires_ref, seen, pairs, count, *weights):
    del ctx
    words_of_a_token = ir.MemRefType(listed_ref.type).shape[1]
    gates, seen, pairs, count = map(ptx.shared_address, (gates, seen, pairs, count))
    words = [ptx.global_address(ref) for ref in (listed_ref, fires_ref)]
    weights = [ptx.global_address(ref) for ref in weights]
    block = ptx.scalar(block)
    _see_who_is_listed(gates, seen, words, block, num_tokens, words_of_a_token)
    utils.warpgroup_barrier()
    _prefetch(seen, weights, block, num_tokens, width)
    number = _list_pairs(seen, pairs, num_tokens * _NEURONS // bits.BITS)
    ptx.asm((), [count, number], "st.shared.b32 [$0], $1;", "r,r")  # the same by every lane
    utils.warpgroup_barrier()
    return []

  run(block, *refs)


def _write_pairs(x_ref, h_ref, gate_smem, bits_smem, pairs_smem, count_smem, up_ref, block, *, interpret: bool) -> None:
  """h_ref[token, neuron] of all pairs: relu(gate), times x . Wu[neuron] if there is an up_ref."""
  num_tokens, width = x_ref.shape
  if interpret:
    own = pl.ds(block * _NEURONS, _NEURONS)
    h_NP = jnp.maximum(gate_smem[...], 0)
    if up_ref is not None:
      h_NP = h_NP * (up_ref[own].astype(jnp.float32) @ x_ref[...].astype(jnp.float32).T)
    h_ref[:, own] = jnp.where(bits.expand(bits_smem[...]), h_NP.T, jnp.nan)  # the GPU leaves the others unwritten
    return

  refs = [x_ref, h_ref, gate_smem, pairs_smem, count_smem] + ([] if up_ref is None else [up_ref])

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * len(refs)), return_type=None)
  def run(ctx, block, x_ref, h_ref, gates, pairs, count, *up_ref):
    del ctx
    first = arith.muli(ptx.scalar(block), ptx.const(_NEURONS))
    num_neurons = ir.MemRefType(h_ref.type).shape[1]
    gates, pairs, count = map(ptx.shared_address, (gates, pairs, count))
    lane, warp = ptx.lane_and_warp()
    number = ptx.asm((ptx.i32(),), [count], "ld.shared.b32 $0, [$1];", "=r,r")
    others = arith.subi(ptx.const(rows.WARPS - 1), warp)
    mine = arith.divui(arith.addi(number, others), ptx.const(rows.WARPS))
    x, h_out = ptx.global_address(x_ref), ptx.global_address(h_ref)
    x_type = ir.MemRefType(x_ref.type).element_type

    def step(place, number, carry):
      found = []
      for n in range(number):
        nth = arith.addi(arith.muli(arith.addi(place, ptx.const(n)), ptx.const(rows.WARPS)), warp)
        text = "{.reg .b16 t; ld.shared.b16 t, [$2]; cvt.u32.u16 $1, t; and.b32 $0, $1, 63; shr.u32 $1, $1, 6;}"
        found.append(ptx.asm((ptx.i32(),) * 2, [ptx.offset(pairs, nth, 2)], text, "=&r,=&r,r"))
      dots = [None] * number
      if up_ref:
        rows_of = [(token, arith.addi(first, neuron)) for neuron, token in found]
        dots = rows.dots_of_rows(x, ptx.global_address(up_ref[0]), rows_of, lane, width, x_type)
      for (neuron, token), dot in zip(found, dots):
        at = ptx.offset(ptx.offset(gates, neuron, 4 * num_tokens), token, 4)
        h = ptx.asm((ptx.f32(),), [at], "ld.shared.f32 $0, [$1]; max.NaN.f32 $0, $0, 0f00000000;", "=f,r")
        h = h if dot is None else arith.mulf(h, dot)
        at = ptx.offset(ptx.offset(h_out, token, 4 * num_neurons), arith.addi(first, neuron), 4)
        ptx.asm((), [at, h, lane], "{.reg .pred p; setp.eq.u32 p, $2, 0; @p st.global.f32 [$0], $1;}", "l,f,r")
      return carry

    rows.loop(mine, 2, step, [])
    return []

  run(block, *refs)


def _write_all(h_smem, h_ref, block, *, interpret: bool) -> None:
  """h_ref[token, neuron] of this block's neurons for all tokens, listed or not."""
  num_tokens = h_smem.shape[1]
  if interpret:
    h_ref[:, pl.ds(block * _NEURONS, _NEURONS)] = h_smem[...].T
    return

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, plgpu.RefType(), plgpu.RefType()), return_type=None)
  def run(ctx, block, h_smem, h_ref):
    del ctx
    num_neurons = ir.MemRefType(h_ref.type).shape[1]
    lane, warp = ptx.lane_and_warp()
    first = arith.addi(arith.muli(ptx.scalar(block), ptx.const(_NEURONS)), lane)
    own, out = ptx.shared_address(h_smem), ptx.offset(ptx.global_address(h_ref), first, 4)

    def write(token, carry):
      at = ptx.offset(ptx.offset(own, lane, 4 * num_tokens), token, 4)
      for half in range(_NEURONS // 32):
        text = f"ld.shared.f32 $0, [$1+{half * 32 * 4 * num_tokens}];"
        h = ptx.asm((ptx.f32(),), [at], text, "=f,r")
        ptx.asm((), [ptx.offset(out, token, 4 * num_neurons), h], f"st.global.f32 [$0+{half * 32 * 4}], $1;", "l,f")
      return carry

    ptx.for_each(warp, ptx.const(num_tokens), rows.WARPS, write, [])
    return []

  run(block, h_smem, h_ref)


def _see_who_is_listed(gates, seen, words, block, num_tokens: int, words_of_a_token: int) -> None:
  """The bits of the 64 neurons for each token, to memory and to `seen`."""
  lane, warp = ptx.lane_and_warp()
  high = arith.addi(lane, ptx.const(bits.BITS))

  def see(token, carry):
    gate_of = lambda neuron: ptx.offset(ptx.offset(gates, neuron, 4 * num_tokens), token, 4)
    text = "{.reg .pred p; .reg .f32 g, z; mov.f32 z, 0f00000000;"
    for half in range(2):
      text += (
        f"ld.shared.f32 g, [${4 + half}]; setp.neu.f32 p, g, z; vote.sync.ballot.b32 ${half}, p, {ptx.ALL_LANES};"
        f"max.NaN.f32 g, g, z; setp.neu.f32 p, g, z; vote.sync.ballot.b32 ${2 + half}, p, {ptx.ALL_LANES};"
      )
    ballots = ptx.asm((ptx.i32(),) * 4, [gate_of(lane), gate_of(high)], text + "}", "=&r,=&r,=&r,=&r,r,r")
    listed, fires = ballots[:2], ballots[2:]
    word = arith.addi(
      arith.muli(token, ptx.const(words_of_a_token)), arith.muli(block, ptx.const(_NEURONS // bits.BITS))
    )
    store = "{{.reg .pred p; setp.eq.u32 p, $3, 0; @p st.{}.v2.b32 [$0], {{$1, $2}};}}"
    for address, pair in zip(words, (listed, fires)):
      ptx.asm((), [ptx.offset(address, word, 4), *pair, lane], store.format("global"), "l,r,r,r")
    ptx.asm((), [ptx.offset(seen, token, 8), *listed, lane], store.format("shared"), "r,r,r,r")
    return carry

  ptx.for_each(warp, ptx.const(num_tokens), rows.WARPS, see, [])


def _prefetch(seen, weights, block, num_tokens: int, width: int) -> None:
  """Starts the rows of neurons that any token lists on their way to L2, each once: a warp has half of one weight's."""
  lane, warp = ptx.lane_and_warp()
  half, of_weight = arith.andi(warp, ptx.const(1)), arith.shrui(warp, ptx.const(1))
  text = "{.reg .pred p; .reg .b32 a, t, w; mov.b32 w, 0; shl.b32 a, $2, 2; add.u32 a, a, $1;"
  for first in range(0, num_tokens, 32):  # a lane has a token
    text += (
      f"add.u32 t, $3, {first}; setp.lt.u32 p, t, {num_tokens}; shl.b32 t, t, 3; add.u32 t, t, a;"
      "@p ld.shared.b32 t, [t]; @p or.b32 w, w, t;"
    )
  text += f"redux.sync.or.b32 w, w, {ptx.ALL_LANES}; shr.u32 w, w, $3; and.b32 $0, w, 1;}}"
  listed = ptx.asm((ptx.i32(),), [seen, half, lane], text, "=r,r,r,r")
  neuron = arith.addi(arith.muli(block, ptx.const(_NEURONS)), arith.addi(arith.muli(half, ptx.const(32)), lane))
  for n, address in enumerate(weights):
    text = (
      f"{{.reg .pred p; setp.ne.u32 p, $1, 0; setp.eq.and.u32 p, $2, {n}, p;"
      f"@p cp.async.bulk.prefetch.L2.global [$0], {2 * width};}}"
    )
    ptx.asm((), [ptx.offset(address, neuron, 2 * width), listed, of_weight], text, "l,r,r")


def _list_pairs(seen, pairs, words: int) -> ir.Value:
  """Lists the set bits of all words as token << 6 | neuron; every warp does the same. Returns their number."""
  lane, _ = ptx.lane_and_warp()
  text = "{.reg .pred p; .reg .b32 i, b, c, s, t, a, e; mov.b32 $0, 0;"
  for first in range(0, words, 32):
    text += (
      f"add.u32 i, $1, {first}; setp.lt.u32 p, i, {words}; mov.b32 b, 0; shl.b32 t, i, 2; add.u32 t, t, $2;"
      "@p ld.shared.b32 b, [t];" + ptx.list_bits("$0", "$3", label=first)
    )
  return ptx.asm((ptx.i32(),), [lane, seen, pairs], text + "}", "=&r,r,r,r")


@functools.partial(jax.jit, static_argnames=("num_tokens", "interpret"))
def combine(
  h_PF: jax.Array, listed_PW: jax.Array, w_down_FD: jax.Array, *, num_tokens: int, interpret: bool
) -> jax.Array:
  """y_MD = sum over the listed neurons of h Wd, of the first tokens, in the dtype of Wd."""
  width = w_down_FD.shape[1]
  # Few blocks need many warps each; many blocks are better small, so that all run at once.
  warps = _MANY_WARPS if num_tokens * width // _COLUMNS < _MANY_BLOCKS else rows.WARPS
  words_of_a_warp = -(-listed_PW.shape[1] // warps)
  return mosaic.kernel(
    functools.partial(_combine_kernel, interpret=interpret),
    out_type=jax.ShapeDtypeStruct((num_tokens, width), w_down_FD.dtype),
    grid=(width // _COLUMNS, num_tokens),
    grid_names=("part", "token"),
    num_threads=warps // rows.WARPS,
    thread_name="wg",
    scratch_types=[
      plgpu.SMEM((warps, words_of_a_warp * bits.BITS), jnp.uint16),
      plgpu.SMEM((warps, _COLUMNS), jnp.float32),
      plgpu.Barrier(num_arrivals=warps // rows.WARPS),
    ],
    kernel_name="twell_decode_combine",
    interpret=interpret,
  )(h_PF, listed_PW, w_down_FD)


def _combine_kernel(h_ref, listed_ref, w_ref, out_ref, list_smem, partial_smem, done, *, interpret: bool):
  token, part, wg = lax.axis_index("token"), lax.axis_index("part"), lax.axis_index("wg")
  _add_listed(h_ref, listed_ref, w_ref, list_smem, partial_smem, token, part, wg, interpret=interpret)
  plgpu.barrier_arrive(done)

  @pl.when(wg == 0)
  def _():
    plgpu.barrier_wait(done)
    # In the order of the warps, so that the sum does not depend on which came first.
    total = partial_smem[0]
    for warp in range(1, partial_smem.shape[0]):
      total = total + partial_smem[warp]
    out_ref[token, pl.ds(part * _COLUMNS, _COLUMNS)] = total.astype(out_ref.dtype)


def _add_listed(h_ref, listed_ref, w_ref, list_smem, partial_smem, token, part, wg, *, interpret: bool) -> None:
  """partial_smem[w] = the sum over the listed neurons of warp w, which has every n-th word of them, of n warps."""
  num_neurons, words, warps = h_ref.shape[1], listed_ref.shape[1], partial_smem.shape[0]
  if interpret:
    listed = bits.expand(listed_ref[token])
    h = jnp.where(listed, h_ref[token], 0)
    columns_FN = w_ref[:, pl.ds(part * _COLUMNS, _COLUMNS)].astype(jnp.float32)
    for n in range(rows.WARPS):
      warp = wg * rows.WARPS + n
      own = listed & (jnp.arange(num_neurons) // bits.BITS % warps == warp)
      partial_smem[warp] = jnp.where(own, h, 0) @ jnp.where(own[:, None], columns_FN, 0)
    return

  splat, ref = plgpu.Layout.WG_SPLAT, plgpu.RefType()

  @plgpu.inline_mgpu(arg_types=(ref, ref, ref, ref, ref, splat, splat), return_type=None)
  def run(ctx, h_ref, listed_ref, w_ref, list_smem, partial_smem, token, part):
    del ctx
    width = ir.MemRefType(w_ref.type).shape[1]
    lane, warp = ptx.lane_and_warp()
    token = ptx.scalar(token)
    listed = ptx.offset(ptx.global_address(listed_ref), token, 4 * words)
    own_list = ptx.offset(ptx.shared_address(list_smem), warp, 2 * ir.MemRefType(list_smem.type).shape[1])
    text = "{.reg .pred p; .reg .b32 i, b, c, s, t, a, e; .reg .b64 g; mov.b32 $0, 0;"
    for first in range(0, words, warps * 32):
      text += (
        f"mad.lo.u32 i, $2, {warps}, $1; add.u32 i, i, {first}; setp.lt.u32 p, i, {words}; mov.b32 b, 0;"
        "mul.wide.u32 g, i, 4; add.u64 g, g, $3; @p ld.global.b32 b, [g];" + ptx.list_bits("$0", "$4", label=first)
      )
    count = ptx.asm((ptx.i32(),), [warp, lane, listed, own_list], text + "}", "=&r,r,r,l,r")
    column = arith.addi(arith.muli(ptx.scalar(part), ptx.const(_COLUMNS)), arith.muli(lane, ptx.const(_COLUMNS // 32)))
    h = ptx.offset(ptx.global_address(h_ref), token, 4 * num_neurons)
    weights = ptx.offset(ptx.global_address(w_ref), column, 2)
    unpack = rows.unpack(ir.MemRefType(w_ref.type).element_type)

    def step(place, number, acc):
      read = []
      for n in range(number):
        at = ptx.offset(own_list, arith.addi(place, ptx.const(n)), 2)
        text = "{.reg .b16 t; ld.shared.b16 t, [$1]; cvt.u32.u16 $0, t;}"
        neuron = ptx.asm((ptx.i32(),), [at], text, "=r,r")
        value = ptx.asm((ptx.f32(),), [ptx.offset(h, neuron, 4)], "ld.global.f32 $0, [$1];", "=f,l")
        row = ptx.offset(weights, neuron, 2 * width)
        pair = ptx.asm((ptx.i32(),) * 2, [row], "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l")
        read.append((value, pair))
      for value, pair in read:
        columns = [c for word in pair for c in unpack(word)]
        acc = [rows.fma(c, value, a) for c, a in zip(columns, acc)]
      return acc

    acc = rows.loop(count, _UNROLL, step, [ptx.const_f32(0.0)] * (_COLUMNS // 32))
    own = ptx.offset(ptx.shared_address(partial_smem), warp, 4 * _COLUMNS)
    at = ptx.offset(own, lane, _COLUMNS // 32 * 4)
    ptx.asm((), [at, *acc], "st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r,f,f,f,f")
    return []

  run(h_ref, listed_ref, w_ref, list_smem, partial_smem, token, part)
