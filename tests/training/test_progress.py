"""What a user sees, read off a small terminal."""

import io
import re

import pytest

from sparse_lm.training.progress import Progress


class Stream(io.StringIO):
  def __init__(self, terminal):
    super().__init__()
    self.terminal = terminal

  def isatty(self):
    return self.terminal


def screen(text):
  """Lines that a terminal shows: carriage return, erase to the end of the line, new line and characters."""
  lines, column = [""], 0
  for part in re.findall(r"\r|\n|\x1b\[K|[^\r\n\x1b]", text):
    if part == "\n":
      lines, column = [*lines, ""], 0
    elif part == "\r":
      column = 0
    elif part == "\x1b[K":
      lines[-1] = lines[-1][:column]
    else:
      lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + 1 :]
      column += 1
  return lines


@pytest.fixture(autouse=True)
def columns(monkeypatch):
  """The terminal is 60 columns wide."""
  monkeypatch.setenv("COLUMNS", "60")


def test_the_terminal_of_these_tests_overwrites_and_erases_as_real_ones_do():
  assert screen("abc\rX\x1b[K\nY") == ["X", "Y"]
  assert screen("abc\rX") == ["Xbc"]


def test_off_a_terminal_every_step_is_a_plain_line_that_can_be_searched():
  stream = Stream(terminal=False)
  progress = Progress(10, stream)
  progress.line("hello")
  progress.step(1, "loss 2.5")
  progress.step(10, "loss 1.5")
  progress.close()
  assert stream.getvalue() == "hello\nstep 1/10  loss 2.5\nstep 10/10  loss 1.5\n"


def test_on_a_terminal_steps_share_one_line_and_a_shorter_one_leaves_nothing_of_a_longer_one():
  stream = Stream(terminal=True)
  progress = Progress(10, stream)
  progress.step(1, "a long text")
  progress.step(2, "short")
  assert screen(stream.getvalue()) == ["[####................] 2/10  short"]


def test_on_a_terminal_lines_stay_and_the_bar_goes_on_below_them():
  stream = Stream(terminal=True)
  progress = Progress(4, stream)
  progress.line("first")
  progress.step(1, "loss 3")
  progress.line("saved")
  progress.step(2, "loss 2")
  assert screen(stream.getvalue()) == ["first", "saved", "[##########..........] 2/4  loss 2"]


def test_closing_keeps_the_last_bar_and_ends_its_line():
  stream = Stream(terminal=True)
  progress = Progress(2, stream)
  progress.step(2, "loss 1")
  progress.close()
  progress.close()  # a second time changes nothing
  assert screen(stream.getvalue()) == ["[####################] 2/2  loss 1", ""]


def test_closing_without_a_bar_writes_nothing():
  for stream in (Stream(terminal=True), Stream(terminal=False)):
    Progress(2, stream).close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("width", [1, 2, 20, 60])
def test_the_bar_is_cut_before_the_last_column_because_a_full_line_wraps(width, monkeypatch):
  monkeypatch.setenv("COLUMNS", str(width))
  stream = Stream(terminal=True)
  progress = Progress(100, stream)
  for n in range(1, 101):
    progress.step(n, "x" * n)
  (line,) = screen(stream.getvalue())
  assert len(line) == width - 1


def test_a_terminal_that_is_made_narrower_is_asked_again(monkeypatch):
  stream = Stream(terminal=True)
  progress = Progress(3, stream)
  progress.step(1, "x" * 100)
  monkeypatch.setenv("COLUMNS", "30")
  progress.step(2, "x" * 100)
  assert len(screen(stream.getvalue())[0]) == 29


def test_the_bar_is_empty_at_the_start_and_full_only_at_the_end():
  stream = Stream(terminal=True)
  progress = Progress(1000, stream)
  bars = {}
  for done in (0, 1, 999, 1000):
    progress.step(done, "")
    bars[done] = screen(stream.getvalue())[0].count("#")
  assert bars == {0: 0, 1: 0, 999: 19, 1000: 20}


def test_standard_output_is_the_default(capsys):
  Progress(3).line("to stdout")
  assert capsys.readouterr().out == "to stdout\n"
