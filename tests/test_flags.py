"""The command line: every value arrives in its field's type, and every mistake is answered in one line."""

from __future__ import annotations  # annotations that are strings: ml_collections crashes on them

import dataclasses
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Literal

import pytest
from absl import flags

from sparse_lm import errors
from sparse_lm.config import LmConfig
from sparse_lm.errors import UserError
from sparse_lm.flags import as_flags, load_config, load_sweep, overrides, parse_config

ROOT = pathlib.Path(__file__).parent.parent
TINY = "configs/lm/tiny.py"


@dataclasses.dataclass
class Section:
  """Every kind of annotation."""

  width: int = 3
  rate: float = 0.5
  limit: float | None = 1.5
  name: str | None = "x"
  label: str = "y"
  quiet: bool = False
  loud: bool = True
  sizes: tuple[int, ...] = (1, 2)
  mode: Literal["fast", "exact"] = "exact"
  level: Literal[1, 2] = 2


@dataclasses.dataclass
class AllKinds:
  """A config that fits itself."""

  section: Section = dataclasses.field(default_factory=Section)

  def validate(self):
    """Accepts everything."""


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
  monkeypatch.chdir(ROOT)


def config_file(tmp_path, text, name="config.py"):
  path = tmp_path / name
  path.write_text(textwrap.dedent(text))
  return str(path)


def parse(*arguments, config_class=LmConfig, default=None):
  return parse_config(["program", *arguments], config_class, default, flags.FlagValues())


def parse_tiny(*arguments):
  return parse(f"--config={TINY}", *arguments)


def parse_all_kinds(tmp_path, *arguments):
  path = config_file(tmp_path, f"from {__name__} import AllKinds\ndef get_config():\n  return AllKinds()")
  return parse(f"--config={path}", *arguments, config_class=AllKinds).section


def message(call, *arguments):
  with pytest.raises(UserError) as caught:
    call(*arguments)
  assert "\n" not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize(
  ("argument", "value"),
  [
    ("width=7", 7),
    ("width=1_000", 1000),
    ("width=-2", -2),
    ("width=1", 1),
    ("rate=3e-4", 3e-4),
    ("rate=2", 2.0),
    ("rate=1", 1.0),
    ("limit=None", None),
    ("limit=none", None),
    ("limit=4", 4.0),
    ("name=None", None),
    ("name=a=b", "a=b"),
    ("name=", ""),
    ("name=7", "7"),
    ("label=None", "None"),
    ("label=true", "true"),
    ("quiet=true", True),
    ("quiet=1", True),
    ("quiet", True),
    ("loud=False", False),
    ("loud=0", False),
    ("sizes=4,5,6", (4, 5, 6)),
    ("sizes=(4, 5)", (4, 5)),
    ("sizes=7", (7,)),
    ("sizes=()", ()),
    ("mode=fast", "fast"),
    ("level=1", 1),
  ],
)
def test_a_value_arrives_in_the_type_of_its_field(tmp_path, argument, value):
  section = parse_all_kinds(tmp_path, f"--config.section.{argument}")
  found = getattr(section, argument.split("=")[0])
  assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
  ("argument", "allowed"),
  [
    ("width=abc", "a whole number"),
    ("width=4.5", "a whole number"),
    ("width=4.0", "a whole number"),
    ("width=1e3", "a whole number"),
    ("width=true", "a whole number"),
    ("width=None", "a whole number"),
    ("width=", "a whole number"),
    ("rate=fast", "a number"),
    ("limit=maybe", "a number or None"),
    ("quiet=maybe", "true or false"),
    ("quiet=2", "true or false"),
    ("sizes=1,2.5", "a list, each item a whole number"),
    ("mode=slow", "one of fast, exact"),
    ("level=3", "one of 1, 2"),
  ],
)
def test_an_ill_typed_value_is_refused_with_what_is_allowed(tmp_path, argument, allowed):
  said = message(parse_all_kinds, tmp_path, f"--config.section.{argument}")
  assert said == f"flag --config.section.{argument}: must be {allowed}"


def test_no_negates_a_bool_and_only_a_bool():
  assert parse_tiny("--noconfig.model.tie_embeddings").model.tie_embeddings is False
  assert message(parse_tiny, "--noconfig.model.num_layers") == (
    "--noconfig.model.num_layers: only fields of type bool take --no; config.model.num_layers is int = 3"
  )
  assert "does not take an argument" in message(parse_tiny, "--noconfig.model.tie_embeddings=true")


