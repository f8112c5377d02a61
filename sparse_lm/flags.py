"""Entry points: `--config=configs/lm/tiny.py --config.model.num_layers=4 --workdir=...`, and errors of one line.

The command line is that of ml_collections' config_flags; it is not used itself, because (in 1.1.0) its overrides turn
None into the text "None", cannot set a number back to None, take 2.5 for an integer in a tuple and answer a misspelt
name with a traceback, and its reader hides errors and mixes two files read in one process. Here every field of the
config becomes an absl flag, typed by its annotation: absl gives us `--name=value` and `--name value`, `--noname` for
bools, "the last one wins", and `--help`.
"""

import ast
import contextlib
import difflib
import errno
import functools
import inspect
import io
import math
import os
import pathlib
import runpy
import signal
import sys
import tokenize
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

from absl import app, flags, logging

from sparse_lm import config_io
from sparse_lm.errors import EXIT_PREEMPTED, EXIT_SAVE_FAILED, EXIT_USER_ERROR, UserError, first_line

EXIT_BROKEN_PIPE = 141  # as a shell reports it
EXIT_INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_SAVES_MEMORY = {  # by a field of the configs that it is for
  "model.remat": "raise training.accumulation_steps or set model.remat",
  "parallel.fsdp": "share the weights over more devices with parallel.fsdp",
  "data.longest": "lower data.longest",
  "model.recompute": "set model.recompute (gem alone)",
}


class Config(Protocol):
  """A dataclass that a config file may return."""

  def validate(self) -> None:
    """Raises UserError for values that do not fit together."""


def run(main: Callable[[list[str]], int | None]) -> None:
  """Runs `main(argv)` under absl and exits with what it returns; what the user can mend is said in one line."""
  _run(_in_tree_mode(main), _parse_flags)


def run_with_config[ConfigT: Config](
  main: Callable[[ConfigT], int | None],
  config_class: type[ConfigT] | tuple[type[ConfigT], ...],
  default: str | None = None,
  *,
  builds_models: bool = True,
) -> None:
  """As `run`, but calls `main(config)` with the validated config of the command line.

  Args:
    main: its flags other than the config's are ordinary absl flags.
    config_class: what `get_config()` of a config file returns, or several such classes; `validate()` raises UserError.
    default: the config file where none is given; with None, `--config` is obligatory.
    builds_models: False spares a program that only reads configs the seconds that importing flax takes.
  """
  parsed: list[ConfigT] = []

  def parse(argv: list[str]) -> list[str]:
    parsed.append(parse_config(argv, config_class, default))
    return argv[:1]

  start = lambda argv: main(parsed[-1])
  _run(_in_tree_mode(start) if builds_models else start, parse)


def parse_config[ConfigT: Config](
  argv: list[str],
  config_class: type[ConfigT] | tuple[type[ConfigT], ...],
  default: str | None = None,
  flag_values: flags.FlagValues = flags.FLAGS,
) -> ConfigT:
  """Defines the config's flags, parses all flags, and returns the validated config. argv[0] is the program."""
  path = _config_argument(argv, default)
  fallback = config_class[0] if isinstance(config_class, tuple) else config_class
  config = fallback() if path is None else load_config(path, config_class)
  # The file is read by now; this flag stands for it in `--help`.
  program = sys.argv[0]
  flags.DEFINE_string("config", default, "config file, see configs/", flag_values, module_name=program)
  fields = {f"config.{field.name}": field for field in config_io.fields(config)}
  for name, field in fields.items():
    flags.DEFINE_flag(_field_flag(name, field), flag_values, program)

  positional = _parse_flags(argv, flag_values)[1:]
  if positional:
    raise UserError(f"{positional[0]!r} is not a flag; write --name=value, and true or false without a space")
  if path is None:
    raise UserError("--config is missing; name a config file, such as --config=configs/lm/tiny.py")
  for name, field in fields.items():
    if not flag_values[name].using_default_value:
      setattr(field.section, field.last, flag_values[name].value)
  config.validate()
  return config


def load_config[ConfigT: Config](path: str, config_class: type[ConfigT] | tuple[type[ConfigT], ...]) -> ConfigT:
  """Returns what `get_config()` of a Python file returns, not validated yet; `file.py:text` calls `get_config("text")`.

  Raises:
    UserError: if there is no such file, it fails, or it returns something else than a well-typed `config_class`.
  """
  config = _ask_file("--config", path, "get_config", config_class)
  try:
    config_io.check_types(config)
  except UserError as error:
    raise UserError(f"--config={path}: {error}") from None
  return config


def load_sweep(path: str) -> dict[str, dict[str, Any]]:
  """Returns what `get_sweep()` of a Python file returns: run names and overlays, for `sweeps.configs` to check.

  Raises:
    UserError: if there is no such file, it fails, it returns no dict, or a dict in it holds a key twice.
  """
  sweep = _ask_file("--sweep", path, "get_sweep", dict)
  for node in ast.walk(ast.parse(pathlib.Path(path.partition(":")[0]).read_bytes())):
    if isinstance(node, ast.Dict):  # Python keeps the last of two equal keys, and says nothing
      keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
      for key in keys:
        if keys.count(key) > 1:
          raise UserError(
            f"--sweep={path}: the dict in line {node.lineno} has {key!r} twice; give each a name of its own"
          )
  return sweep


