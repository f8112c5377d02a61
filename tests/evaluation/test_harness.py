"""The harness over our models: offline, exact, and the paper's seven tasks over files of one's own."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import program
import pytest

from sparse_lm.errors import UserError
from sparse_lm.evaluation import harness
from sparse_lm.evaluation.scoring import Scorer

TINY = [json.loads(line) for line in (harness.FOLDER / "tiny_cloze.jsonl").read_text().splitlines()]

# Two rows of each task in the form of its public data set, whose second answer is right.
ROWS = {
  "arc_easy": {"question": "Q?", "choices": {"text": ["aa", "the cat"], "label": ["A", "B"]}, "answerKey": "B"},
  "arc_challenge": {"question": "Q?", "choices": {"text": ["aa", "the cat"], "label": ["1", "2"]}, "answerKey": "2"},
  "openbookqa": {"question_stem": "Q", "choices": {"text": ["aa", "the cat"], "label": ["A", "B"]}, "answerKey": "B"},
  "commonsense_qa_cloze": {
    "question": "Q? ",
    "choices": {"text": ["aa", "the cat"], "label": ["A", "B"]},
    "answerKey": "B",
  },
  "piqa": {"goal": "Q", "sol1": "aa", "sol2": "the cat", "label": 1},
  "winogrande": {"sentence": "The mat and _ sat here.", "option1": "aa", "option2": "the cat", "answer": "2"},
  "hellaswag": {"activity_label": "L", "ctx_a": "Q", "ctx_b": "q", "endings": ["aa", "the cat"], "label": "1"},
}
# What is scored: (context, continuation) of each answer.
SCORED = {
  "arc_easy": [("Question: Q?\nAnswer:", " aa"), ("Question: Q?\nAnswer:", " the cat")],
  "arc_challenge": [("Question: Q?\nAnswer:", " aa"), ("Question: Q?\nAnswer:", " the cat")],
  "openbookqa": [("Q", " aa"), ("Q", " the cat")],
  "commonsense_qa_cloze": [("Question: Q?\nAnswer:", " aa"), ("Question: Q?\nAnswer:", " the cat")],
  "piqa": [("Question: Q\nAnswer:", " aa"), ("Question: Q\nAnswer:", " the cat")],
  "winogrande": [("The mat and aa", " sat here."), ("The mat and the cat", " sat here.")],
  "hellaswag": [("L: Q Q", " aa"), ("L: Q Q", " the cat")],
}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
  monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(opened):
  return opened(seed=1)


@jax.jit
def logits_of(model, tokens_BL):
  return model.logits(model(tokens_BL)[0])


def log_probability(model, context, continuation):
  """Of ids, straight from the model's logits."""
  ids = [model.tokenizer.eos_id, *model.tokenizer.encode(context), *model.tokenizer.encode(continuation)]
  padded_BL = np.array([ids + [0] * (48 - len(ids))], np.int32)
  logits = np.asarray(logits_of(model.model, padded_BL), np.float64)[0]
  table = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  start = 1 + len(model.tokenizer.encode(context))
  return sum(table[i - 1, ids[i]] for i in range(start, len(ids)))


def test_the_bundled_task_counts_the_questions_whose_answer_is_the_likeliest(model):
  values = [[log_probability(model, q["question"], " " + c) for c in q["choices"]] for q in TINY]
  right = [int(np.argmax(v)) == q["answer"] for v, q in zip(values, TINY)]
  lengths = [[len(c) for c in q["choices"]] for q in TINY]
  right_norm = [int(np.argmax(np.array(v) / n)) == q["answer"] for v, n, q in zip(values, lengths, TINY)]
  found = harness.evaluate(model, ["tiny_cloze"])
  assert 0 < sum(right) < 12
  assert found["tiny_cloze"]["acc"] == pytest.approx(np.mean(right))
  assert found["tiny_cloze"]["acc_norm"] == pytest.approx(np.mean(right_norm))
  assert found["tiny_cloze"]["samples"] == 12
  assert harness.evaluate(model, ["tiny_cloze"], limit=5)["tiny_cloze"]["acc"] == np.mean(right[:5])


