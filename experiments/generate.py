"""Text from a trained model: `python -m experiments.generate --model=runs/mine --prompt="My fellow citizens"`.

--model is the folder of a run, one of its checkpoints (WORKDIR/checkpoints/STEP) or a Hugging Face folder. Text streams
to the terminal, that of several prompts one after the other although they are computed together.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from absl import flags

from sparse_lm.errors import UserError
from sparse_lm.flags import run

_MODEL = flags.DEFINE_string("model", None, "folder of a run, WORKDIR/checkpoints/STEP, or a Hugging Face folder")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "text to go on from; repeat the flag for several")
_PROMPTS = flags.DEFINE_string(
  "prompts", None, "text file with a prompt a line, blank ones left out; - for standard input"
)
_OUTPUT = flags.DEFINE_string(
  "output", None, "also write a JSON object a prompt to this new file: prompt, text, tokens, end"
)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "tokens for each prompt", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0: always the most likely token", lower_bound=0.0)
_TOP_K = flags.DEFINE_integer("top_k", None, "draw from the k most likely tokens", lower_bound=1)
_TOP_P = flags.DEFINE_float("top_p", None, "draw from the fewest tokens that reach this probability")
_SEED = flags.DEFINE_integer("seed", 0, "of the draws", lower_bound=0, upper_bound=2**32 - 1)
_STOP = flags.DEFINE_multi_string("stop", [], "text that ends a sequence and is not part of it; repeat for several")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "prompts computed together", lower_bound=1)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "a tokenizer.json, if there is none beside the model")
_RECIPE = flags.DEFINE_enum("recipe", None, ["bf16", "fp32"], "number formats of compute; default: the model's")
_FFN_IMPLEMENTATION = flags.DEFINE_enum(
  "ffn_implementation", None, ["dense", "twell"], "feed-forward of sparse models; default: the model's"
)


def main(argv: list[str]) -> None:
  """Generates, prints, and writes."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  if not _MODEL.value:
    raise UserError("--model is missing; name the folder of a run, such as --model=runs/mine")
  prompts = [*_PROMPT.value, *_lines(_PROMPTS.value)]
  if not prompts:
    raise UserError('there is no prompt; give --prompt="..." or --prompts=FILE')
  for number, prompt in enumerate(prompts, start=1):
    try:
      prompt.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no text reach Python as halves of characters
      raise UserError(f"prompt {number} is no UTF-8 text ({prompt!r})") from None
  from sparse_lm.inference import open_model  # seconds to import: a wrong flag is answered before
  from sparse_lm.inference.generation import Generator, Piece
  from sparse_lm.inference.sampling import Sampling

  sampling = Sampling(temperature=_TEMPERATURE.value, top_k=_TOP_K.value, top_p=_TOP_P.value)
  output = _new_file(_OUTPUT.value)
  say = lambda line: print(line, file=sys.stderr, flush=True)
  opened = open_model(
    _MODEL.value,
    tokenizer=_TOKENIZER.value,
    recipe=_RECIPE.value,
    ffn_implementation=_FFN_IMPLEMENTATION.value,
    report=say,
  )
  generator = Generator(opened)
  generator.encode(prompts)  # the last one may be too long, and is to be said before minutes go into the others

  def pieces(first: int) -> Iterator[Piece]:
    return generator.stream(
      prompts[first : first + _BATCH_SIZE.value],
      max_tokens=_MAX_TOKENS.value,
      sampling=sampling,
      seed=_SEED.value,
      stop=_STOP.value,
      first_number=first,
    )

  for first in range(0, len(prompts), _BATCH_SIZE.value):
    for number, text, tokens, end in _in_order(pieces(first), prompts[first : first + _BATCH_SIZE.value]):
      say(f"[{tokens} tokens, {end}]")
      if output is not None:
        output.write(json.dumps({"prompt": prompts[first + number], "text": text, "tokens": tokens, "end": end}) + "\n")
        output.flush()


def _new_file(path: str | None) -> TextIO | None:
  """Opened before anything is generated, so that nothing is lost if it cannot be."""
  if not path:
    return None
  try:
    return Path(path).expanduser().open("x", encoding="utf-8")
  except FileExistsError:
    raise UserError(f"--output={path} exists; name a new file, nothing is overwritten") from None
  except OSError as error:
    raise UserError(f"--output={path} cannot be written ({error.strerror}); name another file") from None


def _in_order(pieces: Iterable, prompts: list[str]) -> Iterator[tuple[int, str, int, str]]:
  """Prints each prompt with its text, streaming the first that is not complete; yields each when it is printed."""
  texts, last = [""] * len(prompts), {}
  printed, current = 0, 0
  print(prompts[0], end="", flush=True)
  for piece in pieces:
    texts[piece.prompt] += piece.text
    if piece.end is not None:
      last[piece.prompt] = piece
    while current < len(prompts):
      print(texts[current][printed:], end="", flush=True)
      printed = len(texts[current])
      if current not in last:
        break
      print(flush=True)
      yield current, texts[current], last[current].tokens, last[current].end
      current, printed = current + 1, 0
      if current < len(prompts):
        print(prompts[current], end="", flush=True)


def _lines(path: str | None) -> list[str]:
  if path is None:
    return []
  try:
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).expanduser().read_bytes()
    text = raw.decode("utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"--prompts={path} cannot be read ({error})") from None
  # Not splitlines, which also cuts at characters that a prompt may hold.
  return [line for line in (line.removesuffix("\r") for line in text.split("\n")) if line]


if __name__ == "__main__":
  run(main)
