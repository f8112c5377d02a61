"""The feed-forward block for a few tokens, on Hopper: two kernels, bound by the bytes of the weights that they read.

`hidden` reads the gate once: a block multiplies 64 neurons with all tokens on the tensor cores, sees which fire for
which token, and reads the rows of Wu of those alone. `combine` reads their rows of Wd: a block has 128 columns of a
token. There is no packed form and so no overflow, and no branch: any density, any value, exact.

A neuron counts as listed if its gate is not 0 after ReLU, or is -inf before: 0 * (x . w_up) is NaN if the token is not
finite, as it is in the dense block.

Dimension key: M tokens (P: padded to a multiple of 8), D model width, F neurons, W words of 32 neurons, N the 64 neurons
of a block.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels import mosaic, ptx
from pallas_kernels.twell import gather_blocks as blocks
from pallas_kernels.twell.reference import Sums

MAX_TOKENS = 64
_NEURONS = 64  # of a block of `hidden`: the rows of one wgmma
_STAGE_BYTES = 190 * 1024  # of operands on their way: all that a block will read, if it fits
_BITS = 32
_COLUMNS = 128  # of a block of `combine`, four a lane
_COMBINE_WARPS = 16  # of a block of `combine`; each has its share of the neurons
_COMBINE_UNROLL = 8  # rows on their way


def feedforward(
  x_MD: jax.Array,
  w_gate_FD: jax.Array | None,
  w_up_FD: jax.Array,
  w_down_FD: jax.Array,
  *,
  with_active: bool,
  interpret: bool,
) -> tuple[jax.Array, Sums]:
  """y_MD and sums over the tokens, at most MAX_TOKENS; the caller has checked shapes and dtypes."""
  num_tokens, num_neurons = x_MD.shape[0], w_up_FD.shape[0]
  if num_tokens == 0:
    zero = jnp.zeros((), jnp.float32)
    return jnp.zeros_like(x_MD), Sums(
      zero, zero, jnp.int32(0), jnp.zeros((num_neurons,), bool) if with_active else None
    )
  x_PD = jnp.pad(x_MD, ((0, -num_tokens % 8), (0, 0)))
  h_PF, listed_PW, fires_PW, l1_PB = hidden(x_PD, w_gate_FD, w_up_FD, w_down_FD, interpret=interpret)
  y_PD = combine(h_PF, listed_PW, w_down_FD, interpret=interpret)
  fires_MW = fires_PW[:num_tokens]
  active_F = None
  if with_active:
    bits_W = lax.reduce(fires_MW, jnp.uint32(0), lax.bitwise_or, (0,))
    active_F = ((bits_W[:, None] >> jnp.arange(_BITS, dtype=jnp.uint32)) & 1).reshape(-1) != 0
  return y_PD[:num_tokens], Sums(
    l1=jnp.sum(l1_PB[:num_tokens]),
    l0=jnp.sum(lax.population_count(fires_MW), dtype=jnp.uint32).astype(jnp.float32),
    overflow_rows=jnp.zeros_like(fires_MW[0, 0], jnp.int32),
    active_F=active_F,
  )


def hidden(
  x_PD: jax.Array, w_gate_FD: jax.Array | None, w_up_FD: jax.Array, w_down_FD: jax.Array, *, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Hidden values of the neurons that are listed; the others' places are not written.

  Returns:
    h f32[P, F]; bits of 32 neurons a word, u32[P, F/32]: which are listed, which fire; f32[P, F/64] sums of |h|.
  """
  (num_tokens, width), num_neurons = x_PD.shape, w_up_FD.shape[0]
  firing_FD = w_up_FD if w_gate_FD is None else w_gate_FD
  step_width = 256 if width % 256 == 0 else 128
  stage_bytes = (_NEURONS + num_tokens) * step_width * 2
  stages = min(width // step_width, _STAGE_BYTES // stage_bytes)
  transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
  operands = [x_PD, firing_FD, w_down_FD] + [w_up_FD] * (w_gate_FD is not None)
  words = num_neurons // _BITS
  return mosaic.kernel(
    functools.partial(_hidden_kernel, gated=w_gate_FD is not None, interpret=interpret),
    out_type=(
      jax.ShapeDtypeStruct((num_tokens, num_neurons), jnp.float32),
      jax.ShapeDtypeStruct((num_tokens, words), jnp.uint32),
      jax.ShapeDtypeStruct((num_tokens, words), jnp.uint32),
      jax.ShapeDtypeStruct((num_tokens, num_neurons // _NEURONS), jnp.float32),
    ),
    grid=(num_neurons // _NEURONS,),
    grid_names=("block",),
    scratch_types=[
      plgpu.SMEM((stages, num_tokens, step_width), x_PD.dtype, transforms=transforms),
      plgpu.SMEM((stages, _NEURONS, step_width), x_PD.dtype, transforms=transforms),
      plgpu.SMEM((_NEURONS, num_tokens), jnp.float32),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    ],
    kernel_name="twell_decode_hidden",
    interpret=interpret,
  )(*operands)


def _hidden_kernel(x_ref, firing_ref, w_down_ref, *rest, gated: bool, interpret: bool):
  *up_ref, h_ref, listed_ref, fires_ref, l1_ref, x_smem, w_smem, gate_smem, full = rest
  block = lax.axis_index("block")
  stages, num_tokens, step_width = x_smem.shape
  steps = x_ref.shape[1] // step_width

  def fetch(step):
    slot, columns = lax.rem(step, stages), pl.ds(step * step_width, step_width)
    plgpu.copy_gmem_to_smem(x_ref.at[:, columns], x_smem.at[slot], full.at[slot])
    plgpu.copy_gmem_to_smem(firing_ref.at[pl.ds(block * _NEURONS, _NEURONS), columns], w_smem.at[slot], full.at[slot])

  lax.fori_loop(0, stages, lambda step, _: fetch(step), None)

  def multiply(acc):
    def step(k, _):
      slot = lax.rem(k, stages)
      plgpu.barrier_wait(full.at[slot])
      plgpu.wgmma(acc, w_smem.at[slot], x_smem.at[slot].transpose((1, 0)))
      if steps > stages:
        plgpu.wgmma_wait(1)  # the step before has been read
        pl.when((k > 0) & (k - 1 + stages < steps))(lambda: fetch(k - 1 + stages))

    lax.fori_loop(0, steps, step, None)
    return acc[...]

  gate_NP = pl.run_scoped(multiply, plgpu.ACC((_NEURONS, num_tokens), jnp.float32))
  # -inf stays: it is listed, though it does not fire.
  rounded_NP = gate_NP.astype(x_ref.dtype).astype(jnp.float32)
  gate_smem[...] = jnp.where(gate_NP == -jnp.inf, gate_NP, jnp.maximum(rounded_NP, 0))
  plgpu.commit_smem()
  _hidden_of_block(
    x_ref,
    up_ref[0] if gated else None,
    w_down_ref,
    gate_smem,
    h_ref,
    listed_ref,
    fires_ref,
    l1_ref,
    block,
    interpret=interpret,
  )


def _hidden_of_block(
  x_ref, up_ref, down_ref, gate_smem, h_ref, listed_ref, fires_ref, l1_ref, block, *, interpret: bool
) -> None:
  """From the gates of 64 neurons to their hidden values: each warp has every fourth token."""
  num_tokens, width = x_ref.shape
  if interpret:
    gate_NP, own = gate_smem[...], pl.ds(block * _NEURONS, _NEURONS)
    value_NP = jnp.maximum(gate_NP, 0)
    h_NP = value_NP
    if up_ref is not None:
      h_NP = value_NP * (up_ref[own].astype(jnp.float32) @ x_ref[...].astype(jnp.float32).T)
    listed_NP, fires_NP = gate_NP != 0, value_NP != 0
    h_ref[:, own] = jnp.where(listed_NP, h_NP, jnp.nan).T  # the GPU leaves the others unwritten
    bits = lambda mask_NP: jnp.sum(
      mask_NP.T.reshape(num_tokens, -1, _BITS) * (jnp.uint32(1) << jnp.arange(_BITS, dtype=jnp.uint32)),
      axis=2,
      dtype=jnp.uint32,
    )
    own_words = pl.ds(block * (_NEURONS // _BITS), _NEURONS // _BITS)
    listed_ref[:, own_words], fires_ref[:, own_words] = bits(listed_NP), bits(fires_NP)
    l1_ref[:, block] = jnp.sum(jnp.where(listed_NP, jnp.abs(h_NP), 0), axis=0)
    return

  refs = [x_ref, down_ref, gate_smem, h_ref, listed_ref, fires_ref, l1_ref] + [up_ref] * (up_ref is not None)

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * len(refs)), return_type=None)
  def run(ctx, block, x_ref, down_ref, gates, h_ref, listed_ref, fires_ref, l1_ref, *up_ref):
    del ctx
    num_neurons = ir.MemRefType(h_ref.type).shape[1]
    first = arith.muli(ptx.scalar(block), ptx.const(_NEURONS))
    lane, warp = ptx.lane_and_warp()
    index = ir.IndexType.get()
    to_index = lambda value: arith.index_cast(index, value)
    loop = scf.ForOp(to_index(warp), to_index(ptx.const(num_tokens)), arith.constant(index, blocks.WARPS), [])
    with ir.InsertionPoint(loop.body):
      token = arith.index_cast(ptx.i32(), loop.induction_variable)
      gate_of = lambda neuron: ptx.offset(ptx.offset(ptx.shared_address(gates), neuron, 4 * num_tokens), token, 4)
      high = arith.addi(lane, ptx.const(32))
      # bits of both halves of the 64 neurons: listed and firing
      text = (
        "{.reg .pred p; .reg .f32 g; .reg .f32 z; mov.f32 z, 0f00000000;"
        + "".join(
          f"ld.shared.f32 g, [${4 + half}]; setp.neu.f32 p, g, z; vote.sync.ballot.b32 ${half}, p, {ptx.ALL_LANES};"
          f"max.NaN.f32 g, g, z; setp.neu.f32 p, g, z; vote.sync.ballot.b32 ${2 + half}, p, {ptx.ALL_LANES};"
          for half in range(2)
        )
        + "}"
      )
      listed_low, listed_high, fires_low, fires_high = ptx.asm(
        (ptx.i32(),) * 4, [gate_of(lane), gate_of(high)], text, "=&r,=&r,=&r,=&r,r,r"
      )
      word = arith.addi(
        arith.muli(token, ptx.const(num_neurons // _BITS)), arith.muli(ptx.scalar(block), ptx.const(_NEURONS // _BITS))
      )
      store_bits = "{.reg .pred p; setp.eq.u32 p, $3, 0; @p st.global.v2.b32 [$0], {$1, $2};}"
      for ref, low, top in ((listed_ref, listed_low, listed_high), (fires_ref, fires_low, fires_high)):
        ptx.asm((), [ptx.offset(ptx.global_address(ref), word, 4), low, top, lane], store_bits, "l,r,r,r")
      # Every row that will be read starts on its way to L2 at once; each lane asks for those of two neurons.
      rows = [down_ref, *up_ref]
      for half, bits in enumerate((listed_low, listed_high)):
        neuron = arith.addi(first, lane if half == 0 else high)
        for ref in rows:
          at = ptx.offset(ptx.global_address(ref), neuron, 2 * width)
          ptx.asm(
            (),
            [at, bits, lane],
            "{.reg .pred p; .reg .b32 t; shr.u32 t, $1, $2; and.b32 t, t, 1; setp.ne.u32 p, t, 0;"
            f"@p cp.async.bulk.prefetch.L2.global [$0], {2 * width};}}",
            "l,r,r",
          )
      l1 = ptx.const_f32(0.0)
      for half, bits in enumerate((listed_low, listed_high)):
        l1 = _hidden_values(
          x_ref, up_ref[0] if up_ref else None, h_ref, gate_of, token, lane, bits, first, half, l1, width, num_neurons
        )
      at = arith.addi(arith.muli(token, ptx.const(num_neurons // _NEURONS)), ptx.scalar(block))
      ptx.asm(
        (),
        [ptx.offset(ptx.global_address(l1_ref), at, 4), l1, lane],
        "{.reg .pred p; setp.eq.u32 p, $2, 0; @p st.global.f32 [$0], $1;}",
        "l,f,r",
      )
      scf.yield_([])
    return []

  run(block, *refs)


def _hidden_values(x_ref, up_ref, h_ref, gate_of, token, lane, bits, first, half, l1, width, num_neurons):
  """Goes through the set bits of a word, from the lowest; returns l1 with their |h| added."""
  x_type = ir.MemRefType(x_ref.type).element_type
  loop = scf.WhileOp([ptx.i32(), ptx.f32()], [bits, l1])
  before = loop.before.blocks.append(ptx.i32(), ptx.f32())
  with ir.InsertionPoint(before):
    some = arith.cmpi(arith.CmpIPredicate.ne, before.arguments[0], ptx.const(0))
    scf.condition(some, before.arguments)
  after = loop.after.blocks.append(ptx.i32(), ptx.f32())
  with ir.InsertionPoint(after):
    rest, l1 = after.arguments
    text = "{.reg .b32 t; brev.b32 t, $2; clz.b32 $0, t; sub.u32 t, $2, 1; and.b32 $1, $2, t;}"
    bit, rest = ptx.asm((ptx.i32(), ptx.i32()), [rest], text, "=&r,=&r,r", pure=True)
    local = arith.addi(bit, ptx.const(32 * half))
    neuron = arith.addi(first, local)
    gate = ptx.asm((ptx.f32(),), [gate_of(local)], "ld.shared.f32 $0, [$1];", "=f,r")
    h = ptx.asm((ptx.f32(),), [gate], "max.NaN.f32 $0, $1, 0f00000000;", "=f,f", pure=True)
    if up_ref is not None:
      dot = blocks.dot_of_rows(
        ptx.global_address(x_ref), token, ptx.global_address(up_ref), neuron, lane, width, x_type
      )
      h = arith.mulf(h, dot)
    at = arith.addi(arith.muli(token, ptx.const(num_neurons)), neuron)
    ptx.asm(
      (),
      [ptx.offset(ptx.global_address(h_ref), at, 4), h, lane],
      "{.reg .pred p; setp.eq.u32 p, $2, 0; @p st.global.f32 [$0], $1;}",
      "l,f,r",
    )
    l1 = ptx.asm((ptx.f32(),), [l1, h], "{.reg .f32 a; abs.f32 a, $2; add.f32 $0, $1, a;}", "=f,f,f", pure=True)
    scf.yield_([rest, l1])
  return loop.results[1]


def combine(h_PF: jax.Array, listed_PW: jax.Array, w_down_FD: jax.Array, *, interpret: bool) -> jax.Array:
  """y_PD = sum over the listed neurons of h Wd, in the dtype of Wd."""
  (num_tokens, num_neurons), width = h_PF.shape, w_down_FD.shape[1]
  words_of_a_warp = -(-listed_PW.shape[1] // _COMBINE_WARPS)
  return mosaic.kernel(
    functools.partial(_combine_kernel, interpret=interpret),
    out_type=jax.ShapeDtypeStruct((num_tokens, width), w_down_FD.dtype),
    grid=(width // _COLUMNS, num_tokens),
    grid_names=("part", "token"),
    num_threads=_COMBINE_WARPS // blocks.WARPS,
    thread_name="wg",
    scratch_types=[
      plgpu.SMEM((_COMBINE_WARPS, words_of_a_warp * _BITS), jnp.uint16),
      plgpu.SMEM((_COMBINE_WARPS, _COLUMNS), jnp.float32),
      plgpu.Barrier(num_arrivals=_COMBINE_WARPS // blocks.WARPS),
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
    for warp in range(1, _COMBINE_WARPS):
      total = total + partial_smem[warp]
    out_ref[token, pl.ds(part * _COLUMNS, _COLUMNS)] = total.astype(out_ref.dtype)


def _add_listed(h_ref, listed_ref, w_ref, list_smem, partial_smem, token, part, wg, *, interpret: bool) -> None:
  """partial_smem[w] = the sum over the listed neurons of warp w; word n of the bits belongs to warp n mod 16."""
  num_neurons, words = h_ref.shape[1], listed_ref.shape[1]
  if interpret:
    bits = (listed_ref[token][:, None] >> jnp.arange(_BITS, dtype=jnp.uint32)) & 1
    listed = bits.reshape(num_neurons) != 0
    h = jnp.where(listed, h_ref[token], 0)
    rows = w_ref[:, pl.ds(part * _COLUMNS, _COLUMNS)].astype(jnp.float32)
    for n in range(blocks.WARPS):
      warp = wg * blocks.WARPS + n
      own = listed & (jnp.arange(num_neurons) // _BITS % _COMBINE_WARPS == warp)
      partial_smem[warp] = jnp.where(own, h, 0) @ jnp.where(own[:, None], rows, 0)
    return

  splat, ref = plgpu.Layout.WG_SPLAT, plgpu.RefType()

  @plgpu.inline_mgpu(arg_types=(ref, ref, ref, ref, ref, splat, splat), return_type=None)
  def run(ctx, h_ref, listed_ref, w_ref, list_smem, partial_smem, token, part):
    del ctx
    width = ir.MemRefType(w_ref.type).shape[1]
    lane, warp = ptx.lane_and_warp()
    token = ptx.scalar(token)
    bits = ptx.offset(ptx.global_address(listed_ref), token, 4 * words)
    own_list = ptx.offset(ptx.shared_address(list_smem), warp, 2 * ir.MemRefType(list_smem.type).shape[1])
    text = "{.reg .pred p; .reg .b32 i, b, c, s, t, a, e; .reg .b64 g; mov.b32 $0, 0;"
    for group in range(-(-words // (_COMBINE_WARPS * 32))):
      text += (
        f"shl.b32 i, $2, 4; add.u32 i, i, $1; add.u32 i, i, {group * _COMBINE_WARPS * 32}; mov.b32 b, 0;"
        f"setp.lt.u32 p, i, {words}; mul.wide.u32 g, i, 4; add.u64 g, g, $3; @p ld.global.b32 b, [g];"
        "popc.b32 c, b; mov.b32 s, c;"
      )
      for distance in (1, 2, 4, 8, 16):
        text += f"shfl.sync.up.b32 t|p, s, {distance}, 0, {ptx.ALL_LANES}; @p add.s32 s, s, t;"
      text += (
        "sub.s32 a, s, c; add.s32 a, a, $0; shl.b32 a, a, 1; add.s32 a, a, $4; shl.b32 i, i, 5;"
        f"MORE{group}: setp.ne.b32 p, b, 0; @!p bra DONE{group};"
        "brev.b32 t, b; clz.b32 t, t; add.u32 e, i, t; st.shared.b16 [a], e; add.s32 a, a, 2;"
        f"sub.u32 t, b, 1; and.b32 b, b, t; bra MORE{group};"
        f"DONE{group}: bar.warp.sync {ptx.ALL_LANES}; shfl.sync.idx.b32 t, s, 31, 31, {ptx.ALL_LANES}; add.u32 $0, $0, t;"
      )
    count = ptx.asm((ptx.i32(),), [warp, lane, bits, own_list], text + "}", "=&r,r,r,l,r")
    column = arith.addi(arith.muli(ptx.scalar(part), ptx.const(_COLUMNS)), arith.muli(lane, ptx.const(_COLUMNS // 32)))
    h = ptx.offset(ptx.global_address(h_ref), token, 4 * num_neurons)
    weights = ptx.offset(ptx.global_address(w_ref), column, 2)
    unpack = blocks.unpack(ir.MemRefType(w_ref.type).element_type)

    def step(place, number, acc):
      read = []
      for n in range(number):
        at = ptx.offset(own_list, arith.addi(place, ptx.const(n)), 2)
        text = "{.reg .b16 t; ld.shared.b16 t, [$1]; cvt.u32.u16 $0, t;}"
        neuron = ptx.asm((ptx.i32(),), [at], text, "=r,r")
        value = ptx.asm((ptx.f32(),), [ptx.offset(h, neuron, 4)], "ld.global.f32 $0, [$1];", "=f,l")
        row = ptx.offset(weights, neuron, 2 * width)
        words = ptx.asm((ptx.i32(),) * 2, [row], "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l")
        read.append((value, words))
      for value, words in read:
        columns = [c for word in words for c in unpack(word)]
        acc = [blocks.fma(c, value, a) for c, a in zip(columns, acc)]
      return acc

    acc = blocks.loop(count, _COMBINE_UNROLL, step, [ptx.const_f32(0.0)] * (_COLUMNS // 32))
    own = ptx.offset(ptx.shared_address(partial_smem), warp, 4 * _COLUMNS)
    ptx.asm(
      (), [ptx.offset(own, lane, _COLUMNS // 32 * 4), *acc], "st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r,f,f,f,f"
    )
    return []

  run(h_ref, listed_ref, w_ref, list_smem, partial_smem, token, part)
