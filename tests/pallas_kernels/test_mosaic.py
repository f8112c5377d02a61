"""The shims of mosaic.py against plain arithmetic, and its refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compile_cases, compile_check, device, mosaic

M, N, K, STEPS = 64, 128, 64, 2


def product(acc_MN, a_MK, b_KN, *, registers, interpret=False):
  """acc + a @ b through one pair of buffers that is refilled for each step, so a missing fence shows."""

  def body(acc_ref, a_ref, b_ref, out_ref, a_smem, b_smem, arrived):
    acc = plgpu.load(acc_ref, layout=plgpu.Layout.WGMMA, optimized=False)
    for step in range(STEPS):
      part = pl.ds(step * K, K)
      plgpu.copy_gmem_to_smem(a_ref.at[:, part], a_smem, arrived)
      plgpu.copy_gmem_to_smem(b_ref.at[part], b_smem, arrived)
      plgpu.barrier_wait(arrived)
      a = plgpu.load(a_smem, layout=plgpu.Layout.WGMMA, optimized=False) if registers else a_smem
      acc = mosaic.mma(acc, a, b_smem, interpret=interpret)
    out_ref[...] = acc

  tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
  return mosaic.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((M, N), jnp.float32),
    interpret=interpret,
    scratch_types=[
      plgpu.SMEM((M, K), a_MK.dtype, transforms=tiles),
      plgpu.SMEM((K, N), b_KN.dtype, transforms=tiles),
      plgpu.Barrier(num_arrivals=2),
    ],
    kernel_name="mma",
  )(acc_MN, a_MK, b_KN)


def operands():
  rng = np.random.default_rng(0)
  acc_MN = 100 * rng.normal(size=(M, N)).astype(np.float32)  # large: a lost start value cannot hide
  a_MK, b_KN = rng.normal(size=(M, K * STEPS)), rng.normal(size=(K * STEPS, N))
  return jnp.asarray(acc_MN), jnp.asarray(a_MK, jnp.bfloat16), jnp.asarray(b_KN, jnp.bfloat16)


def expected(acc_MN, a_MK, b_KN):
  return np.float64(acc_MN) + np.asarray(a_MK, np.float64) @ np.asarray(b_KN, np.float64)


@pytest.mark.parametrize("registers", [False, True], ids=["a_in_smem", "a_in_registers"])
class TestMma:
  def test_adds_the_product_to_what_was_there(self, run, registers):
    y_MN = run(functools.partial(product, registers=registers, interpret=True), *operands())
    np.testing.assert_allclose(y_MN, expected(*operands()), rtol=1e-6, atol=1e-4)  # float32 sums in another order

  def test_lowers_for_cuda(self, registers):
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands())
    case = compile_cases.Case(functools.partial(product, registers=registers), shapes)
    assert len(compile_check.kernel_modules(compile_check.lower(case))) == 1

  @pytest.mark.gpu
  def test_adds_the_product_on_the_gpu(self, hopper, run, registers):
    y_MN = run(jax.jit(functools.partial(product, registers=registers)), *operands())
    np.testing.assert_allclose(y_MN, expected(*operands()), rtol=1e-6, atol=1e-4)  # float32 sums in another order


def rows_times_identity(x_TK, first: int, *, interpret: bool = False):
  """64 rows from `first` on, as wgmma sees what a copy to any row brought."""
  rows, width = 64, 64

  def body(x_ref, identity_ref, out_ref, x_smem, identity_smem, barrier):
    rows_smem, tiles_smem = mosaic.views(x_smem, interpret=interpret)
    plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(first, rows)], rows_smem, barrier)
    plgpu.copy_gmem_to_smem(identity_ref, identity_smem, barrier)
    plgpu.barrier_wait(barrier)

    def multiply(acc):
      plgpu.wgmma(acc, tiles_smem, identity_smem)
      return acc[...]

    out_ref[...] = pl.run_scoped(multiply, plgpu.ACC((rows, width), jnp.float32))

  return mosaic.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((rows, width), jnp.float32),
    interpret=interpret,
    scratch_types=[
      mosaic.rows_operand((rows, width), x_TK.dtype, interpret=interpret),
      plgpu.SMEM((width, width), x_TK.dtype, transforms=mosaic.operand_transforms()),
      plgpu.Barrier(num_arrivals=2),
    ],
    kernel_name="rows_times_identity",
  )(x_TK, jnp.eye(width, dtype=x_TK.dtype))


class TestRowsOperand:
  x_TK = jnp.asarray(np.random.default_rng(1).normal(size=(100, 64)), jnp.bfloat16)

  @pytest.mark.parametrize("first", [0, 5, 36])
  def test_products_see_the_rows_that_were_copied(self, run, first):
    found = run(functools.partial(rows_times_identity, first=first, interpret=True), self.x_TK)
    np.testing.assert_array_equal(found, self.x_TK[first : first + 64].astype(jnp.float32))

  def test_lowers_for_cuda(self):
    shape = jax.ShapeDtypeStruct(self.x_TK.shape, self.x_TK.dtype)
    case = compile_cases.Case(functools.partial(rows_times_identity, first=5), (shape,))
    assert len(compile_check.kernel_modules(compile_check.lower(case))) == 1

  @pytest.mark.gpu
  @pytest.mark.parametrize("first", [0, 5, 36])
  def test_on_the_gpu(self, hopper, run, first):
    found = run(jax.jit(functools.partial(rows_times_identity, first=first)), self.x_TK)
    np.testing.assert_array_equal(found, self.x_TK[first : first + 64].astype(jnp.float32))


def test_a_missing_fence_is_reported_as_a_race(monkeypatch):
  monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
  with pytest.raises(AssertionError, match="data race"), mosaic.no_races():
    jax.block_until_ready(product(*operands(), registers=False, interpret=True))


def test_a_race_of_a_kernel_that_is_not_the_last_is_reported(monkeypatch):
  """The interpreter itself forgets it when the next kernel starts."""
  kernel = lambda: jax.block_until_ready(product(*operands(), registers=False, interpret=True))

  def race_then_none():
    with monkeypatch.context() as patched:
      patched.setattr(plgpu, "commit_smem", lambda: None)
      kernel()
    kernel()

  with pytest.raises(AssertionError, match="data race"), mosaic.no_races():
    race_then_none()


def test_more_threads_than_the_interpreter_has_are_refused_with_both_numbers(monkeypatch):
  """They would wait for one another forever."""
  kernel = functools.partial(mosaic.kernel, None, out_type=None, num_threads=3, cluster=(2, 2))
  monkeypatch.setattr(jax, "device_count", lambda backend: 2)
  monkeypatch.setenv("NPROC", "11")
  with pytest.raises(RuntimeError, match=r"runs this kernel in 12 threads, and JAX has 11 on this machine.* NPROC=16"):
    kernel(interpret=True)
  kernel(interpret=False)
  monkeypatch.setenv("NPROC", "12")
  kernel(interpret=True)
  monkeypatch.setenv("NPROC", "1")
  monkeypatch.setattr(jax, "device_count", lambda backend: 12)  # each CPU device has a thread of its own
  kernel(interpret=True)


def test_the_interpreter_is_usable_after_an_exception(run):
  with pytest.raises(ZeroDivisionError), mosaic.no_races():
    raise ZeroDivisionError
  run(functools.partial(product, registers=False, interpret=True), *operands())


def test_scratch_is_nan_before_it_is_written():
  def body(out_ref, scratch):
    out_ref[...] = scratch[...]

  read = mosaic.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
    interpret=True,
    scratch_types=[plgpu.SMEM((128,), jnp.float32)],
  )
  assert np.isnan(read()).all()


def test_too_much_shared_memory_is_refused_with_both_numbers():
  mosaic.check_smem("fits", 232448)
  with pytest.raises(ValueError, match=r"Config\(tile=512\) needs 232449 bytes .* has 232448; use smaller tiles"):
    mosaic.check_smem("Config(tile=512)", 232449)


def test_a_machine_without_the_gpu_says_what_it_has(monkeypatch):
  class Device:
    platform, device_kind, compute_capability = "gpu", "NVIDIA A100", "8.0"

  monkeypatch.setattr(device, "_device", Device)
  assert device.missing_hopper() == "it needs a GPU of compute capability 9.0, 'NVIDIA A100' has 8.0"
  with pytest.raises(RuntimeError, match=r"num_sms: .* 'NVIDIA A100' has 8\.0"):
    device.num_sms()


@pytest.mark.gpu
def test_the_gpu_has_the_sms_of_a_hopper(hopper):
  assert 100 <= device.num_sms() <= 144