def test_the_papers_tasks_run_over_local_files_and_score_the_texts_of_the_answers(model, tmp_path, monkeypatch):
  for task in harness.PAPER_TASKS:
    (tmp_path / f"{task}.jsonl").write_text(json.dumps(ROWS[task]) + "\n" + json.dumps(ROWS[task]) + "\n")
  asked = []
  score = Scorer.score
  monkeypatch.setattr(Scorer, "score", lambda self, pairs, report: asked.extend(pairs) or score(self, pairs, report))
  found = harness.evaluate(model, harness.PAPER_TASKS, data=tmp_path)
  texts = {(model.tokenizer.decode(a[1:]), model.tokenizer.decode(b)) for a, b in asked}
  assert texts == {pair for pairs in SCORED.values() for pair in pairs}
  assert set(found) == set(harness.PAPER_TASKS)
  for task, pairs in SCORED.items():
    first, second = (log_probability(model, *pair) for pair in pairs)
    assert found[task]["acc"] == float(second > first)
    assert found[task]["samples"] == 2
  assert harness.mean_acc(found) == pytest.approx(np.mean([task["acc"] for task in found.values()]))
  assert harness.mean_acc({"only": {"exact_match": 1.0}}) is None


def test_the_harness_interface_scores_rolls_and_generates(model):
  lm = harness.language_model(model)
  request = lambda *arguments: SimpleNamespace(args=arguments)
  pairs = [("The cat", "s sat"), ("", " sat"), ("the " * 100, "mat"), ("x", "")]
  found = lm.loglikelihood([request(*pair) for pair in pairs])
  assert found[3] == (0.0, True)
  assert found[1][0] == pytest.approx(log_probability(model, "", " sat"), rel=1e-5)
  (rolled,) = lm.loglikelihood_rolling([request("the cat sat")])
  assert rolled == pytest.approx(log_probability(model, "", "the cat sat"), rel=1e-5)
  (text,) = lm.generate_until([request("the cat", {"until": ["\n\n"], "max_gen_toks": 5})])
  (stopped,) = lm.generate_until([request("the cat", {"until": text[1], "max_gen_toks": 5})])
  assert stopped == text[: text.index(text[1])]


@pytest.mark.parametrize(
  ("tasks", "options", "message"),
  [
    pytest.param(  # reads the definitions of all tasks there are
      ["tiny_close"], {}, r"task 'tiny_close' is unknown .*; did you mean tiny_cloze\?", marks=pytest.mark.slow
    ),
    (["tiny_cloze"], {"data": Path("nowhere")}, r"there is no folder nowhere"),
    (["tiny_cloze"], {"definitions": Path("nowhere")}, r"there is no folder nowhere"),
  ],
)
def test_what_cannot_be_run_is_said_in_one_line(tasks, options, message, model):
  with pytest.raises(UserError, match=message):
    harness.evaluate(model, tasks, **options)


@pytest.mark.parametrize(("content", "why"), [("{", ""), ("", "no rows"), ('{"foo": 1}', "question")])
def test_damaged_task_data_is_said_in_one_line_with_its_file(content, why, model, tmp_path):
  (tmp_path / "arc_easy.jsonl").write_text(content)
  with pytest.raises(UserError, match=rf"task arc_easy: .*arc_easy\.jsonl cannot be used .*{why}") as caught:
    harness.evaluate(model, ["tiny_cloze", "arc_easy"], data=tmp_path)
  assert "\n" not in str(caught.value)