def overrides(flag_values: flags.FlagValues = flags.FLAGS) -> list[str]:
  """Returns the names of the config's fields that the command line sets."""
  names = [name for name in flag_values if name.startswith("config.")]
  return [name.removeprefix("config.") for name in names if not flag_values[name].using_default_value]


def as_flags(config: Config, names: Collection[str]) -> list[str]:
  """Returns the flags that set these fields to the values that they have in a config.

  Raises:
    UserError: for a value that no flag can give, such as the text "none" where None is allowed.
  """
  arguments = []
  for field in config_io.fields(config):
    if field.name in names:
      text = ",".join(map(str, field.value)) if isinstance(field.value, tuple) else str(field.value)
      with contextlib.suppress(ValueError):
        if _FieldParser(field.annotation).parse(text) == field.value:
          arguments.append(f"--config.{field.name}={text}")
          continue
      raise UserError(f"{field.name}={field.value!r} cannot be given on a command line; choose another value")
  return arguments


def _ask_file[T](flag: str, path: str, function: str, kind: type[T] | tuple[type[T], ...]) -> T:
  """Runs a Python file and returns what a function of it returns, which has to be of that type, or of one of them."""
  filename, *argument = path.split(":", 1)
  if not os.path.isfile(filename):
    raise UserError(f"{flag}={path}: {_why_no_file(pathlib.Path(filename))}")
  try:
    ask = runpy.run_path(filename)[function]
    if argument and not inspect.signature(ask).parameters:
      raise UserError(f"its {function}() takes no name after a colon; write {flag}={filename}")
    value = ask(*argument)
  except (Exception, SystemExit) as error:  # such a file is a program and can fail in any way
    raise UserError(f"{flag}={path}: {_failure_of_file(error, filename, function)}") from error
  if not isinstance(value, kind):
    kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
    raise UserError(f"{flag}={path}: {function}() returned {type(value).__name__}, this program needs {kinds}")
  return value


def _in_tree_mode(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], int | None]:
  def main_in_tree_mode(argv: list[str]) -> int | None:
    from flax import nnx  # seconds to import: a wrong flag is reported before

    nnx.set_graph_mode(False)
    nnx.set_graph_updates(False)
    return main(argv)

  return main_in_tree_mode


def _run(main: Callable[[list[str]], int | None], parse: Callable[[list[str]], list[str]]) -> None:
  def parse_with_quiet_default(argv: list[str]) -> list[str]:
    arguments = parse(argv)
    # Orbax says a page for every checkpoint, and shows a traceback for an error that it raises as well. Set here, for
    # absl puts INFO next where no --verbosity was given.
    if flags.FLAGS["verbosity"].using_default_value:
      logging.set_verbosity(logging.FATAL)
    return arguments

  # Before a program listens for itself, and if a second signal comes while it saves. SystemExit passes every `except`.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_PREEMPTED))
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors="backslashreplace")  # a path may hold what the terminal's encoding does not
  with _errors_in_one_line():
    app.run(main, flags_parser=parse_with_quiet_default)


@contextlib.contextmanager
def _errors_in_one_line() -> Iterator[None]:
  try:
    yield
  except UserError as error:
    _leave(str(error), error.exit_code)
  except SystemExit as leaving:
    if leaving.code != EXIT_PREEMPTED:
      raise
    _leave(
      "stopped by SIGTERM at once; the same command goes on from the last checkpoint, if there is one", leaving.code
    )
  except KeyboardInterrupt:
    _leave("interrupted", EXIT_INTERRUPTED)
  except (MemoryError, RuntimeError) as error:
    if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):  # so JAX says it
      raise
    # Not accumulation_steps by its own name: every config has it, only a language model takes more than 1.
    advice = [text for field, text in _SAVES_MEMORY.items() if f"config.{field}" in flags.FLAGS]
    what_to_do = ", or ".join(["make the batch or the model smaller", *advice])
    _leave(f"out of memory ({first_line(error)}); {what_to_do}", EXIT_USER_ERROR)
  except BrokenPipeError:  # the reader of our output has left (`| head`)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(EXIT_BROKEN_PIPE) from None
  except OSError as error:
    if error.errno not in _NOT_ALLOWED + _DISK_FULL:
      raise
    where = f": {error.filename}" if error.filename else ""
    _leave(f"{error.strerror}{where}", EXIT_SAVE_FAILED if error.errno in _DISK_FULL else EXIT_USER_ERROR)


def _leave(message: str, exit_code: int) -> None:
  print("error:", " ".join(message.split("\n")), file=sys.stderr)
  raise SystemExit(exit_code) from None


