"""Configs as plain data: to and from a dict, field by field, checked against the annotations of the dataclasses.

A name is dotted from the top of the config: `model.num_layers`. The annotations understood are bool, int, float, str,
`X | None`, `Literal[...]` and `tuple[X, ...]`; anything else is a section, that is, a dataclass of its own.
"""

import contextlib
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparse_lm.errors import UserError

ABSENT = "(absent)"  # stands in `differences` for a field that one side does not have

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclasses.dataclass(frozen=True)
class Field:
  """One value of a config and where it is kept."""

  name: str  # dotted
  section: Any  # the dataclass instance that holds it
  annotation: Any

  @property
  def last(self) -> str:
    """The name within its section."""
    return self.name.rpartition(".")[2]

  @property
  def value(self) -> Any:
    """The present value."""
    return getattr(self.section, self.last)


def fields(config: Any, prefix: str = "") -> Iterator[Field]:
  """Yields every field that is not a section, in the order of declaration."""
  annotations = typing.get_type_hints(type(config))  # not field.type, which is a string under deferred annotations
  for name in (field.name for field in dataclasses.fields(config)):
    if dataclasses.is_dataclass(annotations[name]):
      yield from fields(getattr(config, name), f"{prefix}{name}.")
    else:
      yield Field(prefix + name, config, annotations[name])


def to_dict(config: Any) -> dict[str, Any]:
  """Returns nested dicts of what JSON knows, so that a dict from a file compares equal to one from memory."""
  return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict[ConfigT](config_class: type[ConfigT], values: Any, prefix: str = "") -> ConfigT:
  """Returns the config that `to_dict` was given; a field without a value keeps its default.

  Raises:
    UserError: for a field that the class does not have, or a value that its annotation does not allow.
  """
  if not isinstance(values, dict):
    raise UserError(f"{prefix.rstrip('.') or 'config'}={values!r} must be a section, that is, names with values")
  annotations = typing.get_type_hints(config_class)
  arguments: dict[str, Any] = {}
  for name, value in values.items():
    if name not in annotations:
      known = [field.name for field in fields(config_class(), prefix)]
      raise UserError(f"{prefix}{name} {unknown(prefix + name, known)}")
    annotation = annotations[name]
    if dataclasses.is_dataclass(annotation):
      arguments[name] = from_dict(typing.cast(type, annotation), value, f"{prefix}{name}.")
    else:
      arguments[name] = _typed(prefix + name, value, annotation)
  return config_class(**arguments)


def overlay[ConfigT](config: ConfigT, changes: Mapping[str, Any]) -> ConfigT:
  """Returns a copy with some fields changed, named from the top: `{"model.num_layers": 2}`.

  Raises:
    UserError: for a field that the config does not have, or a value that its annotation does not allow.
  """
  copy = from_dict(type(config), to_dict(config))
  known = {field.name: field for field in fields(copy)}
  for name, value in changes.items():
    if name not in known:
      raise UserError(f"{name} {unknown(name, list(known))}")
    setattr(known[name].section, known[name].last, _typed(name, value, known[name].annotation))
  return copy


def check_types(config: Any, prefix: str = "") -> None:
  """Raises UserError for an attribute that is no field, or a value of another type than its annotation.

  A config file is plain Python, so `config.model.num_layer = 8` makes a new attribute and goes unnoticed otherwise.
  """
  annotations = typing.get_type_hints(type(config))
  for name, value in vars(config).items():
    if name not in annotations:
      raise UserError(f"{prefix}{name} {unknown(prefix + name, [field.name for field in fields(config, prefix)])}")
    annotation = annotations[name]
    if not dataclasses.is_dataclass(annotation):
      setattr(config, name, _typed(prefix + name, value, annotation))
    elif type(value) is annotation:
      check_types(value, f"{prefix}{name}.")
    else:
      raise UserError(f"{prefix}{name}={value!r} must be a {typing.cast(type, annotation).__name__}")


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
  """Returns (dotted name, old value, new value) for every field in which two results of `to_dict` differ."""
  found: list[tuple[str, Any, Any]] = []
  for name in old | new:
    a, b = old.get(name, ABSENT), new.get(name, ABSENT)
    if isinstance(a, dict) and isinstance(b, dict):
      found += differences(a, b, f"{prefix}{name}.")
    elif a != b:
      found.append((prefix + name, a, b))
  return found


def convert(value: Any, annotation: Any) -> Any:
  """Returns the value in the type of its annotation; raises TypeError where that would change it."""
  kinds = _without_none(annotation)
  if value is None and kinds is not annotation:
    return None
  origin, arguments = typing.get_origin(kinds), typing.get_args(kinds)
  if origin is typing.Literal and any(value == one and type(value) is type(one) for one in arguments):
    return value
  if origin is tuple and isinstance(value, (list, tuple)):
    with contextlib.suppress(TypeError):  # the message below speaks of the whole list
      return tuple(convert(item, arguments[0]) for item in value)
  if kinds is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  # True is an int to Python, but never a number of layers.
  if kinds in _PLAIN and isinstance(value, kinds) and isinstance(value, bool) == (kinds is bool):
    return value
  raise TypeError(f"must be {describe(annotation)}")


def describe(annotation: Any) -> str:
  """Says in words which values an annotation allows."""
  kinds = _without_none(annotation)
  if kinds is not annotation:
    return f"{describe(kinds)} or None"
  if typing.get_origin(kinds) is typing.Literal:
    return "one of " + ", ".join(map(str, typing.get_args(kinds)))
  if typing.get_origin(kinds) is tuple:
    return f"a list, each item {describe(typing.get_args(kinds)[0])}"
  return _PLAIN[kinds]


def tuple_item(annotation: Any) -> Any:
  """Returns X for `tuple[X, ...]` and `tuple[X, ...] | None`, None for any other annotation."""
  kind = _without_none(annotation)
  return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def unknown(name: str, known: Sequence[str]) -> str:
  """Returns the rest of a sentence that starts with an unknown name: what was meant, and what its section has."""
  section = name.rpartition(".")[0]
  while section and not any(other.startswith(section + ".") for other in known):
    section = section.rpartition(".")[0]
  prefix = section + "." if section else ""
  siblings = dict.fromkeys(other.removeprefix(prefix).split(".")[0] for other in known if other.startswith(prefix))
  meant = nearest(name, known)
  hint = f"; did you mean {meant}?" if meant else ";"
  return f"is unknown{hint} {section or 'the config'} has {', '.join(siblings)}"


def nearest(name: str, known: Sequence[str]) -> str | None:
  """Returns the known name that a misspelt or misplaced one most likely stands for."""
  section, _, last = name.rpartition(".")
  in_other_sections = [other for other in known if other.rpartition(".")[2] == last.lstrip("-")]
  siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
  # A long section makes any two of its names look alike, so these are compared by their last part.
  misspelt = [siblings[other] for other in difflib.get_close_matches(last, siblings, n=1)]
  misspelt_section = [] if siblings else difflib.get_close_matches(name, known, n=1, cutoff=0.8)
  return next(iter(in_other_sections + misspelt + misspelt_section), None)


def _typed(name: str, value: Any, annotation: Any) -> Any:
  try:
    return convert(value, annotation)
  except TypeError as error:
    raise UserError(f"{name}={value!r} {error}") from None


def _without_none(annotation: Any) -> Any:
  """Returns X for `X | None`, and any other annotation as it is."""
  if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
    return annotation
  (kind,) = (kind for kind in typing.get_args(annotation) if kind is not type(None))
  return kind
