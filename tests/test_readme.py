"""README.md and docs/ tell the truth: examples run, commands exist and take the flags shown, links lead somewhere.

Every fenced block names its language:
  python  is run, each block by itself from the root of the repository
  bash    is checked line by line: make targets, modules and their flags, extras, test files
  text    is output or a picture, and is left alone
A second word, which GitHub does not show, says where a block is run: `python slow` and `bash slow` by `make test-all`,
`python gpu` and `bash gpu` on a GPU. A bash block with such a word is run for real, in a scratch folder.
"""

import dataclasses
import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("python", "bash", "text")
MARKS = ("slow", "gpu")
TIME_LIMIT = 1800  # seconds; a slow block may train a model on two cores


@dataclasses.dataclass(frozen=True)
class Block:
  """A fenced block and where it stands."""

  place: str  # file:line
  language: str
  mark: str | None
  text: str


def blocks_of(text, name):
  """Yields the fenced blocks of a document."""
  for match in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
    language, *marks = match[1].split() or [""]
    place = f"{name}:{text[: match.start()].count(chr(10)) + 1}"
    assert language in LANGUAGES, f"{place}: a block starts with ```{language}; use one of {', '.join(LANGUAGES)}"
    assert len(marks) <= 1, f"{place}: at most one of {', '.join(MARKS)} may follow {language}"
    assert set(marks) <= set(MARKS), f"{place}: {marks[0]} is none of {', '.join(MARKS)}"
    yield Block(place, language, marks[0] if marks else None, match[2])


def commands_of(block):
  """Yields (environment, words) for each command of a bash block, without comments and continued lines joined."""
  for line in block.text.replace("\\\n", " ").splitlines():
    lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    command: list[str] = []
    for word in [*lexer, ";"]:
      if not set(word) <= set("|&;"):
        command.append(word)
      elif command:
        settings = [word for word in command if re.match(r"[A-Z_]+=", word)]
        yield dict(setting.split("=", 1) for setting in settings), [w for w in command if w not in settings]
        command = []


def fault_of(words, environment):
  """Returns what is wrong with a command of the documents, None where nothing is."""
  program, *arguments = words
  if program in ("git", "cd", "source", "ls", "cat", "tail", "nvidia-smi"):
    return None
  if program == "make":
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    missing = [argument for argument in arguments if argument not in targets]
    return f"Makefile has no target {missing[0]}" if missing else None
  if program == "pip" or arguments[:2] == ["-m", "pip"]:
    named = [extra for group in re.findall(r"\.\[([\w,-]+)\]", " ".join(arguments)) for extra in group.split(",")]
    missing = [extra for extra in named if extra not in extras()]
    return f"pyproject.toml has no extra {missing[0]}" if missing else None
  if program == "pytest" or arguments[:2] == ["-m", "pytest"]:
    paths = [argument for argument in arguments if "/" in argument and not argument.startswith("-")]
    missing = [path for path in paths if not (ROOT / path.partition("::")[0]).exists()]
    return f"there is no {missing[0]}" if missing else None
  if re.fullmatch(r"(\.venv/bin/)?python3?", program) and arguments[:1] == ["-m"]:
    if not arguments[1].startswith("experiments."):
      return None if importlib.util.find_spec(arguments[1]) else f"there is no module {arguments[1]}"
    command = [sys.executable, *arguments, "--only_check_args"]  # absl parses all flags and leaves before main
    result = subprocess.run(
      command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    return None if result.returncode == 0 else result.stderr.strip().splitlines()[-1]
  return f"tests/test_readme.py knows no way to check {program!r}"


def scratch_checkout(folder):
  """Fills a folder with links to the repository, so that what a command writes beside them stays in the folder."""
  for path in ROOT.iterdir():
    if path.name not in (".git", ".venv", "runs"):
      (folder / path.name).symlink_to(path)
  # With stamps of its own, for `make` would else install again, and make the whole environment import from here.
  environment = folder / ".venv"
  environment.mkdir()
  for path in pathlib.Path(sys.prefix).iterdir():
    if not path.name.startswith("installed-"):
      (environment / path.name).symlink_to(path)
  stamp = subprocess.check_output("cat pyproject.toml constraints.txt | cksum", shell=True, cwd=ROOT, text=True)
  for extra in extras():
    (environment / f"installed-{extra}").write_text(stamp)
  return folder


def extras():
  return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path.read_text(), path.relative_to(ROOT))]
COMMANDS = {
  " ".join(words): (words, environment)
  for block in BLOCKS
  if block.language == "bash"
  for environment, words in commands_of(block)
}


