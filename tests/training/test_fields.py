"""No config field is silently ignored."""

import sys

from sparse_lm import config_io
from sparse_lm.training.loop import train


def test_a_run_with_everything_switched_on_reads_every_config_field(config, tmp_path, monkeypatch):
  """Reading a field to check it, to compare it or to write it down does not count."""
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
  assert fields.keys() - read == set()
