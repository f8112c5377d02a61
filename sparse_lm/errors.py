"""Errors that end a program with one line instead of a traceback, and the exit codes that scripts may rely on.

Library code raises `UserError` when the person at the keyboard can mend the cause; entry points print its message and
leave with its code. Anything else is a bug of ours and keeps its traceback.
"""

EXIT_USER_ERROR = 2  # wrong flag, config, file or folder: nothing was trained, nothing was lost
EXIT_NONFINITE = 3  # NaN or infinity: metrics written, the last good checkpoint kept
EXIT_SAVE_FAILED = 4  # a checkpoint could not be written: the older ones are intact
EXIT_PREEMPTED = 75  # SIGTERM: saved; the same command goes on (EX_TEMPFAIL of sysexits.h)


class UserError(ValueError):
  """Something that was asked for cannot be done; the message says what was given, what is allowed and what to do."""

  exit_code = EXIT_USER_ERROR


class NonFiniteError(UserError):
  """The loss or a gradient became NaN or infinite."""

  exit_code = EXIT_NONFINITE


class SaveError(UserError):
  """A checkpoint could not be written."""

  exit_code = EXIT_SAVE_FAILED


class Preempted(UserError):
  """The run was asked to stop, and saved its state."""

  exit_code = EXIT_PREEMPTED


def first_line(error: BaseException) -> str:
  """What an error of a library says, short enough for a message of one line."""
  line = (str(error).strip().splitlines() or [type(error).__name__])[0]
  return line.partition(" See full TensorStore details")[0][:200]
