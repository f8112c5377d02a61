"""The one home of unstable Mosaic GPU calls: launching, the interpreter, shims for what it cannot run.

Mosaic GPU renames things between releases, and its CPU interpreter lacks some instructions. Kernels import this module
for such parts, so that a new JAX release is one file's work. Each shim runs different code on the GPU and in the
interpreter; its GPU half is only proved by its own GPU test.

Dimension key: M, N, K rows, columns and contraction of a matrix product.
"""

import collections.abc
import contextlib
import math
import os

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as _interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 128  # threads of a warpgroup, which is one Pallas thread
SMEM_BYTES = 227 * 1024  # what one block may use on sm_90

# NaN-filled scratch shows a read before the first write; a race is recorded, not raised: see `no_races`.
_INTERPRET = plgpu.InterpretGPUParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")


def check_smem(name: str, needed: int) -> None:
  """Refuses a Config that cannot fit, before anything is compiled."""
  if needed > SMEM_BYTES:
    raise ValueError(
      f"{name} needs {needed} bytes of shared memory, a block on sm_90 has {SMEM_BYTES}; use smaller tiles"
    )


def operand_transforms(width: int = 64) -> tuple:
  """How a wgmma operand of 16-bit values lies in shared memory: tiles of 8 rows x `swizzle_bytes(width)`, swizzled."""
  swizzle = swizzle_bytes(width)
  return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def rows_operand(shape: tuple[int, ...], dtype, *, interpret: bool):
  """Scratch for wgmma operands whose copies begin at any row: `views` are what a kernel makes of it.

  A copy into tiles of 8 rows can begin at multiples of 8 rows alone. Here the last axis is as wide as a swizzle, so
  that tiles of 8 rows one after another are the same bytes as plain rows, which a copy can begin to read anywhere.
  """
  tiling, swizzle = operand_transforms(shape[-1])
  tiled = plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))
  # The interpreter holds the members of a union apart, and knows no tiles.
  return tiled if interpret else plgpu.RefUnion(plgpu.SMEM(shape, dtype, transforms=(swizzle,)), tiled)


def views(operand_smem, *, interpret: bool) -> tuple:
  """(what copies write, what products read) of a `rows_operand`."""
  return (operand_smem, operand_smem) if interpret else tuple(operand_smem)


def swizzle_bytes(width: int) -> int:
  """The widest swizzle that divides rows of `width` 16-bit values: 128 bytes, or 64."""
  if width % 32:
    raise ValueError(f"mosaic.swizzle_bytes: width={width} must be a multiple of 32")
  return 128 if width % 64 == 0 else 64


def kernel(body, *, out_type, interpret: bool, **options) -> collections.abc.Callable:
  """`plgpu.kernel` with our interpreter settings, and with results that vary over the mesh axes of its operands.

  Inside `jax.shard_map(check_vma=True)` every value carries the mesh axes over which it varies; an opaque kernel has to
  state them for its result, and the union over the operands is the only claim that is always true.
  """

  if interpret:
    _require_threads(options.get("num_threads") or 1, options.get("cluster", ()))

  def launch(*operands):
    varying = frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(operands)))
    # A manual_axis_type in out_type is dropped on the way (JAX 0.11.2), so the result is cast.
    results = plgpu.kernel(body, out_type=out_type, interpret=_INTERPRET if interpret else None, **options)(*operands)
    return jax.lax.pcast(results, tuple(varying), to="varying") if varying else results

  return launch


def _require_threads(num_threads: int, cluster: tuple[int, ...]) -> None:
  """Raises where the interpreter would hang: its threads wait for one another, and XLA has one a core or CPU device."""
  needed = num_threads * math.prod(cluster)
  available = max(int(os.environ.get("NPROC", os.cpu_count() or 1)), jax.device_count("cpu"))
  if needed > available:
    raise RuntimeError(
      f"the interpreter runs this kernel in {needed} threads, and JAX has {available} on this machine, so it would"
      " hang; start Python with NPROC=16 in its environment"
    )


@contextlib.contextmanager
def no_races():
  """Fails if an interpreted kernel inside raced; leaves a clean interpreter behind, also after an exception.

  Wait for the results inside.
  """
  states = []
  original = _interpreter.GPURaceDetectionState

  def remembered(**options):  # the interpreter keeps the state of the last kernel only
    states.append(original(**options))
    return states[-1]

  _interpreter.reset_gpu_interpret_mode_state()
  _interpreter.GPURaceDetectionState = remembered  # type: ignore[assignment, misc]
  try:
    yield
    if any(state.races_found for state in states):
      raise AssertionError("the interpreter found a data race; its report is on standard output")
  finally:
    _interpreter.GPURaceDetectionState = original  # type: ignore[misc]
    _interpreter.reset_gpu_interpret_mode_state()


def mma(acc_MN: jax.Array, a_MK, b_KN_smem, *, interpret: bool) -> jax.Array:
  """acc + a @ b with float32 accumulation. `a` is a register array or an SMEM ref, `b` an SMEM ref.

  In the interpreter `b` may be an array too: what a shim made of an SMEM ref that the GPU changes in place.

  The interpreter has neither wgmma with `a` in registers nor an accumulator that starts from a value, so it multiplies
  arrays instead. The fence that follows its reads stands for the wait that wgmma does: without it the race detector
  (rightly) objects when a TMA copy refills `b`.
  """
  if interpret:
    a_MK, b_KN = (x if isinstance(x, jax.Array) else x[...] for x in (a_MK, b_KN_smem))
    plgpu.commit_smem()
    return acc_MN + jnp.dot(a_MK, b_KN, preferred_element_type=jnp.float32)

  def accumulate(acc_ref):
    plgpu.wgmma(acc_ref, a_MK, b_KN_smem)
    plgpu.wgmma_wait(0)

  return pl.run_state(accumulate)(plgpu.ACC.init(acc_MN))