def to_run(language, *, only_marked=False):
  """Returns the blocks of a language as test parameters, each with the mark it carries."""
  return [
    pytest.param(block, id=block.place, marks=[getattr(pytest.mark, block.mark)] if block.mark else [])
    for block in BLOCKS
    if block.language == language and (block.mark or not only_marked)
  ]


@pytest.mark.parametrize("block", to_run("python"))
def test_a_python_example_runs(block):
  # From standard input, so that the repository's root is what Python imports from.
  command = [sys.executable, "-"]
  result = subprocess.run(
    command, input=block.text, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
  )
  assert result.returncode == 0, f"{block.place}\n{result.stderr}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_exists_and_takes_its_flags(command):
  assert fault_of(*COMMANDS[command]) is None


@pytest.mark.parametrize("block", to_run("bash", only_marked=True))
def test_a_bash_block_runs(block, tmp_path):
  environment = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
  command = ["bash", "-euo", "pipefail", "-c", block.text]
  result = subprocess.run(
    command,
    cwd=scratch_checkout(tmp_path),
    env=environment,
    capture_output=True,
    text=True,
    timeout=TIME_LIMIT,
    check=False,
  )
  assert result.returncode == 0, f"{block.place}\n{result.stdout[-2000:]}\n{result.stderr}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_of_the_repository_lead_somewhere(path):
  targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
  missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
  assert missing == []


# The checks themselves.

SAMPLE = """Text.
```bash slow
$ make demo   # comment
JAX_NUM_CPU_DEVICES=8 python -m experiments.train_lm --config=a.py \\
  --workdir='runs/a b' && tail -n 1 x | cat
```
```python
print("```")
```
"""

TOY = """
from absl import flags
from sparse_lm.flags import run

flags.DEFINE_string("workdir", None, "folder of the run")
if __name__ == "__main__":
  run(lambda argv: 1)  # never reached when flags alone are checked
"""


def test_blocks_are_found_with_language_mark_and_line():
  bash, python = blocks_of(SAMPLE, "README.md")
  assert (bash.place, bash.language, bash.mark) == ("README.md:2", "bash", "slow")
  assert (python.place, python.language, python.mark, python.text) == ("README.md:7", "python", None, 'print("```")\n')


def test_commands_are_split_as_a_shell_does():
  assert list(commands_of(next(blocks_of(SAMPLE, "README.md")))) == [
    ({}, ["make", "demo"]),
    (
      {"JAX_NUM_CPU_DEVICES": "8"},
      ["python", "-m", "experiments.train_lm", "--config=a.py", "--workdir=runs/a b"],
    ),
    ({}, ["tail", "-n", "1", "x"]),
    ({}, ["cat"]),
  ]


@pytest.mark.parametrize("fence", ["```", "```console", "```bash fast", "```python slow gpu"])
def test_a_block_of_unclear_kind_is_refused(fence):
  with pytest.raises(AssertionError, match=r"^README\.md:1: "):
    list(blocks_of(f"{fence}\nx\n```\n", "README.md"))


@pytest.mark.parametrize(
  ("command", "fault"),
  [
    ("make demo", None),
    ("make dmeo", "Makefile has no target dmeo"),
    ("pip install -e .[dev,cuda]", None),
    ("python -m pip install -e .[devel]", "pyproject.toml has no extra devel"),
    ("python -m pytest -m gpu tests/test_readme.py::test_x", None),
    ("pytest tests/test_raedme.py", "there is no tests/test_raedme.py"),
    ("python -m pallas_kernels", None),
    ("python -m palace_kernels", "there is no module palace_kernels"),
    ("python -m experiments.nothing", "No module named experiments.nothing"),
    ("curl x", "tests/test_readme.py knows no way to check 'curl'"),
    ("python -m experiments.toy --workdir=x", None),
    ("python -m experiments.toy --wrokdir=x", "error: --wrokdir is no flag of this program; did you mean --workdir?"),
  ],
)
def test_a_wrong_command_is_found(command, fault, tmp_path, monkeypatch):
  (tmp_path / "experiments").mkdir()
  (tmp_path / "experiments" / "toy.py").write_text(TOY)
  for path in ("Makefile", "pyproject.toml", "tests"):
    (tmp_path / path).symlink_to(ROOT / path)
  monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
  found = fault_of(command.split(), {})
  assert found is None if fault is None else fault in found


def test_what_a_block_writes_stays_in_the_scratch_folder_and_installs_nothing(tmp_path):
  folder = scratch_checkout(tmp_path)
  assert (folder / "Makefile").read_text() == (ROOT / "Makefile").read_text()
  assert not (folder / "runs").exists()
  result = subprocess.run(["tools/setup.sh", "demo"], cwd=folder, capture_output=True, text=True, check=False)
  assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