def test_a_value_may_follow_a_space_and_flags_come_in_any_order():
  config = parse("--config.model.num_layers", "7", "--config", TINY, "--config.training.learning_rate", "1e-2")
  assert (config.model.num_layers, config.training.learning_rate) == (7, 1e-2)


def test_the_last_of_repeated_values_wins():
  assert parse_tiny("--config.seed=1", "--config.seed=2").seed == 2
  assert parse("--config=configs/lm/small.py", f"--config={TINY}").model.model_width == parse_tiny().model.model_width


def test_fields_that_are_not_given_keep_the_values_of_the_file():
  assert parse("--config=configs/lm/small.py", "--config.seed=3").model == parse("--config=configs/lm/small.py").model


def test_the_default_file_is_read_only_where_no_other_is_given(tmp_path):
  assert parse(default=TINY) == parse_tiny()
  assert parse(f"--config={TINY}", default=str(tmp_path / "missing.py")) == parse_tiny()


def test_text_after_a_colon_goes_to_get_config(tmp_path):
  path = config_file(
    tmp_path,
    """
    from sparse_lm.config import LmConfig
    def get_config(text):
      return LmConfig(seed=len(text))
    """,
  )
  assert parse(f"--config={path}:a:bc").seed == 4


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (
      "--config.model.num_layer=4",
      r"^--config\.model\.num_layer is unknown; did you mean --config\.model\.num_layers\?",
    ),
    ("--config.model.num_layer=4", r"--config\.model has vocab_size, context_length, num_layers, "),
    ("--config.num_layers=4", r"^--config\.num_layers is unknown; did you mean --config\.model\.num_layers\?"),
    (
      "--config.modle.num_heads=4",
      r"^--config\.modle\.num_heads is unknown; did you mean --config\.model\.num_heads\?",
    ),
    ("--config.sede=4", r"did you mean --config\.seed\? --config has model, precision, sparsity, .*, seed$"),
    ("--config.model.zzz=4", r"^--config\.model\.zzz is unknown; --config\.model has vocab_size"),
    ("--config.parallel.zzz=4", r"^--config\.parallel\.zzz is unknown; --config\.parallel has data, fsdp"),
    ("--config.seed.x=4", r"^--config\.seed\.x is unknown; did you mean --config\.seed\? --config has model"),
    ("--config.model=3", r"^--config\.model is a section; set its fields, such as --config\.model\.vocab_size="),
    ("--noconfig.model", r"^--noconfig\.model is a section"),
    ("--num_layers=4", r"^--num_layers is no flag of this program; did you mean --config\.model\.num_layers\?$"),
    ("--qqqq=4", r"^--qqqq is no flag of this program; --help lists them$"),
    ("--config.seed", r"^Missing value for flag --config\.seed$"),
    ("--config.data.path --config.seed=4", r"^flag --config\.data\.path=--config\.seed=4: .* is the value missing\?$"),
    ("surplus", r"^'surplus' is not a flag"),
    ("--config.data.document_mask false", r"^'false' is not a flag; write --name=value, and true or false without a"),
    ("--config.training.learning_rate=nan", r"^training\.learning_rate=nan must be positive$"),
    ("--config.training.clip_norm=inf", r"^training\.clip_norm=inf must be positive$"),
    ("--config.model.num_heads=3", r"^model\.model_width=128 is not divisible by model\.num_heads=3"),
  ],
)
def test_a_wrong_flag_is_answered_with_the_nearest_right_one(arguments, said):
  with pytest.raises(UserError, match=said):
    parse_tiny(*arguments.split())


def test_an_unknown_flag_of_the_program_gets_a_suggestion_too():
  values = flags.FlagValues()
  flags.DEFINE_string("workdir", None, "", values)
  with pytest.raises(UserError, match=r"^--wrokdir is no flag of this program; did you mean --workdir\?$"):
    parse_config(["program", f"--config={TINY}", "--wrokdir=x"], LmConfig, None, values)


def test_a_missing_config_flag_is_named():
  assert message(parse) == "--config is missing; name a config file, such as --config=configs/lm/tiny.py"
  assert message(parse, "--config") == "Missing value for flag --config"


