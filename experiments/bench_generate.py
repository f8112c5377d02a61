"""Speed of generation: `python -m experiments.bench_generate --what=decode` on a GPU, `--what=loop` anywhere.

decode: one token a sequence of the paper's shapes, random bf16 weights, beside the time that memory needs to deliver
what the step has to read: every weight once, and the keys and values of all earlier tokens. With --non_zeros the same
of a model in whose layers so many neurons fire, with dense and with TwELL blocks, on the same weights. loop: what
streaming text costs beside the bare jitted step, on `configs/lm/small.py`. Both write a record and print it as a table.
"""

import functools
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from pallas_kernels import bench
from sparse_lm import data
from sparse_lm import flags as config_flags
from sparse_lm.benchmark import RECORD, record_cases, require_neurons
from sparse_lm.config import FFN_IMPLEMENTATIONS, LmConfig, PrecisionConfig
from sparse_lm.errors import UserError
from sparse_lm.inference import OpenedModel
from sparse_lm.inference.decoding import Decoder
from sparse_lm.inference.generation import Generator
from sparse_lm.inference.opening import abstract_parameters
from sparse_lm.inference.sampling import Sampling
from sparse_lm.models.sparsified import sparsified
from sparse_lm.tables import decode_table
from sparse_lm.training.mfu import peak_bytes_per_second

flags.declare_key_flag("record")
_WHAT = flags.DEFINE_enum("what", None, ["decode", "loop"], "what to measure")
_MODELS = flags.DEFINE_list("models", ["paper_1_5b"], "decode: files of configs/lm")
_BATCH = flags.DEFINE_list("batch", ["1", "8", "64"], "decode: sequences; loop takes the first")
_PROMPT = flags.DEFINE_integer("prompt", 128, "tokens of each prompt", lower_bound=1)
_SLOTS = flags.DEFINE_list("slots", ["256", "2048"], "decode: of the cache, a case each")
_NON_ZEROS = flags.DEFINE_float("non_zeros", None, "decode: mean over tokens of the neurons that fire in a layer", 1)
_TOKENS = flags.DEFINE_integer("tokens", 64, "generated for each sequence and repeat", lower_bound=8)
_REPEATS = flags.DEFINE_integer("repeats", 5, "of which the median counts", lower_bound=1)

Json = dict[str, Any]
_SAMPLING = Sampling(temperature=0.8)
_CALIBRATION = 32  # sequences on which the number of non-zeros is met


def main(argv: list[str]) -> None:
  """Measures, records, prints."""
  if argv[1:]:
    raise UserError(f"{argv[1]!r} is not a flag; write --name=value")
  for name, values in (("batch", _BATCH.value), ("slots", _SLOTS.value)):
    if bad := [value for value in values if not value.isdigit() or int(value) == 0]:
      raise UserError(f"--{name}={bad[0]!r} must be positive integers, separated by commas")
  if _WHAT.value is None or RECORD.value is None:
    raise UserError("--what=decode|loop and --record=FOLDER are needed; for example --what=loop --record=runs/bench")
  names = ("what", "models", "batch", "prompt", "slots", "non_zeros", "tokens", "repeats")
  cases, table = (decode_cases, decode_table) if _WHAT.value == "decode" else (loop_cases, loop_table)
  record_cases(RECORD.value, {name: flags.FLAGS[name].value for name in names}, cases(), table)


def decode_cases():
  """Yields each model, batch and cache."""
  for name in _MODELS.value:
    config = config_flags.load_config(f"configs/lm/{name}.py", LmConfig)
    model = _random_model(config)
    if _NON_ZEROS.value is None:
      yield from _decode_cases(name, config, model)
      continue
    model, l0 = _sparsified(name, config, model)
    for ffn in FFN_IMPLEMENTATIONS:
      for case in _decode_cases(name, config, model.with_ffn(ffn)):
        # A block that reads only what it needs has no such limit.
        share = case["share_of_bandwidth"] if ffn == "dense" else None
        yield case | {"ffn": ffn, "non_zeros": _NON_ZEROS.value, "l0": l0, "share_of_bandwidth": share}


def _sparsified(name: str, config: LmConfig, model):
  """The model with --non_zeros at the positions that are generated, and how many those are, mean over layers."""
  require_neurons(name, config.model, _NON_ZEROS.value)
  length = _PROMPT.value + _TOKENS.value
  tokens_BL = jax.random.randint(jax.random.key(1), (_CALIBRATION, length), 0, config.model.vocab_size)
  sparsify = functools.partial(sparsified, config=config.model, non_zeros=_NON_ZEROS.value, first=_PROMPT.value)
  model = jax.jit(sparsify)(model, tokens_BL=tokens_BL)
  generated_BL = jnp.broadcast_to(jnp.arange(length)[None, :] >= _PROMPT.value, tokens_BL.shape)
  stats = jax.jit(lambda model, *arrays: model(arrays[0], real_BL=arrays[1])[1])(model, tokens_BL, generated_BL)
  return model, float(jnp.mean(stats.l0)) / (_CALIBRATION * _TOKENS.value)


