"""Imports go down only, heavy optional libraries load only where they are used, and no data from disk runs as code."""

import ast
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LAYERS = ("experiments", "configs", "sparse_lm", "pallas_kernels")
# What each layer may import of this repository; a name stands for itself and all below it.
MAY_IMPORT = {
  "experiments": ("experiments", "configs", "sparse_lm", "pallas_kernels"),
  "configs": (
    "configs",
    "sparse_lm.config",
    "sparse_lm.errors",
    "sparse_lm.next_item_config",
    "sparse_lm.recsys_config",
    "sparse_lm.table_config",
  ),
  "sparse_lm": ("sparse_lm", "pallas_kernels"),
  "pallas_kernels": ("pallas_kernels",),
}
# Besides the standard library: the kernels are usable alone. jaxlib is the compiled half of jax.
KERNELS_MAY_IMPORT = ("jax", "jaxlib", "numpy")
OPTIONAL = (
  "tokenizers",
  "grain",
  "matplotlib",
  "torch",
  "transformers",
  "safetensors",
  "tensorboardX",
  "pyarrow",
  "datasets",
  "huggingface_hub",
  "lm_eval",
  "pynvml",
)
RUN_CODE = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "yaml")
# The config file that a user names on the command line is Python, and is run. Nothing else is.
RUNS_THE_CONFIG_FILE = ROOT / "sparse_lm" / "flags.py"


def files(layer):
  return sorted((ROOT / layer).rglob("*.py"))


def imports(source, package):
  """Yields the dotted name of everything that a source imports, wherever in it: `from a import b` gives a.b."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
      module = ".".join([*above, *([node.module] if node.module else [])])
      yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of_layer(layer):
  for path in files(layer):
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    for name in imports(path.read_text(), package):
      yield path.relative_to(ROOT), name


def below(name, roots):
  return any(name == root or name.startswith(root + ".") for root in roots)


def ways_to_run_data(source):
  """Yields what in a source can turn data into code."""
  for name in imports(source, "package"):
    if below(name, RUN_CODE):
      yield name
  for node in ast.walk(ast.parse(source)):
    if (
      isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec", "__import__")
    ):
      yield node.func.id
    if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
      yield "allow_pickle"


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_lies_below_it(layer):
  wrong = [(str(p), n) for p, n in imports_of_layer(layer) if below(n, LAYERS) and not below(n, MAY_IMPORT[layer])]
  assert wrong == [], f"{layer} may import {', '.join(MAY_IMPORT[layer])}"


def test_kernels_need_only_jax_and_numpy():
  known = (*sys.stdlib_module_names, *KERNELS_MAY_IMPORT, "pallas_kernels")
  assert [(str(p), n) for p, n in imports_of_layer("pallas_kernels") if not below(n, known)] == []


def test_nothing_imports_the_tests_or_a_layer_by_another_path():
  for layer in LAYERS:
    assert [(str(p), n) for p, n in imports_of_layer(layer) if below(n, ("tests", "conftest"))] == []


@pytest.mark.parametrize(
  ("source", "found"),
  [
    ("import a.b, c", ["a.b", "c"]),
    ("import a.b as c", ["a.b"]),
    ("from a import b", ["a.b"]),
    ("def f():\n  from a.b import c", ["a.b.c"]),
    ("from . import b", ["top.mid.b"]),
    ("from .b import c", ["top.mid.b.c"]),
    ("from ..b import c", ["top.b.c"]),
  ],
)
def test_the_check_sees_every_form_of_import(source, found):
  assert list(imports(source, "top.mid")) == found


def test_a_layer_does_not_match_a_name_that_only_starts_like_it():
  assert below("sparse_lm.config.LmConfig", MAY_IMPORT["configs"])
  assert not below("sparse_lm.config_io.fields", MAY_IMPORT["configs"])


@pytest.mark.parametrize("path", [p for layer in LAYERS for p in files(layer)], ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_read_from_disk_executes_code(path):
  expected = ["runpy"] if path == RUNS_THE_CONFIG_FILE else []
  assert list(ways_to_run_data(path.read_text())) == expected


@pytest.mark.parametrize(
  "source", ["import pickle", "from pickle import loads", "def f(x): return eval(x)", "np.load(p, allow_pickle=True)"]
)
def test_the_check_sees_every_way_to_run_data(source):
  assert len(list(ways_to_run_data(source))) == 1


@pytest.fixture(scope="module")
def loaded():
  """Names of all modules that importing the kernels, and then every module of the library, has loaded."""
  program = """
    import importlib, pathlib, sys
    for layer in ("pallas_kernels", "sparse_lm"):
      for path in sorted(pathlib.Path(layer).rglob("*.py")):
        importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
      print(*sys.modules)
  """
  command = [sys.executable, "-c", textwrap.dedent(program)]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stderr
  kernels, library = (set(line.split()) for line in result.stdout.splitlines())
  return {"pallas_kernels": kernels, "sparse_lm": library}


@pytest.mark.parametrize("package", ["pallas_kernels", "sparse_lm"])
def test_importing_does_not_load_what_is_needed_only_sometimes(loaded, package):
  assert loaded[package].isdisjoint(OPTIONAL)


def test_importing_the_kernels_loads_nothing_of_the_training_library(loaded):
  assert loaded["pallas_kernels"].isdisjoint({"flax", "optax", "orbax", "sparse_lm"})


def test_importing_does_not_load_the_kernels_compiler():
  """A second of every start, on machines most of which cannot run a kernel."""
  program = "import sys, sparse_lm.training.loop; print('jax.experimental.mosaic.gpu' in sys.modules)"
  result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
  assert result.stdout == "False\n"
