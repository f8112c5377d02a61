"""What a run shows while it works: one line that rewrites itself on a terminal, plain lines elsewhere."""

import os
import shutil
import sys
from typing import TextIO


class Progress:
  """Lines that stay, and a bar that does not. A run does not die of a reader that has left (`| head`)."""

  def __init__(self, total: int, stream: TextIO | None = None):
    """Shows `total` steps on a stream; standard output unless given."""
    self._total, self._stream = total, stream or sys.stdout
    self._terminal = self._stream.isatty()
    self._bar_shown = False

  def line(self, text: str) -> None:
    """Prints a line that stays."""
    self._write(f"{text}\n")

  def step(self, done: int, text: str) -> None:
    """Shows how far the run is: a bar on a terminal, a line elsewhere."""
    if not self._terminal:
      self.line(f"step {done}/{self._total}  {text}")
      return
    columns = shutil.get_terminal_size().columns
    filled = 20 * done // self._total
    bar = f"[{'#' * filled}{'.' * (20 - filled)}] {done}/{self._total}  {text}"
    self._write(bar[: columns - 1])
    self._bar_shown = True

  def close(self) -> None:
    """Leaves the last bar where it is and goes to the next line."""
    if self._bar_shown:
      self._bar_shown = False
      self._write("\n")

  def _write(self, text: str) -> None:
    """Writes in place of the bar, if one is shown."""
    clear = "\r\033[K" if self._bar_shown else ""
    self._bar_shown = False
    try:
      self._stream.write(clear + text)
      self._stream.flush()
    except BrokenPipeError:
      with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), self._stream.fileno())
