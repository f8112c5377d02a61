"""Our models in EleutherAI's lm-evaluation-harness, and the paper's seven tasks in it, over local or fetched data.

All seven are cloze tasks: the answers' texts are ranked by their log-probability after the question. For six the
harness has the definition; CommonsenseQA has letters to choose from there, so ours is `configs/tasks/`.
"""

import difflib
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparse_lm.errors import UserError, first_line
from sparse_lm.evaluation.scoring import Scorer, encode_pair
from sparse_lm.inference.generation import Generator
from sparse_lm.inference.opening import OpenedModel
from sparse_lm.inference.sampling import Sampling

Json = dict[str, Any]
Report = Callable[[str], None]
FOLDER = Path(__file__).parents[2] / "configs" / "tasks"
# In the order of the paper's table 6, which does not name its harness, shots or normalisation; zero shots here.
PAPER_TASKS = (
  "hellaswag",
  "commonsense_qa_cloze",
  "piqa",
  "winogrande",
  "arc_easy",
  "arc_challenge",
  "openbookqa",
)
_MAX_GENERATED = 256  # tokens, where a task does not say; the harness's own default
_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def evaluate(
  opened: OpenedModel,
  tasks: Sequence[str],
  *,
  data: Path | None = None,
  definitions: Path | None = None,
  limit: int | None = None,
  report: Report = lambda line: None,
) -> Json:
  """Runs tasks, without examples in the prompt.

  Args:
    opened: the model.
    tasks: names of the harness, of `configs/tasks`, or of `definitions`.
    data: folder with `TASK.jsonl`, `.json` or `.parquet`: the rows of the public data set's test split, or of its
      validation split where the test answers are secret. Tasks without a file there are fetched from the hub.
    definitions: folder with task files (.yaml) of one's own.
    limit: first documents of each task; None: all.
    report: takes one line.

  Returns:
    {name of the task: {"acc": ..., "acc_norm": ..., "acc_stderr": ..., "samples": ...}}.

  Raises:
    UserError: the harness is not installed, or a task or its data cannot be had.
  """
  try:
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager
  except ImportError as error:
    raise UserError("tasks need the package lm-eval: pip install -e '.[eval]'") from error
  for folder in (data, definitions):
    if folder is not None and not folder.is_dir():
      raise UserError(f"there is no folder {folder}; give one with files for the tasks")
  logging.getLogger("lm_eval").setLevel(logging.ERROR)
  datasets.disable_progress_bars()
  folders = [str(folder) for folder in (FOLDER, definitions, *_folders_of_the_papers_tasks()) if folder is not None]
  manager = TaskManager(include_path=folders, include_defaults=False)
  if not set(tasks) <= set(manager.all_tasks):
    manager = TaskManager(include_path=folders)  # knows thousands more, and takes half a minute to read them
  specs = [_spec(task, data, manager.all_tasks) for task in tasks]
  loaded: dict[str, Any] = {}
  for task, spec in zip(tasks, specs):
    try:
      # Only as members of a group do tasks take what differs from their definition.
      loaded |= manager.load({"group": "asked for", "task": [spec]})["tasks"]
    except Exception as error:  # a data set and a task file can fail in any way
      where = (
        "its definition or its data" if isinstance(spec, str) else str(spec["dataset_kwargs"]["data_files"]["test"])
      )
      why = first_line(error) if str(error) else "no rows"
      raise UserError(f"task {task}: {where} cannot be used ({type(error).__name__}: {why})") from error
  results = lm_eval.evaluate(
    language_model(opened, report),
    {"tasks": loaded, "groups": {}, "group_map": {}},
    limit=limit,
    log_samples=False,
    verbosity="ERROR",
  )
  counts = {name: value["effective"] for name, value in results["n-samples"].items()}
  return {name: _metrics(values) | {"samples": counts[name]} for name, values in results["results"].items()}


def mean_acc(tasks: Json) -> float | None:
  """Unweighted mean accuracy over those that have one; None if none has."""
  found = [task["acc"] for task in tasks.values() if "acc" in task]
  return math.fsum(found) / len(found) if found else None


def _folders_of_the_papers_tasks() -> list[Path]:
  from lm_eval import tasks  # the harness is imported on use

  return [Path(tasks.__file__).parent / name for name in ("arc", "hellaswag", "openbookqa", "piqa", "winogrande")]


def language_model(opened: OpenedModel, report: Report = lambda line: None) -> Any:
  """The model as the harness's `LM`. Its scores do not depend on what else is asked in the same call."""
  from lm_eval.api.model import LM  # the harness is imported on use

  class LanguageModel(LM):
    def __init__(self) -> None:
      super().__init__()
      self._scorer = Scorer(opened)

    def loglikelihood(self, requests, disable_tqdm=False):
      pairs = [encode_pair(opened.tokenizer, *request.args) for request in requests]
      return [(score.log_probability, score.greedy) for score in self._scorer.score(pairs, report)]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
      pairs = [encode_pair(opened.tokenizer, "", *request.args) for request in requests]
      return [score.log_probability for score in self._scorer.score(pairs, report)]

    def generate_until(self, requests, disable_tqdm=False):
      generator = Generator(opened)
      return [_generate(generator, *request.args) for request in requests]

  return LanguageModel()


def _generate(generator: Generator, prompt: str, options: Json) -> str:
  until = options.get("until", [])
  sampling = Sampling()
  if options.get("do_sample"):
    sampling = Sampling(
      temperature=options.get("temperature", 1.0), top_k=options.get("top_k"), top_p=options.get("top_p")
    )
  pieces = generator.stream(
    [prompt],
    max_tokens=options.get("max_gen_toks", _MAX_GENERATED),
    sampling=sampling,
    stop=[until] if isinstance(until, str) else until,
  )
  return "".join(piece.text for piece in pieces)


def _spec(task: str, data: Path | None, known: Sequence[str]) -> str | Json:
  if task not in known:
    meant = difflib.get_close_matches(task, known, n=1)
    hint = f"did you mean {meant[0]}?" if meant else "give a folder with its definition"
    raise UserError(f"task {task!r} is unknown to the harness and to {FOLDER}; {hint}")
  for folder in (data, FOLDER):
    for suffix, kind in _FORMATS.items():
      if folder is not None and (file := folder / f"{task}{suffix}").exists():
        files = {"dataset_path": kind, "dataset_name": None, "dataset_kwargs": {"data_files": {"test": str(file)}}}
        splits = {"training_split": None, "validation_split": None, "test_split": "test", "fewshot_split": "test"}
        return {"task": task, **files, **splits}
  return task


def _metrics(values: Json) -> Json:
  """`acc,none` as `acc`; numbers alone."""
  return {name.removesuffix(",none"): value for name, value in values.items() if isinstance(value, float)}