def test_a_task_of_ones_own_is_found(model, tmp_path):
  definition = (harness.FOLDER / "tiny_cloze.yaml").read_text().replace("task: tiny_cloze", "task: my_cloze")
  (tmp_path / "my_cloze.yaml").write_text(definition)
  (tmp_path / "my_cloze.jsonl").write_text(json.dumps(TINY[0]) + "\n")
  found = harness.evaluate(model, ["my_cloze"], data=tmp_path, definitions=tmp_path)
  assert found["my_cloze"]["samples"] == 1


def test_the_program_writes_all_it_is_asked_for_and_refuses_in_one_line(trained_once, tmp_path):
  (tmp_path / "text.txt").write_text("abc de f " * 300)
  (tmp_path / "other.txt").write_text("x")
  (tmp_path / "file").write_text("")
  definition = (harness.FOLDER / "tiny_cloze.yaml").read_text().replace("task: tiny_cloze", "task: my_cloze")
  (tmp_path / "my_cloze.yaml").write_text(definition)
  (tmp_path / "my_cloze.jsonl").write_text(json.dumps(TINY[0]) + "\n")
  model, text, out = f"--model={trained_once}", f"--text={tmp_path / 'text.txt'}", f"--out={tmp_path / 'out'}"
  by_twell = [model, text, "--ffn_implementation=twell", f"--out={tmp_path / 'twell'}"]
  mine = ["--tasks=my_cloze", f"--task_files={tmp_path}", f"--task_data={tmp_path}"]
  (code, stdout, stderr), limited, second, other, *wrong = program.answers(
    "experiments.eval_lm",
    [model, text, "--activity", "--min_count=2", "--tasks=tiny_cloze", out],
    [model, "--tasks=tiny_cloze", "--limit=2", out],
    [model, *mine, out],
    by_twell,
    [text],
    [model],
    [model, "--tasks=tiny_cloze", "--activity"],
    [model, text, "--limit=3"],
    [model, "--text=/nowhere/*.txt"],
    [model, f"--text={tmp_path / 'other.txt'}", out],
    [*by_twell[:-1], out],
    [model, text, f"--out={tmp_path / 'file'}"],
  )
  assert (code, limited[0], second[0], other[0]) == (0, 0, 0, 0), (stderr, limited, second, other)
  found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
  assert set(found) == {"perplexity", "activity", "tasks", "tasks_first_2"}
  assert {entry["step"] for entry in found.values()} == {16}
  assert found["perplexity"]["bytes"] == 2700
  assert f"{found['perplexity']['perplexity_per_byte']:.4f} per byte" in stdout
  assert len(found["activity"]["l0_by_position"]) == 16
  perplexity = json.loads((tmp_path / "twell" / "perplexity.json").read_text())
  assert perplexity["ffn_implementation"] == "twell"
  assert perplexity["nats_per_token"] == pytest.approx(found["perplexity"]["nats_per_token"], rel=1e-5)
  samples = {name: task["samples"] for name, task in found["tasks"]["tasks"].items()}
  assert samples == {"tiny_cloze": 12, "my_cloze": 1}  # one call after the other
  assert found["tasks"]["mean_acc"] == pytest.approx(np.mean([t["acc"] for t in found["tasks"]["tasks"].values()]))
  assert found["tasks_first_2"]["tasks"]["tiny_cloze"]["samples"] == 2
  said = [
    "--model is missing",
    "there is nothing to do; give --text=FILES, --tasks=NAMES",
    "--activity counts on text; give --text=FILES",
    "--limit has no effect without --tasks",
    "--text='/nowhere/*.txt': the pattern matches no file",
    f"perplexity.json holds results of text='{tmp_path / 'text.txt'}', not '{tmp_path / 'other.txt'}'",
    "perplexity.json holds results of ffn_implementation='dense', not 'twell'",
    f"{tmp_path / 'file'} cannot be written; give another --out=FOLDER",
  ]
  for (code, _, stderr), message in zip(wrong, said, strict=True):
    assert (code, stderr.count("\n")) == (2, 1), stderr
    assert message in stderr
