"""What the compile check reads from the compiler, and what it says when the compiler is not there."""

import importlib.util
import shutil
import sys

import pytest

from pallas_kernels import compile_cases, compile_check

PTXAS = """ptxas info    : Compiling entry function 'k_mosaic_gpu_kernel' for 'sm_90a'
    0 bytes stack frame, 44 bytes spill stores, 116 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers
"""


def test_registers_spills_and_shared_memory_are_read():
  found = compile_check.parse_resources(PTXAS, "Resources(smem_scratch_bytes=213000, tmem_scratch_cols=0)")
  assert found == compile_check.Resources(registers=168, spill_bytes=160, smem_bytes=213000)


def test_a_report_of_another_form_is_not_taken_for_zero():
  with pytest.raises(ValueError, match="no registers, spills or shared memory in the compiler's report"):
    compile_check.parse_resources("ptxas fatal", "Resources()")


@pytest.mark.parametrize(("spilled", "status"), [(0, 0), (8, 0), (9, 1)])
def test_a_case_may_spill_what_it_states_and_no_more(monkeypatch, capsys, spilled, status):
  cases = {"pack/wide": compile_cases.Case(None, (), spill_bytes=8), "pack/narrow": compile_cases.Case(None, ())}
  found = {8: [compile_check.Resources(168, spilled, 1024)], 0: [compile_check.Resources(40, 0, 1024)]}
  monkeypatch.setattr(sys, "argv", ["compile_check", "--only=pack"])
  monkeypatch.setattr(compile_check, "cases", lambda: cases)
  monkeypatch.setattr(compile_check, "load_compiler", lambda plugins: None)
  monkeypatch.setattr(compile_check, "compile_case", lambda case, compiler: found[case.spill_bytes])
  assert compile_check.main() == status
  assert f"pack/wide: 168 registers, {spilled} bytes spilled, 1024 bytes of shared" in capsys.readouterr().out
  found[0] = [compile_check.Resources(40, 1, 1024)]
  assert compile_check.main() == 1


def test_a_missing_compiler_is_named_with_the_command_that_gets_it(monkeypatch, tmp_path):
  with pytest.raises(
    FileNotFoundError, match=r"xla_cuda_plugin\.so in .*; pip install --no-deps .* jax-cuda13-plugin=="
  ):
    compile_check.load_compiler(str(tmp_path))
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(FileNotFoundError, match=r"xla_cuda_plugin\.so is installed; pip install"):
    compile_check.load_compiler(None)


def test_a_missing_gcc_is_named(monkeypatch, tmp_path):
  library = tmp_path / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
  library.parent.mkdir(parents=True)
  library.touch()
  monkeypatch.setattr(shutil, "which", lambda name: None)
  with pytest.raises(FileNotFoundError, match="gcc is missing"):
    compile_check.load_compiler(str(tmp_path))