@pytest.mark.parametrize(
  ("path", "said"),
  [
    ("configs/lm/tinny.py", "no such file; did you mean configs/lm/tiny.py?"),
    ("configs/lm/zzzzzzz.py", "no such file"),
    ("confgs/lm/tiny.py", "there is no folder confgs/lm"),
    ("configs/lm", "this is a folder, not a Python file"),
    ("configs/lm/paper.py", "defines no get_config()"),
    ("Makefile", "line 2: SyntaxError: invalid syntax"),
    ("configs/lm/tiny.py:x", "its get_config() takes no name after a colon; write --config=configs/lm/tiny.py"),
    ("configs/lm/tiny.py:", "its get_config() takes no name after a colon; write --config=configs/lm/tiny.py"),
  ],
)
def test_a_path_that_is_no_config_file_is_refused(path, said):
  assert message(parse, f"--config={path}") == f"--config={path}: {said}"


@pytest.mark.parametrize(
  ("body", "said"),
  [
    ("return 3", "get_config() returned int, this program needs LmConfig"),
    ("pass", "get_config() returned NoneType, this program needs LmConfig"),
    ("raise ValueError('bad news')", "line 5: ValueError: bad news"),
    ("raise TypeError('bad news')", "line 5: TypeError: bad news"),
    ("raise RuntimeError('bad news')", "line 5: RuntimeError: bad news"),
    ("return unheard_of", "line 5: NameError: name 'unheard_of' is not defined"),
    (
      "return open('/nowhere/at/all')",
      "line 5: FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/at/all'",
    ),
    ("import unheard_of", "line 5: ModuleNotFoundError: No module named 'unheard_of'"),
    ("return 1 +", "line 5: SyntaxError: invalid syntax"),
    ("return LmConfig(sed=1)", "line 5: TypeError: LmConfig.__init__() got an unexpected keyword argument 'sed'"),
    ("raise UserError('need eight GPUs')", "need eight GPUs"),
  ],
)
def test_a_failing_config_file_is_reported_with_its_line(tmp_path, body, said):
  path = config_file(
    tmp_path,
    f"from sparse_lm.config import LmConfig\nfrom sparse_lm.errors import UserError\n\ndef get_config():\n  {body}\n",
  )
  assert message(parse, f"--config={path}") == f"--config={path}: {said}"


@pytest.mark.parametrize(
  ("line", "said"),
  [
    ("config.model.num_layer = 8", "model.num_layer is unknown; did you mean model.num_layers?"),
    ("config.model.num_layers = '8'", "model.num_layers='8' must be a whole number"),
  ],
)
def test_a_config_file_that_misspells_or_mistypes_a_field_is_refused(tmp_path, line, said):
  lines = [
    "from sparse_lm.config import LmConfig",
    "def get_config():",
    "  config = LmConfig()",
    f"  {line}",
    "  return config",
  ]
  path = config_file(tmp_path, "\n".join(lines))
  assert message(parse, f"--config={path}").startswith(f"--config={path}: {said}")


def test_a_config_file_that_changes_within_a_second_is_read_anew(tmp_path):
  text = "from sparse_lm.config import LmConfig\ndef get_config():\n  return LmConfig(seed={})\n"
  for seed in (4, 8):
    path = config_file(tmp_path, text.format(seed))
    os.utime(path, (1e9, 1e9))  # size and time of both versions are equal
    assert load_config(path, LmConfig).seed == seed


@pytest.mark.parametrize(
  ("body", "said"),
  [
    ("return [1]", "get_sweep() returned list, this program needs dict"),
    ("return {'a': {}, 'b': {}, 'a': {'seed': 1}}", "the dict in line 2 has 'a' twice; give each a name of its own"),
    ("return {'a': {'seed': 1, 'seed': 2}}", "the dict in line 2 has 'seed' twice; give each a name of its own"),
    ("raise ValueError('bad news')", "line 2: ValueError: bad news"),
    ("return {", "line 2: SyntaxError: '{' was never closed"),
  ],
)
def test_a_failing_sweep_file_is_refused_as_a_config_file_is(tmp_path, body, said):
  path = config_file(tmp_path, f"def get_sweep():\n  {body}\n")
  assert message(load_sweep, path) == f"--sweep={path}: {said}"


def test_a_config_file_is_no_sweep_file_and_the_other_way_round(tmp_path):
  assert message(load_sweep, TINY) == f"--sweep={TINY}: defines no get_sweep()"
  assert message(load_sweep, "configs/sweeps/tabel3.py").endswith("did you mean configs/sweeps/table3.py?")
  path = config_file(tmp_path, "def get_sweep():\n  return {}\n")
  assert message(load_config, path, LmConfig) == f"--config={path}: defines no get_config()"


