"""What `compile_check` compiles: every kernel at its named shapes, and at the ends of what its Config lets through."""

import collections.abc
import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.embedding import bag_hopper
from pallas_kernels.embedding import shapes as bag_shapes
from pallas_kernels.jagged import backward_hopper, bias_hopper, block_hopper, forward_hopper
from pallas_kernels.jagged.bias_hopper import Bias
from pallas_kernels.jagged.form import Form
from pallas_kernels.jagged.geometry import Mask
from pallas_kernels.jagged.schedule import FIELDS, TileList
from pallas_kernels.twell import Spec, active_hopper, decode_hopper, gather_hopper, gradient_hopper, pack_hopper
from pallas_kernels.twell import shapes as ffn_shapes
from pallas_kernels.twell.gradient_blocks import Entries
from pallas_kernels.twell.kept import nothing
from pallas_kernels.twell.shapes import FfnShape

_NUM_SMS = 132  # of an H200
# 128 sums, 64 packed words and addresses fill the 240 registers of a thread. Some bytes spill; timing does not show it.
_PACK_SPILLS = 96
# Two sums of 64 x 128 and two products of 64 x 64 are 192 registers; what that costs has not been timed.
_JAGGED_GRADIENT_SPILLS = 800
_BLOCK_SPILLS = 200
_BIAS_SPILLS = 1400


@dataclasses.dataclass(frozen=True)
class Case:
  """A function of one kernel."""

  function: collections.abc.Callable
  operands: tuple  # of jax.ShapeDtypeStruct, in trees
  spill_bytes: int = 0  # stored and loaded, known to cost no time


def cases() -> dict[str, Case]:
  """Returns them by name, the kernel first."""
  twell = _twell_pack() | _twell_gather() | _twell_active() | _twell_decode() | _twell_gradients()
  return _jagged() | _embedding_bag() | twell


def _array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def _embedding_bag() -> dict[str, Case]:
  found = {}
  for name, shape in (bag_shapes.BENCHMARK | bag_shapes.TEST).items():
    if shape.zipf:  # other ids, same kernel
      continue
    found[f"embedding_bag/{name}/sum"] = _bag_case(shape, "sum", weighted=False)
  for name, shape in bag_shapes.TEST.items():
    found[f"embedding_bag/{name}/mean_weighted"] = _bag_case(shape, "mean", weighted=True)
  for block_d, rows_in_flight in ((128, 1), (128, 16), (256, 16), (512, 15), (1024, 1), (1024, 10)):
    config = bag_hopper.Config(block_d=block_d, rows_in_flight=rows_in_flight)
    name = f"embedding_bag/block_d={block_d},rows_in_flight={rows_in_flight}"
    found[name] = _bag_case(bag_shapes.TEST["wide_bf16"], "sum", weighted=True, config=config)
  return found


def _bag_case(shape: bag_shapes.BagShape, mode, *, weighted: bool, config: bag_hopper.Config | None = None) -> Case:
  def bag(table_VD, ids_T, offsets, weights_T=None):
    return bag_hopper.bag(table_VD, ids_T, offsets, weights_T, mode, config=config)

  operands = [_array(shape.V, shape.D, dtype=shape.dtype), _array(shape.T, dtype=jnp.int32)]
  operands.append(_array(shape.B + 1, dtype=jnp.int32))
  if weighted:
    operands.append(_array(shape.T, dtype=jnp.float32))
  return Case(bag, tuple(operands))


def _twell_pack() -> dict[str, Case]:
  paper = ffn_shapes.BENCHMARK["paper"]
  float16 = dataclasses.replace(paper, dtype=jnp.float16)
  return {
    "twell_pack/paper": _pack_case(paper, spill_bytes=_PACK_SPILLS),
    "twell_pack/paper/first=128": _pack_case(paper, first=128, spill_bytes=_PACK_SPILLS),
    "twell_pack/paper/compression=4": _pack_case(paper, compression=4, spill_bytes=_PACK_SPILLS),
    "twell_pack/paper/float16,compression=2": _pack_case(float16, compression=2),
    "twell_pack/odd_tokens,last_tile_half": _pack_case(FfnShape(M=301, D=384, F=512), compression=4, first=128),
    "twell_pack/one_token,half_a_tile": _pack_case(FfnShape(M=1, D=128, F=128, dtype=jnp.float16), compression=2),
    "twell_pack/most_neurons,stages=2": _pack_case(FfnShape(M=4096, D=128, F=65536), stages=2),
  }


