"""Calls of a program in one process of its own: most of the time of a call goes into imports."""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]

_DRIVER = """
import contextlib, importlib, io, json, sys
from absl.testing import flagsaver
from sparse_lm.flags import run

program = importlib.import_module(sys.argv[1])
answers = []
for arguments in json.loads(sys.argv[2]):
  sys.argv = [program.__file__, *arguments]
  out, err, code = io.StringIO(), io.StringIO(), 0
  with flagsaver.flagsaver(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      run(program.main)
    except SystemExit as leaving:
      code = leaving.code or 0
  answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


def answers(module, *calls):
  """Returns (exit code, standard output, standard error) of each call, a list of arguments."""
  command = [sys.executable, "-c", _DRIVER, module, json.dumps([list(map(str, call)) for call in calls])]
  result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stderr
  return [tuple(answer) for answer in json.loads(result.stdout.splitlines()[-1])]


def refusals(module, *calls):
  """As `answers`, of calls that are refused in one line: returns these lines."""
  found = answers(module, *calls)
  assert all(code == 2 and err.startswith("error: ") and err.count("\n") == 1 for code, _, err in found), found
  return [err for _, _, err in found]
