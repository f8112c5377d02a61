"""How good a trained model is: `python -m experiments.eval_lm --model=runs/mine --text=book.txt --tasks=tiny_cloze`.

--text: perplexity by token and by byte of files of one's own. --activity: which hidden units fire on them.
--tasks: cloze tasks of lm-evaluation-harness; `paper` stands for the paper's seven. Results are printed and written as
JSON to --out, by default the folder `evaluation` of the run, where `experiments.tables` looks for them.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from sparse_lm.errors import UserError
from sparse_lm.flags import run

_MODEL = flags.DEFINE_string("model", None, "folder of a run, WORKDIR/checkpoints/STEP, or a Hugging Face folder")
_TEXT = flags.DEFINE_string("text", None, "file, folder or glob of .txt, .jsonl, .parquet; several separated by commas")
_ACTIVITY = flags.DEFINE_bool(
  "activity", False, "also count on --text which hidden units fire, by layer, position, token"
)
_ACTIVITY_TOKENS = flags.DEFINE_integer("activity_tokens", 2**20, "of --text that are counted", lower_bound=1)
_MIN_COUNT = flags.DEFINE_integer("min_count", 32, "occurrences that --activity needs to list a token", lower_bound=1)
_TASKS = flags.DEFINE_list("tasks", [], "names of tasks, `paper` for the paper's seven")
_TASK_DATA = flags.DEFINE_string("task_data", None, "folder with TASK.jsonl or TASK.parquet; others come from the hub")
_TASK_FILES = flags.DEFINE_string("task_files", None, "folder with task definitions (.yaml) of your own")
_LIMIT = flags.DEFINE_integer("limit", None, "first documents of each task", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "folder for the results; default: `evaluation` in the run's folder")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "a tokenizer.json, if there is none beside the model")
_RECIPE = flags.DEFINE_enum("recipe", None, ["bf16", "fp32"], "number formats of compute; default: the model's")
_FFN_IMPLEMENTATION = flags.DEFINE_enum(
  "ffn_implementation", None, ["dense", "twell"], "feed-forward of sparse models; default: the model's"
)


def main(argv: list[str]) -> None:
  """Evaluates, prints, and writes."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  if not _MODEL.value:
    raise UserError("--model is missing; name the folder of a run, such as --model=runs/mine")
  if not _TEXT.value and not _TASKS.value:
    raise UserError("there is nothing to do; give --text=FILES, --tasks=NAMES, or both")
  if _ACTIVITY.value and not _TEXT.value:
    raise UserError("--activity counts on text; give --text=FILES")
  for name in ("task_data", "task_files", "limit") if not _TASKS.value else ():
    if flags.FLAGS[name].value is not None:
      raise UserError(f"--{name} has no effect without --tasks; leave it out")
  from sparse_lm import data  # seconds to import: a wrong flag is answered before
  from sparse_lm.evaluation import activity, harness, perplexity
  from sparse_lm.hf.read import is_hf_folder
  from sparse_lm.inference import open_model
  from sparse_lm.training import recorder

  if _OUT.value is None and is_hf_folder(Path(_MODEL.value).expanduser()):
    raise UserError(f"{_MODEL.value} is no run's folder to write results to; give --out=FOLDER")
  texts = data.texts(_TEXT.value, "--text") if _TEXT.value else []
  say = lambda line: print(line, file=sys.stderr, flush=True)
  opened = open_model(
    _MODEL.value,
    tokenizer=_TOKENIZER.value,
    recipe=_RECIPE.value,
    ffn_implementation=_FFN_IMPLEMENTATION.value,
    report=say,
  )
  if _ACTIVITY.value:
    activity.require_neurons(opened)
  out = opened.path.parents[1] / "evaluation" if _OUT.value is None else Path(_OUT.value).expanduser()
  model = {"model": str(opened.path), "step": opened.step, "recipe": opened.precision.recipe}
  model |= {"ffn_implementation": opened.config.ffn_implementation}
  of_tasks = "tasks" if _LIMIT.value is None else f"tasks_first_{_LIMIT.value}"  # never in the place of whole results
  planned = {of_tasks: model} if _TASKS.value else {}
  planned |= {
    name: model | {"text": _TEXT.value} for name in ("perplexity", "activity")[: 1 + _ACTIVITY.value] if texts
  }
  earlier = {name: _earlier(out, name, identity) for name, identity in planned.items()}
  say(f"model: {opened.path}, {opened.precision.recipe}, vocabulary {opened.config.vocab_size}")

  def finish(name: str, result: dict[str, Any], show: Callable[[dict[str, Any]], str]) -> None:
    print(show(result), flush=True)
    recorder.write_json(out / f"{name}.json", planned[name] | result | {"environment": recorder.environment()})
    print(f"written: {out / f'{name}.json'}", flush=True)

  if texts:
    finish("perplexity", perplexity.perplexity(opened, texts, say), _show_perplexity)
  if _ACTIVITY.value:
    counts = activity.activity(opened, texts, max_tokens=_ACTIVITY_TOKENS.value, min_count=_MIN_COUNT.value, report=say)
    finish("activity", counts, _show_activity)
  if _TASKS.value:
    names = [name for task in _TASKS.value for name in (harness.PAPER_TASKS if task == "paper" else (task,))]
    folder = lambda value: None if value is None else Path(value).expanduser()
    tasks = earlier[of_tasks].get("tasks", {}) | harness.evaluate(
      opened,
      names,
      data=folder(_TASK_DATA.value),
      definitions=folder(_TASK_FILES.value),
      limit=_LIMIT.value,
      report=say,
    )
    finish(of_tasks, {"tasks": tasks, "mean_acc": harness.mean_acc(tasks), "limit": _LIMIT.value}, _show_tasks)