def _parse_flags(argv: list[str], flag_values: flags.FlagValues = flags.FLAGS) -> list[str]:
  """Returns the arguments that are no flags, argv[0] first."""
  try:
    rest = flag_values(argv)
    for name in flag_values:
      value = flag_values[name].value  # absl's bounds let NaN through, and infinity where there is none above
      if isinstance(value, float) and not math.isfinite(value) and not name.startswith("config."):
        raise UserError(f"--{name}={value} is no finite number; give one, or leave the flag out")
    return rest
  except SystemExit:
    raise SystemExit(0) from None  # --help was asked for and given; absl would leave with 1
  except flags.UnrecognizedFlagError as error:
    raise UserError(_unknown_flag(error.flagname, flag_values)) from None
  except (flags.Error, ValueError) as error:
    raise UserError(str(error)) from None


def _config_argument(argv: list[str], default: str | None) -> str | None:
  """Returns the last value of `--config`, in either spelling, wherever it stands."""
  only_config = flags.FlagValues()
  flags.DEFINE_string("config", default, "", only_config)
  try:
    only_config(argv, known_only=True)
  except flags.Error as error:
    raise UserError(str(error)) from None
  return only_config.config


class _FieldParser(flags.ArgumentParser):
  """Reads the text of a flag as its field's annotation says; absl puts the flag's name and value before our error."""

  def __init__(self, annotation: Any):
    self.annotation = annotation

  def parse(self, argument: str) -> Any:
    if argument.startswith("--"):
      raise ValueError("this looks like the next flag; is the value missing?")
    try:
      return _from_text(argument, self.annotation)
    except TypeError as error:
      raise ValueError(error) from None


def _from_text(text: str, annotation: Any) -> Any:
  item = config_io.tuple_item(annotation)
  if item is not None and text.lower() != "none":
    with contextlib.suppress(TypeError):  # the message below speaks of the whole list
      return tuple(_from_text(part.strip(), item) for part in text.strip("()").split(",") if part.strip())
  for meaning in _meanings(text):
    with contextlib.suppress(TypeError):
      return config_io.convert(meaning, annotation)
  raise TypeError(f"must be {config_io.describe(annotation)}")


def _meanings(text: str) -> Iterator[Any]:
  """Yields all that a text can mean, itself last; of these the annotation takes the first that it allows."""
  words = {"none": None, "true": True, "false": False, "1": True, "0": False}  # 1 and 0 as in absl
  if text.lower() in words:
    yield words[text.lower()]
  for number in (int, float):
    with contextlib.suppress(ValueError):
      yield number(text)
  yield text


def _field_flag(name: str, field: config_io.Field) -> flags.Flag:
  comment = _comments(type(field.section)).get(field.last)  # type: ignore[arg-type]  # mypy holds classes unhashable
  meaning = f"{inspect.formatannotation(field.annotation)} = {field.value!r}"
  flag = flags.Flag(_FieldParser(field.annotation), None, name, None, f"{meaning}  # {comment}" if comment else meaning)
  flag.boolean = field.annotation is bool
  return flag


@functools.cache
def _comments(section: type) -> dict[str, str]:
  """Returns the trailing comments in the source of a dataclass by field; nowhere else are the fields explained."""
  tokens = tokenize.generate_tokens(io.StringIO(inspect.getsource(section)).readline)
  return {t.line.partition(":")[0].strip(): t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


def _unknown_flag(name: str, flag_values: flags.FlagValues) -> str:
  known = [f"--{other}" for other in flag_values]
  for section in (name, name.removeprefix("no")):
    inside = [other for other in known if other.startswith(f"--{section}.")]
    if inside:
      return f"--{name} is a section; set its fields, such as {inside[0]}=..."
  if name.startswith("noconfig.") and f"--{name[2:]}" in known:
    return f"--{name}: only fields of type bool take --no; {name[2:]} is {flag_values[name[2:]].help}"
  if name.startswith("config."):
    return f"--{name} {config_io.unknown('--' + name, [other for other in known if other.startswith('--config.')])}"
  nearest = config_io.nearest(f"--{name}", known)
  return f"--{name} is no flag of this program; {f'did you mean {nearest}?' if nearest else '--help lists them'}"


def _why_no_file(path: pathlib.Path) -> str:
  if os.path.isdir(path):
    return "this is a folder, not a Python file"
  if not os.path.isdir(path.parent):
    return f"there is no folder {path.parent}"
  nearest = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.py")], n=1)
  return f"no such file; did you mean {path.with_name(nearest[0])}?" if nearest else "no such file"


def _failure_of_file(error: BaseException, filename: str, function: str) -> str:
  """Says what went wrong in a config or sweep file, and in which of its lines."""
  if isinstance(error, KeyError) and error.args == (function,):
    return f"defines no {function}()"
  if isinstance(error, UserError):  # the file says itself what may be asked of it
    return str(error)
  lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == filename]
  if isinstance(error, SyntaxError):
    lines.append(error.lineno)
  where = f"line {lines[-1]}: " if lines else ""
  return f"{where}{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