def _decode_cases(name: str, config: LmConfig, model):
  weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
  decoder = Decoder(model)
  for batch in map(int, _BATCH.value):
    for slots in map(int, _SLOTS.value):
      seconds = [_time_decode(config, decoder, batch, slots) for _ in range(_REPEATS.value + 1)][1:]
      mean_length = _PROMPT.value + (_TOKENS.value + 1) / 2
      cache_bytes = batch * mean_length * config.model.num_layers * 2 * config.model.kv_heads * config.model.head_width
      moved = weight_bytes + 2 * cache_bytes  # bf16
      peak = peak_bytes_per_second(jax.devices()[:1])
      median = statistics.median(seconds)
      yield {
        "model": name,
        "batch": batch,
        "slots": slots,
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "tokens_per_second": batch / median,
        "bytes": moved,
        "share_of_bandwidth": moved / median / peak if peak else None,
      }


def _random_model(config: LmConfig):
  """Parameters of a model in its compute dtype, made where they stay: the scale is that of training's start."""
  abstract = abstract_parameters(config.model, config.precision, jnp.dtype(jnp.bfloat16))

  @jax.jit
  def make():
    leaves, structure = jax.tree.flatten(abstract)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    draw = lambda key, leaf: (jax.random.normal(key, leaf.shape, jnp.bfloat16) * config.model.init_std).astype(
      leaf.dtype
    )
    return jax.tree.unflatten(structure, [draw(key, leaf) for key, leaf in zip(keys, leaves)])

  return make()


def _time_decode(config: LmConfig, decoder: Decoder, batch: int, slots: int) -> float:
  """Seconds a step, of a queue of steps that is waited for once."""
  rng = np.random.default_rng(0)
  tokens_BL = jnp.asarray(rng.integers(0, config.model.vocab_size, (batch, _PROMPT.value)), jnp.int32)
  keys_B = jax.random.split(jax.random.key(0), batch)
  lengths_B = jnp.full(batch, _PROMPT.value, jnp.int32)
  now = decoder.start(tokens_BL, lengths_B, keys_B, slots=slots, sampling=_SAMPLING)
  now = decoder.advance(now, keys_B, sampling=_SAMPLING)
  jax.block_until_ready(now)
  start = time.perf_counter()
  for _ in range(_TOKENS.value):
    now = decoder.advance(now, keys_B, sampling=_SAMPLING)
  jax.block_until_ready(now)
  return (time.perf_counter() - start) / _TOKENS.value


def loop_cases():
  """Yields pairs of the bare step and of streamed text, in turns so that a busy machine slows both."""
  config = config_flags.load_config("configs/lm/small.py", LmConfig)
  batch = int(_BATCH.value[0])
  tokenizer = data.open_dataset(config, report=lambda line: None).tokenizer
  precision = PrecisionConfig("fp32" if jax.default_backend() == "cpu" else "bf16")
  model = jax.jit(lambda: _untrained(config, precision))()
  opened = OpenedModel(config.model, precision, model, tokenizer, Path("configs/lm/small.py"), None)
  generator, decoder = Generator(opened), Decoder(model)
  word = tokenizer.decode(tokenizer.encode(" the"))
  prompts = ["".join([word] * (_PROMPT.value - 1))] * batch
  slots = -(-(_PROMPT.value + _TOKENS.value) // 64) * 64  # as the generator has it
  for n in range(_REPEATS.value + 1):
    bare = _time_decode(config, decoder, batch, slots)
    pieces = generator.stream(prompts, max_tokens=_TOKENS.value, sampling=_SAMPLING)
    for _ in range(batch):
      next(pieces)  # the prompts are read
    start = time.perf_counter()
    count = sum(1 for _ in pieces)
    if n > 0:  # the first compiles
      yield {"batch": batch, "bare": bare / batch, "streamed": (time.perf_counter() - start) / count}


def _untrained(config: LmConfig, precision: PrecisionConfig):
  from sparse_lm.models.transformer import Transformer

  return Transformer(config.model, precision, rngs=nnx.Rngs(0))


def loop_table(cases: list[Json]) -> str:
  """Markdown of a record."""
  bare, streamed = (statistics.median(1 / c[name] for c in cases) for name in ("bare", "streamed"))
  ratio = statistics.median(c["bare"] / c["streamed"] for c in cases)
  header = ["configs/lm/small.py", "sequences", "bare jitted step", "streamed text", "streamed over bare"]
  row = ["median", str(cases[0]["batch"]), f"{bare:,.1f} tokens/s", f"{streamed:,.1f} tokens/s", f"{ratio:.1%}"]
  return bench.markdown_table(header, [row])


if __name__ == "__main__":
  config_flags.run(main)
