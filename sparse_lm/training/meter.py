"""Speed, memory and energy of training between two log entries."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from sparse_lm.training.energy import energy_counter
from sparse_lm.training.task import Task


class Meter:
  """Counts from `start` or the last `read`. Validation and saving do not count as training time."""

  def __init__(self, task: Task):
    self._task, self._device = task, task.mesh.devices.flat[0]
    self._joules = energy_counter()
    self.start(0)

  def start(self, step: int) -> None:
    """Begins an interval after `step` steps."""
    self._step, self._since, self._idle = step, time.perf_counter(), 0.0
    self._joules_at_start = self._joules() if self._joules else 0.0

  def read(self, step: int) -> dict[str, Any]:
    """What the interval up to `step` gave; begins the next one."""
    seconds = time.perf_counter() - self._since - self._idle
    steps = step - self._step
    units = steps * self._task.units_per_step
    entry: dict[str, Any] = {
      "seconds_per_step": seconds / steps,
      f"{self._task.unit}s_per_second": units / seconds,
      "mfu": self._task.utilisation(units / seconds),
    }
    stats = self._device.memory_stats() or {}  # CPUs have none
    if "peak_bytes_in_use" in stats:
      entry["peak_device_bytes"] = stats["peak_bytes_in_use"]
    # The counter moves some ten times a second; an interval that it did not see has no energy to report.
    if self._joules and (joules := self._joules() - self._joules_at_start) > 0:
      entry[f"joules_per_{self._task.unit}"] = joules / units
    self.start(step)
    return entry

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """What happens inside does not count as training time."""
    begin = time.perf_counter()
    yield
    self._idle += time.perf_counter() - begin