def test_a_sweep_file_takes_a_text_and_its_dicts_may_repeat_keys_of_one_another(tmp_path):
  text = "def get_sweep(text):\n  return {text: {'seed': 1}, 'b': {'seed': 1, **{'seed': 2}}}\n"
  assert load_sweep(f"{config_file(tmp_path, text)}:a:b") == {"a:b": {"seed": 1}, "b": {"seed": 2}}


def test_overrides_are_the_fields_on_the_command_line_also_where_they_change_nothing():
  values = flags.FlagValues()
  flags.DEFINE_string("workdir", None, "", values)
  arguments = ["--config.seed=0", "--workdir=x", "--noconfig.model.tie_embeddings"]
  config = parse_config(["program", f"--config={TINY}", *arguments], LmConfig, None, values)
  assert set(overrides(values)) == {"seed", "model.tie_embeddings"}
  assert config.seed == 0


@pytest.mark.parametrize(
  "changes",
  [
    {"width": -7, "rate": 1e-30, "limit": None, "name": None, "label": "", "quiet": True, "loud": False},
    {"sizes": (), "mode": "fast", "level": 1, "name": "a b'\"$x,=--c", "label": "none", "rate": 0.1 + 0.2},
    {"sizes": (3,), "label": "1", "name": "true", "limit": 1e300, "rate": 2.0},
    {"sizes": (3, -4, 5), "label": "größe"},
  ],
)
def test_as_flags_gives_every_kind_of_value_back(tmp_path, changes):
  config = AllKinds(Section(**changes))
  arguments = as_flags(config, [f"section.{name}" for name in changes])
  assert len(arguments) == len(changes)
  assert parse_all_kinds(tmp_path, *arguments) == config.section


@pytest.mark.parametrize("value", ["none", "None", "--config.seed=1"])
def test_a_value_that_no_flag_can_give_is_refused(value):
  said = message(as_flags, AllKinds(Section(name=value)), ["section.name"])
  assert said == f"section.name={value!r} cannot be given on a command line; choose another value"


PROGRAM = """
  '''A program.'''
  import errno
  from absl import flags
  from sparse_lm import errors
  from sparse_lm.config import LmConfig
  from sparse_lm.flags import run_with_config

  flags.DEFINE_string("workdir", None, "folder of the run", required=True)

  def main(config):
    if not NNX_IN_TREE_MODE: raise AssertionError
    {body}

  if __name__ == "__main__":
    run_with_config(main, LmConfig)
"""

WITHOUT_CONFIG = """
  from absl import flags
  from sparse_lm.flags import run

  workdir = flags.DEFINE_string("workdir", None, "folder of the run")

  if __name__ == "__main__":
    run(lambda argv: print(argv[1:], workdir.value))
"""


@pytest.fixture
def program(tmp_path):
  """Returns a function that runs a program around a body of main; a stand-in for flax saves seconds each time."""
  (tmp_path / "flax").mkdir()
  (tmp_path / "flax" / "__init__.py").touch()
  (tmp_path / "flax" / "nnx.py").write_text(
    textwrap.dedent("""
      import builtins
      settings = {}
      def set_graph_mode(value): settings["mode"] = value
      def set_graph_updates(value):
        settings["updates"] = value
        builtins.NNX_IN_TREE_MODE = settings == {"mode": False, "updates": False}
    """)
  )

  def run_program(body, *more, program_text=PROGRAM, arguments=(f"--config={TINY}", "--workdir=x")):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program_text).format(body=body))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, str(path), *arguments, *more]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

  return run_program


@pytest.mark.parametrize(
  ("body", "code", "said"),
  [
    ("raise errors.UserError('no\\nluck')", errors.EXIT_USER_ERROR, "error: no luck\n"),
    ("raise errors.NonFiniteError('NaN at step 3')", errors.EXIT_NONFINITE, "error: NaN at step 3\n"),
    ("raise errors.Preempted('saved step 3')", errors.EXIT_PREEMPTED, "error: saved step 3\n"),
    ("raise KeyboardInterrupt", 130, "error: interrupted\n"),
    (
      "raise OSError(errno.EROFS, 'Read-only file system', 'x/y')",
      errors.EXIT_USER_ERROR,
      "error: Read-only file system: x/y\n",
    ),
    ("open('/dev/full', 'w').write('x' * 99999)", errors.EXIT_SAVE_FAILED, "error: No space left on device\n"),
    ("return 7", 7, ""),
    ("print(config.model.num_layers)", 0, ""),
  ],
)
def test_a_program_exits_with_one_line_and_the_code_of_its_error(program, body, code, said):
  result = program(body)
  assert (result.returncode, result.stderr) == (code, said)


