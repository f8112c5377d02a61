"""Configs as dicts: lossless there and back, nothing unknown or ill-typed accepted, differences by dotted name."""

import dataclasses
import json
from typing import Literal

import pytest

from sparse_lm import config_io
from sparse_lm.config import LmConfig
from sparse_lm.errors import UserError


@dataclasses.dataclass
class Inner:
  """A section with every kind of annotation."""

  widths: tuple[int, ...] = (1, 2)
  mode: Literal["fast", "exact"] = "exact"
  limit: float | None = None
  name: str | None = None


@dataclasses.dataclass
class Outer:
  """A config with one section."""

  inner: Inner = dataclasses.field(default_factory=Inner)
  rate: float = 0.1
  depth: int = 3
  quiet: bool = False


def test_a_config_survives_the_way_through_json():
  config = LmConfig()
  config.training.learning_rate, config.sparsity.target_l0, config.data.path = 0.1 + 0.2, 29.5, "a b.txt"
  config.sparsity.l1_coefficient = 1.28e-3
  assert config_io.from_dict(LmConfig, json.loads(json.dumps(config_io.to_dict(config)))) == config


def test_a_tuple_is_a_list_in_the_dict_and_a_tuple_again_in_the_config():
  values = config_io.to_dict(Outer())
  assert values["inner"]["widths"] == [1, 2]
  assert config_io.from_dict(Outer, values) == Outer()


def test_a_field_that_the_dict_lacks_keeps_its_default():
  assert config_io.from_dict(Outer, {"inner": {"name": "x"}}) == Outer(inner=Inner(name="x"))


def test_a_whole_number_in_a_float_field_becomes_a_float():
  rate = config_io.from_dict(Outer, {"rate": 2}).rate
  assert (rate, type(rate)) == (2.0, float)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    (
      {"inner": {"nam": "x"}},
      r"^inner\.nam is unknown; did you mean inner\.name\? inner has widths, mode, limit, name$",
    ),
    ({"dept": 4}, r"^dept is unknown; did you mean depth\? the config has inner, rate, depth, quiet$"),
    ({"limit": 4.0}, r"^limit is unknown; did you mean inner\.limit\?"),
    ({"zzz": 4}, r"^zzz is unknown; the config has inner"),
    ({"depth": 4.5}, r"^depth=4\.5 must be a whole number$"),
    ({"depth": True}, r"^depth=True must be a whole number$"),
    ({"depth": None}, r"^depth=None must be a whole number$"),
    ({"rate": "0.1"}, r"^rate='0\.1' must be a number$"),
    ({"rate": False}, r"^rate=False must be a number$"),
    ({"quiet": 1}, r"^quiet=1 must be true or false$"),
    ({"inner": 3}, r"^inner=3 must be a section, that is, names with values$"),
    ({"inner": {"widths": [1, 2.5]}}, r"^inner\.widths=\[1, 2\.5\] must be a list, each item a whole number$"),
    ({"inner": {"mode": "slow"}}, r"^inner\.mode='slow' must be one of fast, exact$"),
    ({"inner": {"limit": "x"}}, r"^inner\.limit='x' must be a number or None$"),
    ([], r"^config=\[\] must be a section"),
  ],
)
def test_from_dict_refuses_and_says_what_is_allowed(values, message):
  with pytest.raises(UserError, match=message):
    config_io.from_dict(Outer, values)


def test_an_attribute_that_is_no_field_is_refused():
  config = LmConfig()
  config.model.num_layer = 8
  with pytest.raises(UserError, match=r"model\.num_layer is unknown; did you mean model\.num_layers\?"):
    config_io.check_types(config)


def test_a_value_of_another_type_is_refused_and_a_whole_float_is_made_one():
  config = LmConfig()
  config.training.clip_norm = 1
  config_io.check_types(config)
  assert type(config.training.clip_norm) is float
  config.model.num_layers = 4.0
  with pytest.raises(UserError, match=r"model\.num_layers=4\.0 must be a whole number"):
    config_io.check_types(config)
  config = LmConfig(model={"num_layers": 4})
  with pytest.raises(UserError, match=r"model=\{'num_layers': 4\} must be a ModelConfig"):
    config_io.check_types(config)


def test_differences_name_fields_by_dots_with_both_values():
  old, new = LmConfig(), LmConfig()
  new.model.num_layers, new.sparsity.target_l0, new.seed = 8, 29.0, 1
  assert config_io.differences(config_io.to_dict(old), config_io.to_dict(new)) == [
    ("model.num_layers", 4, 8),
    ("sparsity.target_l0", None, 29.0),
    ("seed", 0, 1),
  ]
  assert config_io.differences(config_io.to_dict(old), config_io.to_dict(LmConfig())) == []


def test_a_field_or_section_of_one_side_only_differs_from_absent():
  assert config_io.differences({"a": 1, "s": {"b": None}}, {"s": {}, "t": {"c": 2}}) == [
    ("a", 1, config_io.ABSENT),
    ("s.b", None, config_io.ABSENT),
    ("t", config_io.ABSENT, {"c": 2}),
  ]


def test_an_overlay_changes_a_copy_and_only_the_named_fields():
  config = LmConfig()
  changed = config_io.overlay(config, {"model.num_layers": 2, "sparsity.target_l0": 29})
  assert config == LmConfig()
  assert config_io.differences(config_io.to_dict(config), config_io.to_dict(changed)) == [
    ("model.num_layers", 4, 2),
    ("sparsity.target_l0", None, 29.0),
  ]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model.num_layer": 2}, r"^model\.num_layer is unknown; did you mean model\.num_layers\? model has vocab_size"),
    ({"model": {}}, r"^model is unknown; the config has model, "),
    ({"model.num_layers": 2.5}, r"^model\.num_layers=2\.5 must be a whole number$"),
  ],
)
def test_an_overlay_of_an_unknown_field_or_another_type_is_refused(changes, message):
  with pytest.raises(UserError, match=message):
    config_io.overlay(LmConfig(), changes)
