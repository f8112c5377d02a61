"""Kernels checked without a GPU: lowered for CUDA (always possible), and compiled to sm_90a machine code (optional).

Lowering runs tracing, layout inference and the divisibility checks, where most mistakes surface. Compiling also gives
registers, spills and shared memory:

  python -m pallas_kernels.compile_check --plugins=FOLDER

FOLDER is where `pip install --no-deps --target=FOLDER jax-cuda13-plugin jax-cuda13-pjrt` (of JAX's version) put the
compiler; without the flag it is looked for among the installed packages. gcc builds a stand-in for the CUDA driver,
which the compiler asks for nothing but the compute capability; its last step, loading the kernel, fails by design.
"""

import argparse
import collections.abc
import ctypes
import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import jax
from jaxlib.mlir import ir

from pallas_kernels.compile_cases import Case, cases

# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR is 75: a device of capability 9.0.
_STUB_DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "stub"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "stub"; return 0; }
"""


def lower(case: Case) -> jax.stages.Lowered:
  """Lowers for CUDA; JAX assumes sm_90 when no GPU is there."""
  return jax.jit(case.function).trace(*case.operands).lower(lowering_platforms=("cuda",))


def kernel_modules(lowered: jax.stages.Lowered) -> list[bytes]:
  """Returns the Mosaic GPU modules of a lowered function, in the order of its calls."""
  modules = []

  def visit(operation):
    if operation.name == "stablehlo.custom_call" and "mosaic_gpu" in str(operation.attributes["call_target_name"]):
      config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
      modules.append(ir.StringAttr(config["module"]).value_bytes)
    for region in operation.regions:
      for block in region.blocks:
        for child in block.operations:
          visit(child.operation)

  visit(lowered.compiler_ir().operation)  # type: ignore[union-attr]  # a fresh lowering always has its module
  return modules


@dataclasses.dataclass(frozen=True)
class Resources:
  registers: int
  spill_bytes: int
  smem_bytes: int


def parse_resources(ptxas: str, resources: str) -> Resources:
  """Reads what the compiler dumped: the report of ptxas, and Mosaic's own about shared memory."""
  spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ptxas)
  registers = re.search(r"Used (\d+) registers", ptxas)
  smem = re.search(r"smem_scratch_bytes=(\d+)", resources)
  if spills is None or registers is None or smem is None:
    raise ValueError(f"no registers, spills or shared memory in the compiler's report:\n{ptxas}\n{resources}")
  return Resources(int(registers[1]), int(spills[1]) + int(spills[2]), int(smem[1]))


def load_compiler(plugins: str | None) -> collections.abc.Callable[[bytes, int], None]:
  """Returns the compiler's entry point, or raises FileNotFoundError that says what is missing."""
  relative = pathlib.Path("xla_cuda13", "xla_cuda_plugin.so")
  if plugins is not None:
    folders = [pathlib.Path(plugins, "jax_plugins")]
  else:
    spec = importlib.util.find_spec("jax_plugins")
    folders = [pathlib.Path(p) for p in spec.submodule_search_locations or ()] if spec else []
  library = next((f / relative for f in folders if (f / relative).exists()), None)
  if library is None:
    raise FileNotFoundError(
      f"compile_check: no {relative} {f'in {plugins}' if plugins else 'is installed'}; pip install --no-deps"
      f" --target=FOLDER jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}, then --plugins=FOLDER"
    )
  if shutil.which("gcc") is None:
    raise FileNotFoundError("compile_check: gcc is missing; it builds the stand-in for the CUDA driver")
  jax.config.update("jax_platforms", "cpu")  # a real driver must not be asked beside the stand-in
  folder = pathlib.Path(tempfile.mkdtemp())
  (folder / "stub.c").write_text(_STUB_DRIVER)
  # The name inside the library is what a later dlopen("libcuda.so.1") finds already loaded.
  stub = folder / "libcuda.so.1"
  subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", stub, folder / "stub.c"], check=True)
  ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)
  compile_module = ctypes.CDLL(str(library)).MosaicGpuCompile
  compile_module.argtypes, compile_module.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
  return compile_module


def compile_case(case: Case, compile_module: collections.abc.Callable[[bytes, int], None]) -> list[Resources]:
  """Returns the resources of each kernel of a case."""
  found = []
  with tempfile.TemporaryDirectory() as folder:
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder  # read at lowering and at compiling, not at import
    for module in kernel_modules(lower(case)):
      compile_module(module, len(module))
    for report in sorted(pathlib.Path(folder).glob("*.ptxas")):
      found.append(parse_resources(report.read_text(), report.with_suffix(".resources.txt").read_text()))
  return found


def main() -> int:
  """Compiles every case and prints a line for each; returns 1 if one spills too much or does not compile."""
  parser = argparse.ArgumentParser(description="Compiles every kernel to sm_90a machine code without a GPU.")
  parser.add_argument("--plugins", help="folder with the packages jax-cuda13-plugin and jax-cuda13-pjrt")
  parser.add_argument("--only", default="", help="compile only cases whose name contains this")
  arguments = parser.parse_args()
  try:
    compile_module = load_compiler(arguments.plugins)
  except FileNotFoundError as error:
    print(error, file=sys.stderr)
    return 1
  failed = False
  for name, case in cases().items():
    if arguments.only not in name:
      continue
    found = compile_case(case, compile_module)
    failed = failed or not found or any(r.spill_bytes > case.spill_bytes for r in found)
    for r in found:
      print(f"{name}: {r.registers} registers, {r.spill_bytes} bytes spilled, {r.smem_bytes} bytes of shared memory")
    if not found:
      print(f"{name}: did not compile", file=sys.stderr)
  return int(failed)


if __name__ == "__main__":
  sys.exit(main())