@pytest.mark.parametrize(
  ("config_class", "advice"),
  [
    (
      "LmConfig",
      ", or raise training.accumulation_steps or set model.remat, or share the weights over more devices with"
      " parallel.fsdp",
    ),
    ("RecsysConfig", ", or lower data.longest, or set model.recompute (gem alone)"),
    ("NextItemConfig", ", or lower data.longest"),
    (None, ""),
  ],
)
def test_out_of_memory_is_answered_with_fields_that_the_config_has(program, tmp_path, config_class, advice):
  text = """
    from sparse_lm.config import LmConfig
    from sparse_lm.flags import run, run_with_config
    from sparse_lm.next_item_config import NextItemConfig
    from sparse_lm.recsys_config import RecsysConfig

    get_config = {body}
    def main(config): raise RuntimeError("RESOURCE_EXHAUSTED: 3 GiB")
    if __name__ == "__main__":
      run(main) if {body} is None else run_with_config(main, {body}, builds_models=False)
  """
  arguments = [] if config_class is None else [f"--config={tmp_path}/program.py"]
  result = program(config_class, program_text=text, arguments=arguments)
  assert (result.returncode, result.stderr) == (
    errors.EXIT_USER_ERROR,
    f"error: out of memory (RESOURCE_EXHAUSTED: 3 GiB); make the batch or the model smaller{advice}\n",
  )


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_a_flag_of_a_program_takes_finite_numbers_alone(value):
  values = flags.FlagValues()
  flags.DEFINE_float("rate", 1.0, "a number without bounds", flag_values=values)
  said = message(parse_config, ["program", f"--config={TINY}", f"--rate={value}"], LmConfig, None, values)
  assert said == f"--rate={float(value)} is no finite number; give one, or leave the flag out"


def test_a_program_without_a_config_gets_the_arguments_that_are_no_flags(program):
  result = program("", program_text=WITHOUT_CONFIG, arguments=["a", "--workdir=x", "b"])
  assert (result.returncode, result.stdout, result.stderr) == (0, "['a', 'b'] x\n", "")


def test_a_program_that_builds_no_model_does_not_import_flax(program):
  text = PROGRAM.replace("LmConfig)\n", "LmConfig, builds_models=False)\n").replace("if not NNX_IN_TREE_MODE", "if 0")
  result = program("import sys; print('flax' in sys.modules)", program_text=text)
  assert (result.returncode, result.stdout, result.stderr) == (0, "False\n", "")


def test_a_fault_of_ours_keeps_its_traceback(program):
  result = program("raise KeyError('fault')")
  assert result.returncode == 1
  assert "Traceback" in result.stderr
  assert "KeyError: 'fault'" in result.stderr


def test_libraries_are_quiet_unless_verbosity_is_asked_for(program):
  body = "from absl import logging; logging.info('a detail'); logging.error('an error that is raised too')"
  quiet, verbose = program(body), program(body, "--verbosity=0")
  assert ("a detail" in quiet.stderr, "an error" in quiet.stderr) == (False, False)
  assert ("a detail" in verbose.stderr, "an error" in verbose.stderr) == (True, True)


def test_a_wrong_flag_is_one_line_and_main_does_not_run(program):
  result = program("print('ran')", "--config.model.num_layers=abc")
  assert (result.returncode, result.stdout) == (errors.EXIT_USER_ERROR, "")
  assert result.stderr == "error: flag --config.model.num_layers=abc: must be a whole number\n"


def test_a_required_flag_that_is_missing_is_named(program):
  result = program("print('ran')", "--workdir", "")
  assert result.returncode == 0  # an empty text is a value; only None is missing
  assert "workdir" in message(
    lambda: parse_config(["program", f"--config={TINY}"], LmConfig, None, _with_required_workdir())
  )


def _with_required_workdir():
  values = flags.FlagValues()
  flags.DEFINE_string("workdir", None, "", values, required=True)
  return values


def test_help_lists_each_field_with_type_default_and_comment(program):
  result = program("print('ran')", "--help")
  assert (result.returncode, result.stderr) == (0, "")
  assert "ran" not in result.stdout.splitlines()
  assert "--config.checkpoint.every: int = 150  # steps; the last step is" in result.stdout
  assert "--[no]config.model.tie_embeddings: bool = True" in result.stdout
  assert "--config.sparsity.target_l0: float | None = None  # mean non-zeros" in result.stdout
  assert "--workdir: folder of the run" in result.stdout
