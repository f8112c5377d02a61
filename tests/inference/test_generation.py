"""What is generated, streamed, stopped and refused."""

import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import program
import pytest

from sparse_lm.errors import UserError
from sparse_lm.inference import open_model
from sparse_lm.inference.generation import Generator
from sparse_lm.inference.sampling import Sampling

PROMPTS = ["the cat", "", "the cats sat on", "m"]
WARM = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def model(opened):
  return opened(seed=3)


@pytest.fixture(scope="module")
def generator(model):
  return Generator(model)


def complete(generator, prompts, **options):
  """(text, number of tokens, why it ended) of each prompt."""
  texts, ends = [""] * len(prompts), [None] * len(prompts)
  for piece in generator.stream(prompts, **options):
    assert ends[piece.prompt] is None, "a piece after the end"
    texts[piece.prompt] += piece.text
    ends[piece.prompt] = None if piece.end is None else (piece.tokens, piece.end)
  return [(text, *end) for text, end in zip(texts, ends)]


def greedy_without_cache(model, prompt, max_tokens):
  """One forward pass a token, on the whole text so far."""
  tokenizer, ids = model.tokenizer, [model.tokenizer.eos_id, *model.tokenizer.encode(prompt)]
  start = len(ids)
  logits = jax.jit(lambda m, t: m.logits(m(t)[0]))
  while len(ids) < start + max_tokens:
    padded = jnp.array([ids + [0] * (48 - len(ids))], jnp.int32)
    ids.append(int(np.argmax(logits(model.model, padded)[0, len(ids) - 1])))
    if ids[-1] == tokenizer.eos_id:
      return tokenizer.decode(ids[start:-1])
  return tokenizer.decode(ids[start:])


