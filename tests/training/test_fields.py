"""No config field is silently ignored."""

import sys

import pytest
from hub_folder import stream_from

from sparse_lm import config_io
from sparse_lm.training.language_model import train


@pytest.mark.slow
def test_runs_with_everything_switched_on_read_every_config_field(config, tmp_path, monkeypatch):
  """One on a corpus, one on a stream. Reading a field to check it, to compare it or to write it down does not count."""
  fields = {field.name: field for field in config_io.fields(config)}
  read = set()

  def spy(cls, prefix):
    plain = cls.__getattribute__

    def get(self, name):
      caller = sys._getframe(1)
      checks = caller.f_code.co_name.startswith(("validate", "_require"))
      writes = caller.f_globals["__name__"] in ("dataclasses", "copy", config_io.__name__)
      if not checks and not writes:
        read.add(prefix + name)
      return plain(self, name)

    monkeypatch.setattr(cls, "__getattribute__", get)

  for cls, prefix in {type(field.section): field.name.removesuffix(field.last) for field in fields.values()}.items():
    spy(cls, prefix)
  train(config_io.overlay(config, {"training.tensorboard": True}), tmp_path / "run")
  assert {name.removeprefix("data.") for name in fields.keys() - read} == {
    "hub_subset",
    "hub_split",
    "hub_revision",
    "validation_documents",
  }
  short = {"training.steps": 1, "training.warmup_steps": 0, "checkpoint.restore_path": None}
  train(config_io.overlay(config, stream_from(tmp_path) | short), tmp_path / "stream")
  assert fields.keys() - read == set()
