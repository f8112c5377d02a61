"""tools/setup.sh: finds a Python that works on machines where the first one does not, installs once, fails in one line.

Interpreters are small shell scripts on a PATH of their own, so nothing is installed and no network is needed.
"""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# All that the scripts below use.
TOOLS = ("bash", "cat", "cksum", "cp", "dirname", "grep", "mkdir", "rm", "tail")

# Stands for an interpreter: tells its age, makes a venv of itself, and notes what pip is asked for.
PYTHON = """#!/bin/bash
case "$1 $2" in
  "--version "*) echo "Python {version}" ;;
  "-c "*) exit {too_old} ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") echo "$*" >> pip_calls; [ -z "$PIP_FAILS" ] || {{ echo "Collecting jax"; echo "$PIP_FAILS"; exit 1; }} ;;
esac
"""
BROKEN_SHIM = '#!/bin/bash\necho "pyenv: $0: command not found" >&2\nexit 127\n'


def python(version):
  return PYTHON.format(version=version, too_old=int(int(version.split(".")[1]) < 12))


def executable(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  path.chmod(0o755)
  return path


class Machine:
  """A checkout in an empty home, with nothing on PATH but what a test puts there."""

  def __init__(self, folder):
    self.bin, self.home, self.checkout = folder / "bin", folder / "home", folder / "a checkout"
    self.bin.mkdir()
    for tool in TOOLS:
      (self.bin / tool).symlink_to(shutil.which(tool))
    for name in ("tools/setup.sh", "pyproject.toml", "constraints.txt"):
      (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(ROOT / name, self.checkout / name)

  def setup(self, extra="dev", **environment):
    """Runs the script from another folder, as make -C would."""
    command = [str(self.bin / "bash"), str(self.checkout / "tools" / "setup.sh"), *([extra] if extra else [])]
    environment = {"PATH": str(self.bin), "HOME": str(self.home), **environment}
    return subprocess.run(command, cwd=self.bin, env=environment, capture_output=True, text=True, check=False)

  def pip_calls(self):
    path = self.checkout / "pip_calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path):
  return Machine(tmp_path)


def chosen(result):
  """The interpreter that .venv was made with."""
  assert result.returncode == 0, result.stderr
  assert result.stderr == ""
  return result.stdout.splitlines()[0].partition("with ")[2]


def test_python_of_the_path_makes_the_venv_and_pip_installs_the_extra_under_the_constraints(machine):
  executable(machine.bin / "python3", python("3.12.9"))
  assert chosen(machine.setup()) == "Python 3.12.9 (python3)"
  assert machine.pip_calls() == ["-m pip install --no-compile -c constraints.txt -e .[dev]"]


@pytest.mark.parametrize("name", ["python3.12", "python3.13", "python3.14", "python3", "python"])
def test_any_usual_name_of_python_is_enough(machine, name):
  executable(machine.bin / name, python("3.13.0"))
  assert chosen(machine.setup()) == f"Python 3.13.0 ({name})"


def test_a_shim_that_fails_and_a_python_that_is_too_old_are_passed_over(machine):
  executable(machine.bin / "python3.12", BROKEN_SHIM)
  executable(machine.bin / "python3", python("3.11.7"))
  executable(machine.bin / "python", python("3.13.0"))
  assert chosen(machine.setup()) == "Python 3.13.0 (python)"


def test_a_python_that_only_pyenv_knows_is_found_though_its_shim_fails(machine):
  executable(machine.bin / "python3", BROKEN_SHIM)
  for version in ("3.11.7", "3.12.1"):
    executable(machine.home / ".pyenv" / "versions" / version / "bin" / "python", python(version))
  assert chosen(machine.setup()).startswith("Python 3.12.1 (/")


def test_pyenv_may_live_in_another_folder_and_hold_a_broken_version(machine, tmp_path):
  executable(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python", BROKEN_SHIM)
  executable(tmp_path / "pyenv" / "versions" / "3.13.0" / "bin" / "python", python("3.13.0"))
  assert chosen(machine.setup(PYENV_ROOT=str(tmp_path / "pyenv"))).startswith("Python 3.13.0 (/")


def test_a_python_that_only_uv_knows_is_found(machine, tmp_path):
  path = executable(tmp_path / "uv" / "python", python("3.12.4"))
  executable(machine.bin / "uv", f"#!/bin/bash\n[ \"$*\" = 'python find >=3.12' ] && echo '{path}'\n")
  executable(machine.bin / "python3", python("3.11.7"))
  assert chosen(machine.setup()) == f"Python 3.12.4 ({path})"


def test_no_python_is_one_line_that_says_what_to_do(machine):
  executable(machine.bin / "python3", python("3.11.7"))
  executable(machine.bin / "uv", "#!/bin/bash\necho 'error: No interpreter found' >&2\nexit 2\n")
  result = machine.setup()
  assert (result.returncode, result.stdout) == (1, "")
  assert result.stderr.count("\n") == 1
  assert result.stderr.startswith("setup: no Python >= 3.12 found")
  assert "uv python install 3.12" in result.stderr
  assert not (machine.checkout / ".venv").exists()


def test_PYTHON_is_taken_before_all_others_or_refused_but_never_replaced(machine, tmp_path):
  executable(machine.bin / "python3.12", python("3.12.9"))
  old = executable(tmp_path / "old", python("3.11.7"))
  result = machine.setup(PYTHON=str(old))
  assert (result.returncode, result.stdout, machine.pip_calls()) == (1, "", [])
  assert result.stderr == (
    f"setup: PYTHON={old} is no Python >= 3.12 with venv; name another one or leave PYTHON unset\n"
  )
  new = executable(tmp_path / "new", python("3.13.2"))
  assert chosen(machine.setup(PYTHON=str(new))) == f"Python 3.13.2 ({new})"


def test_a_second_run_does_nothing(machine):
  executable(machine.bin / "python3", python("3.12.9"))
  machine.setup()
  result = machine.setup()
  assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
  assert len(machine.pip_calls()) == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed_into_the_same_venv(machine, name):
  executable(machine.bin / "python3", python("3.12.9"))
  machine.setup()
  with (machine.checkout / name).open("a") as file:
    file.write("# changed\n")
  result = machine.setup()
  assert "making .venv" not in result.stdout
  assert len(machine.pip_calls()) == 2


def test_another_extra_is_installed_beside_the_first_and_both_count_as_done(machine):
  executable(machine.bin / "python3", python("3.12.9"))
  for extra in ("demo", "dev", "demo", "dev"):
    assert machine.setup(extra).returncode == 0
  assert [call.split()[-1] for call in machine.pip_calls()] == [".[demo]", ".[dev]"]


def test_a_venv_whose_python_is_gone_is_made_anew(machine):
  executable(machine.bin / "python3", python("3.12.9"))
  machine.setup()
  executable(machine.checkout / ".venv" / "bin" / "python", BROKEN_SHIM)
  (machine.checkout / ".venv" / "left over").touch()
  assert chosen(machine.setup()) == "Python 3.12.9 (python3)"
  assert not (machine.checkout / ".venv" / "left over").exists()
  assert len(machine.pip_calls()) == 2


def test_a_failing_install_is_one_line_and_is_tried_again(machine):
  executable(machine.bin / "python3", python("3.12.9"))
  for _ in range(2):
    result = machine.setup(PIP_FAILS="ERROR: no matching distribution found for jax>=0.11.2\nnotice: a new pip")
    assert result.returncode == 1
    assert result.stderr == (
      "setup: pip could not install sparse-lm[dev]: ERROR: no matching distribution found for jax>=0.11.2"
      " (whole log: .venv/install.log)\n"
    )
  assert machine.setup().returncode == 0
  assert len(machine.pip_calls()) == 3


def test_a_failure_without_an_error_line_shows_the_last_line_of_the_log(machine):
  executable(machine.bin / "python3", python("3.12.9"))
  result = machine.setup(PIP_FAILS="OSError: [Errno 28] No space left on device")
  assert result.stderr.startswith("setup: pip could not install sparse-lm[dev]: OSError: [Errno 28] No space left")


def test_an_extra_must_be_named(machine):
  result = machine.setup(extra=None)
  assert result.returncode == 1
  assert "name an extra of pyproject.toml, such as dev" in result.stderr