def _pack_case(
  shape: FfnShape, *, compression: int = 8, first: int = 0, stages: int | None = None, spill_bytes: int = 0
) -> Case:
  spec = Spec(compression=compression, value_dtype=jnp.dtype(shape.dtype))
  config = None if stages is None else pack_hopper.Config(words=spec.words, stages=stages)
  pack = functools.partial(pack_hopper.pack, spec=spec, first=first, config=config, num_sms=_NUM_SMS)
  operands = _array(shape.M, shape.D, dtype=shape.dtype), _array(shape.F, shape.D, dtype=shape.dtype)
  return Case(pack, operands, spill_bytes)


def _twell_gather() -> dict[str, Case]:
  """Widths that one, two and four warps share, and those that fill no load of all lanes."""
  paper = ffn_shapes.BENCHMARK["paper"]
  found = {}
  for width, gated, started, dtype, unroll in (
    (128, True, False, jnp.bfloat16, 1),
    (384, False, True, jnp.float16, 1),
    (2048, True, False, jnp.bfloat16, 1),
    (2048, False, False, jnp.bfloat16, 1),
    (2048, True, True, jnp.float16, 4),
    (2176, True, True, jnp.bfloat16, 1),
    (4096, True, True, jnp.bfloat16, 4),
    (8192, False, False, jnp.bfloat16, 1),
    (8192, True, True, jnp.bfloat16, 4),
  ):
    shape = dataclasses.replace(paper, D=width, gated=gated, dtype=dtype)
    parts = [f"D={width}", "gated" if gated else "non_gated", *["start"] * started, f"unroll={unroll}"]
    found["twell_gather/" + ",".join(parts)] = _gather_case(shape, started, unroll)
  return found


def _gather_case(shape: FfnShape, started: bool, unroll: int) -> Case:
  def gather(x_MD, words_MTS, w_down_FD, *rest):
    w_up_FD, *start_MD = rest if shape.gated else (None, *rest)
    return gather_hopper.gather(x_MD, words_MTS, w_up_FD, w_down_FD, *start_MD, config=config)[:3]

  config = gather_hopper.Config(dots_unroll=unroll, sums_unroll=unroll)
  tokens, weights = (_array(rows, shape.D, dtype=shape.dtype) for rows in (shape.M, shape.F))
  return Case(gather, (tokens, _words(shape), weights, *[weights] * shape.gated, *[tokens] * started))


def _twell_gradients() -> dict[str, Case]:
  """Each of the three kernels alone, of widths for one, two and four warps."""
  found = {}
  for width, gated, dtype in (
    (128, True, jnp.bfloat16),
    (2048, True, jnp.bfloat16),
    (2048, False, jnp.float16),
    (4096, True, jnp.bfloat16),
    (8192, False, jnp.bfloat16),
  ):
    shape = dataclasses.replace(ffn_shapes.BENCHMARK["paper_short"], D=width, gated=gated, dtype=dtype)
    tokens, weights = (_array(rows, width, dtype=dtype) for rows in (shape.M, shape.F))
    integers, floats = (_array(1 << 20, dtype=kind) for kind in (jnp.int32, jnp.float32))
    entries = jax.eval_shape(lambda *arrays: Entries(*arrays), integers, integers, floats, floats, floats)
    entries = entries if gated else entries._replace(of_gate=None)
    of_tokens = lambda kept, part_M, w_FD, gate_FD, d_y_MD, d_l1: gradient_hopper.token_gradients(
      kept, part_M, gate_FD, w_FD, w_FD, d_y_MD, d_l1
    )
    kept = jax.eval_shape(functools.partial(nothing, shape.M, 1 << 20, gated=gated))
    operands = kept, kept.places.first_M, weights, weights if gated else None, tokens
    keeping = lambda x_MD, words_MTS, w_FD, up_FD, first_M: gather_hopper.gather(
      x_MD, words_MTS, up_FD, w_FD, None, first_M, room=1 << 20
    )
    sums = functools.partial(gradient_hopper.segment_sums, num_rows=8000)
    name = f"D={width},{'gated' if gated else 'non_gated'}"
    keeps = tokens, _words(shape), weights, operands[3], kept.places.first_M
    found[f"twell_gather/keeping,{name}"] = Case(keeping, keeps)
    found[f"twell_token_gradients/{name}"] = Case(of_tokens, (*operands, _array(dtype=jnp.float32)))
    found[f"twell_segment_sums/{name}"] = Case(sums, (tokens, tokens, entries, _array(9000, 3, dtype=jnp.int32)))
  join = functools.partial(gradient_hopper.joined, width=2048)
  found["twell_join_segments"] = Case(join, (_array(8000, 2048, dtype=jnp.float32), _array(5632, 2, dtype=jnp.int32)))
  return found


