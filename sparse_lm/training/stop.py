"""SIGTERM (a scheduler) and SIGINT (Ctrl-C) as a request to stop after the step in progress."""

import signal
from types import FrameType
from typing import Any


class StopSignal:
  """Listens while it is entered. A second signal acts as if nobody listened."""

  def __init__(self) -> None:
    self.requested: str | None = None  # name of the signal that came
    self._before: dict[int, Any] = {}

  def __enter__(self) -> "StopSignal":
    for number in (signal.SIGTERM, signal.SIGINT):
      self._before[number] = signal.signal(number, self._on_signal)
    return self

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    self.requested = signal.Signals(number).name
    signal.signal(number, self._before[number])

  def __exit__(self, *_) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)