def test_greedy_text_equals_that_of_a_model_without_cache(model, generator):
  found = complete(generator, PROMPTS, max_tokens=12)
  assert [text for text, _, _ in found] == [greedy_without_cache(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.slow
def test_a_prompts_text_does_not_depend_on_the_others_but_on_its_number_and_the_seed(generator):
  options = {"max_tokens": 10, "sampling": WARM, "seed": 5}
  together = complete(generator, PROMPTS, **options)
  alone = [complete(generator, [prompt], **options, first_number=n)[0] for n, prompt in enumerate(PROMPTS)]
  assert together == alone
  assert complete(generator, PROMPTS, **options) == together
  assert complete(generator, PROMPTS, **options | {"seed": 6}) != together
  first, second = complete(generator, ["the cat"] * 2, **options)
  assert first != second


def test_sequences_end_where_they_should(model, generator):
  whole = complete(generator, ["the cat"], max_tokens=20, sampling=WARM, seed=1)[0][0]
  assert len(whole) > 12
  stop = whole[6:9]
  text, tokens, end = complete(generator, ["the cat"], max_tokens=20, sampling=WARM, seed=1, stop=[stop])[0]
  assert (text, end) == (whole[: whole.index(stop)], "stop string")
  assert tokens < 20
  start = 1 + len(model.tokenizer.encode("the cat"))
  assert complete(generator, ["the cat"], max_tokens=99)[0][1:] in [(48 - start, "context is full")]
  assert complete(generator, ["the cat"], max_tokens=1)[0][1:] == (1, "max_tokens")


def test_end_of_text_ends_a_sequence_and_is_not_part_of_it(opened):
  model = opened(seed=3, tie_embeddings=False)
  head_VD = jnp.zeros_like(model.model.head_VD[...])
  model.model.head_VD[...] = head_VD  # all tokens equally likely: greedy takes id 0
  assert model.tokenizer.eos_id == 0
  assert complete(Generator(model), ["the cat", "m"], max_tokens=9) == [("", 1, "end of text")] * 2


def test_no_prompt_is_no_text(generator):
  assert complete(generator, [], max_tokens=3) == []


@pytest.mark.parametrize(
  ("prompts", "options", "message"),
  [
    (["m", "m" * 60], {}, r"prompt 2 has 61 tokens, .* context holds 48 .*; shorten it by 14 tokens"),
    (["m" * 47], {}, r"prompt 1 has 48 tokens"),
    (["m"], {"max_tokens": 0}, r"max_tokens=0 must be at least 1"),
    (["m"], {"stop": ["x", ""]}, r"stop='' would stop before the first token"),
  ],
)
def test_what_cannot_be_done_is_said_before_anything_is_generated(prompts, options, message, generator):
  with pytest.raises(UserError, match=message):
    generator.stream(prompts, **{"max_tokens": 3} | options)


def test_a_prompt_that_leaves_room_for_one_token_gets_one(generator):
  assert complete(generator, ["m" * 46], max_tokens=5)[0][1:] == (1, "context is full")


def test_the_program_streams_texts_in_order_and_writes_them_and_refuses_in_one_line(trained_once, tmp_path):
  (tmp_path / "prompts.txt").write_text("abc\u2028de\r\n\nb\n", newline="")
  (tmp_path / "latin.txt").write_bytes(b"\xff\xfe")
  model, out = f"--model={trained_once}", f"--output={tmp_path / 'out.jsonl'}"
  good = [model, "--prompt=first one", f"--prompts={tmp_path / 'prompts.txt'}", "--max_tokens=4", out, "--batch_size=2"]
  (code, stdout, stderr), by_twell, again, *wrong = program.answers(
    "experiments.generate",
    good,
    [*(argument for argument in good if argument != out), "--ffn_implementation=twell"],
    good,
    ["--prompt=x"],
    [model],
    [model, "x"],
    [model, f"--prompts={tmp_path / 'nowhere'}"],
    [model, f"--prompts={tmp_path / 'latin.txt'}"],
    [model, "--prompt=\udcff"],
    [model, "--prompt=x", f"--output={tmp_path / 'no' / 'out.jsonl'}"],
    [model, "--prompt=x", "--temperature=0", "--top_k=3"],
    [model, "--prompt=x", "--top_p=2"],
    [model, "--prompt=" + "x" * 99],
    [f"--model={tmp_path / 'nowhere'}", "--prompt=x"],
    [f"--model={tmp_path}", "--prompt=x"],
  )
  assert code == 0, stderr
  entries = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
  assert [entry["prompt"] for entry in entries] == ["first one", "abc\u2028de", "b"]
  assert stdout == "".join(entry["prompt"] + entry["text"] + "\n" for entry in entries)
  assert by_twell[:2] == (0, stdout)
  assert stderr.count("tokens, max_tokens]") + stderr.count("tokens, end of text]") == 3
  said = [
    f"--output={tmp_path / 'out.jsonl'} exists; name a new file",
    "--model is missing",
    "there is no prompt; give --prompt",
    "'x' is not a flag",
    "nowhere cannot be read",
    "latin.txt cannot be read ('utf-8' codec can't decode byte 0xff",
    "prompt 1 is no UTF-8 text",
    "out.jsonl cannot be written (No such file or directory)",
    "top_k=3 and top_p=None have no effect at temperature=0",
    "top_p=2.0 must lie in (0, 1]",
    "prompt 1 has 100 tokens",
    f"there is no {tmp_path / 'nowhere'}; give the folder of a run",
    f"{tmp_path} is no model: give the --workdir of a run",
  ]
  for (code, _, stderr), message in zip([again, *wrong], said, strict=True):
    assert (code, stderr.count("\n")) == (2, 1), stderr
    assert message in stderr


@pytest.mark.slow
def test_a_reader_that_has_left_ends_the_program_without_a_word(trained_once):
  command = [sys.executable, "-m", "experiments.generate", f"--model={trained_once}", "--prompt=x", "--max_tokens=9"]
  process = subprocess.Popen(command, cwd=program.REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  process.stdout.close()
  _, err = process.communicate()
  assert (process.returncode, "Error" in err) == (141, False), err


def test_a_tokenizer_that_is_not_the_models_is_refused_unless_it_is_asked_for(finished_copy, tokenizer_json):
  shutil.copy(tokenizer_json, finished_copy / "tokenizer.json")
  with pytest.raises(UserError, match=r"is not the one that it was trained with .*; restore it, or give one with"):
    open_model(finished_copy)
  assert open_model(finished_copy, tokenizer=str(tokenizer_json)).tokenizer.vocab_size == 275


@pytest.fixture
def finished_copy(trained_once, tmp_path):
  return shutil.copytree(trained_once, tmp_path / "copy")