def _words(shape: FfnShape) -> jax.ShapeDtypeStruct:
  """The packed gate, of the default Spec."""
  spec = Spec()
  return _array(shape.M, spec.tiles(shape.F), spec.words, dtype=jnp.uint32)


def _twell_active() -> dict[str, Case]:
  found = {}
  for neurons in (5632, 65536):
    active = functools.partial(active_hopper.active, num_neurons=neurons, interpret=False)
    found[f"twell_active/F={neurons}"] = Case(active, (_words(FfnShape(M=16384, D=2048, F=neurons)),))
  return found


def _twell_decode() -> dict[str, Case]:
  """56 tokens of 2048 features take the most shared memory of `hidden`, 65536 neurons that of `combine`."""
  found = {}
  for tokens, width, gated in (
    (8, 384, True),
    (8, 2048, True),
    (16, 8192, True),
    (56, 2048, True),
    (64, 384, True),
    (64, 2048, False),
    (64, 8192, True),
  ):
    name = f"twell_decode_hidden/M={tokens},D={width},{'gated' if gated else 'non_gated'}"
    found[name] = _hidden_case(FfnShape(M=tokens, D=width, F=5632, gated=gated))
  combine = functools.partial(decode_hopper.combine, num_tokens=tokens, interpret=False)
  for tokens, neurons in ((8, 5632), (64, 5632), (8, 65536)):  # the blocks of 8 tokens have more warps
    hidden = _array(tokens, neurons, dtype=jnp.float32), _array(tokens, neurons // 32, dtype=jnp.uint32)
    found[f"twell_decode_combine/M={tokens},F={neurons}"] = Case(combine, (*hidden, _array(neurons, 2048)))
  return found


def _jagged() -> dict[str, Case]:
  """Every kernel with every kind of step: with and without sums, masks of all kinds, the longest activations."""
  forms = {
    "softmax": ("softmax", Mask()),
    "softmax,causal": ("softmax", Mask(causal=True)),
    "silu,causal,targets": ("silu", Mask(causal=True, targets=True)),
    "gelu": ("gelu", Mask()),
    "gelu_polynomial,window": ("gelu_polynomial", Mask(window=100)),
    "relu,block": ("relu", Mask(block=64)),
    "each head its own": ("silu,relu,gelu,raw", Mask()),
  }
  found = {}
  for name, (activations, mask) in forms.items():
    form = Form(activations=tuple(activations.split(",")), pre_scale=0.1, post_scale=0.5, mask=mask)
    for width in (64, 96, 128) if name == "softmax" else (128,):
      tokens, keys = _array(4096, 4, width), _array(4096, 2, width)
      sums = _array(4, 4096, dtype=jnp.float32) if form.is_softmax else None
      operands, spills = (tokens, keys, keys, tokens, sums, sums), 0 if width == 64 else _JAGGED_GRADIENT_SPILLS
      found[f"jagged_forward/{name},K={width}"] = _jagged_case(forward_hopper.forward, form, operands[:3])
      kernels = dict(query_gradient=backward_hopper.query_gradient, key_gradients=backward_hopper.key_gradients)
      for which, kernel in kernels.items():
        for turned in (False, True) if name == "softmax" else (False,):
          case = _jagged_case(kernel, form, operands, turned=turned, spill_bytes=spills)
          found[f"jagged_{which}/{name},K={width}{',turned' * turned}"] = case
  return found | _jagged_block() | _jagged_bias()


def _jagged_block() -> dict[str, Case]:
  found = {}
  for activation in ("softmax", "gelu"):
    form = Form(activations=(activation,), pre_scale=0.1, post_scale=0.5, mask=Mask(block=64), turn_values=True)
    for width in (64, 96, 128):
      tokens, name = _array(4096, 4, width), f"{activation},K={width}"
      found[f"jagged_block/{name}"] = _jagged_case(block_hopper.forward, form, (tokens,) * 3)
      for turned in (False, True):
        case = _jagged_case(block_hopper.backward, form, (tokens,) * 4, turned=turned, spill_bytes=_BLOCK_SPILLS)
        found[f"jagged_block_gradients/{name}{',turned' * turned}"] = case
  return found


def _jagged_bias() -> dict[str, Case]:
  floats, integers = lambda size: jnp.zeros(size, jnp.float32), lambda size: jnp.zeros(size, jnp.int32)
  tables = jax.eval_shape(lambda: Bias(floats(4095), floats(129), integers(130), integers(4096), integers(4096)))
  found = {}
  for activation, width in (("softmax", 64), ("softmax", 96), ("softmax", 128), ("silu", 128)):
    form = Form(activations=(activation,), pre_scale=0.1, post_scale=0.5, mask=Mask(causal=True))
    tokens, keys, sums = _array(4096, 4, width), _array(4096, 2, width), _array(4, 4096, dtype=jnp.float32)
    operands = tokens, keys, keys, tokens, *([sums] * 2 if form.is_softmax else [None] * 2)
    calls = dict(
      forward=lambda *a, form=form: forward_hopper.forward(*a[:3], a[6], form, a[7], num_sms=_NUM_SMS),
      query_gradient=lambda *a, form=form: backward_hopper.query_gradient(*a[:7], (), a[7], form, num_sms=_NUM_SMS),
      key_gradients=lambda *a, form=form: backward_hopper.key_gradients(*a[:7], (), a[7], form, num_sms=_NUM_SMS),
      table_gradients=lambda *a, form=form: bias_hopper.table_gradients(*a, form, num_sms=_NUM_SMS),
    )
    for which, call in calls.items():
      case = Case(call, (*operands, _tile_list(), tables), spill_bytes=_BIAS_SPILLS)
      found[f"jagged_{which}/{activation},bias,K={width}"] = case
  return found


def _tile_list() -> TileList:
  return jax.eval_shape(lambda: TileList(jnp.zeros((100, FIELDS), jnp.int32), jnp.zeros(2, jnp.int32)))


def _jagged_case(kernel, form: Form, operands: tuple, *, turned: bool | None = None, spill_bytes: int = 0) -> Case:
  """turned: whether gradients are turned back; None for a forward kernel."""
  num_tokens, _, width = operands[0].shape
  rest = kernel in (backward_hopper.query_gradient, backward_hopper.key_gradients)

  def call(operands, tiles, *turn):
    return kernel(*operands, tiles, *turn, *[None] * rest, form, num_sms=_NUM_SMS)

  turn = {None: (), False: ((),), True: ((_array(num_tokens, width // 2, dtype=jnp.float32),) * 2,)}[turned]
  return Case(call, (operands, _tile_list(), *turn), spill_bytes=spill_bytes)


def _hidden_case(shape: FfnShape) -> Case:
  def hidden(x_PD, w_down_FD, *w_gate_and_up_FD):
    w_gate_FD, w_up_FD = w_gate_and_up_FD if shape.gated else (None, *w_gate_and_up_FD)
    return decode_hopper.hidden(x_PD, w_gate_FD, w_up_FD, w_down_FD, interpret=False)

  weights = _array(shape.F, shape.D)
  return Case(hidden, (_array(shape.M, shape.D), weights, *[weights] * (1 + shape.gated)))