def _earlier(out: Path, name: str, identity: dict[str, Any]) -> dict[str, Any]:
  """What the file holds already, {} if there is none; refuses to replace results of something else, before any work."""
  from sparse_lm.training import recorder

  try:
    out.mkdir(parents=True, exist_ok=True)
    writable = os.access(out, os.W_OK)
  except OSError:
    writable = False
  if not writable:
    raise UserError(f"{out} cannot be written; give another --out=FOLDER")
  path = out / f"{name}.json"
  if not path.exists():
    return {}
  found = recorder.read_json(path)
  for field, value in identity.items():
    if found.get(field) != value:
      raise UserError(
        f"{path} holds results of {field}={found.get(field)!r}, not {value!r}; give another --out=FOLDER, or remove it"
      )
  return found


def _show_perplexity(result: dict[str, Any]) -> str:
  return (
    f"{result['documents']:,} documents, {result['tokens']:,} tokens, {result['bytes']:,} bytes:"
    f" {result['nats_per_token']:.4f} nats a token, perplexity {result['perplexity_per_token']:.3f} per token"
    f" (tokenizer {result['tokenizer'][:12]}), {result['perplexity_per_byte']:.4f} per byte"
    f" ({result['bits_per_byte']:.4f} bits a byte)"
  )


def _show_activity(result: dict[str, Any]) -> str:
  layers = ", ".join(f"{mean:.1f} ({most})" for mean, most in zip(result["l0_per_layer"], result["l0_max_per_layer"]))
  names = lambda entries: " ".join(repr(entry["token"]) for entry in entries[:8])
  return (
    f"{result['tokens']:,} tokens: non-zeros of {result['ffn_width']} by layer, mean (largest): {layers};"
    f"\nfewest at {names(result['fewest'])}\nmost at {names(result['most'])}"
  )


def _show_tasks(result: dict[str, Any]) -> str:
  from pallas_kernels import bench

  percent = lambda task, name: f"{100 * task[name]:.1f}" if name in task else "-"
  rows = [
    [name, *(percent(task, metric) for metric in ("acc", "acc_stderr", "acc_norm")), f"{task['samples']:,}"]
    for name, task in result["tasks"].items()
  ]
  mean = "-" if result["mean_acc"] is None else f"{100 * result['mean_acc']:.1f}"
  header = ["task", "acc %", "standard error", "acc_norm %", "documents"]
  return bench.markdown_table(header, [*rows, ["mean", mean, "", "", ""]])


if __name__ == "__main__":
  run(main)
