"""Every test sees eight virtual CPU devices, NNX in tree mode, and an error where rank promotion could hide a bug.

Compiled programs are kept in .jax_cache: the tests start the same few programs dozens of times, and compiling them
takes far longer than running them.
"""

import copy
import dataclasses
import os
import random
from pathlib import Path

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax
import pytest
from flax import nnx

from sparse_lm.config import LmConfig, ModelConfig, PrecisionConfig

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
nnx.set_graph_mode(False)
nnx.set_graph_updates(False)


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory):
  """A byte-level BPE of 275 ids that knows some words."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=275, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
  )
  tokenizer.train_from_iterator(["the cat sat on the mat and the cats sat too"] * 5, trainer)
  path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
  tokenizer.save(str(path))
  return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_json):
  """That one, in use."""
  from sparse_lm.data.tokenizer import read_tokenizer

  return read_tokenizer(str(tokenizer_json), "tokenizer")


@pytest.fixture(scope="session")
def opened(tokenizer):
  """`opened(num_layers=3, ...)`: a model of that config."""
  from sparse_lm.inference import OpenedModel
  from sparse_lm.models.transformer import Transformer

  def make(*, precision="fp32", seed=0, **changes):
    config = ModelConfig(
      vocab_size=tokenizer.vocab_size,
      context_length=48,
      num_layers=2,
      model_width=32,
      num_heads=4,
      ffn_width=48,
      init_std=0.3,
    )
    config = dataclasses.replace(config, **changes)
    options = {"xla_backend_optimization_level": 0}  # compiles the random draws in a fifth of the time
    build = lambda: Transformer(config, PrecisionConfig(precision), rngs=nnx.Rngs(seed))
    model = jax.jit(build, compiler_options=options)()
    return OpenedModel(config, PrecisionConfig(precision), model, tokenizer, Path("nowhere"), None)

  return make


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
  """Forty documents of made-up words that a bigram can learn a little of, and a cache beside them."""
  folder = tmp_path_factory.mktemp("corpus")
  rng = random.Random(0)
  words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 5))) for _ in range(60)]
  for n in range(40):
    (folder / f"{n:02}.txt").write_text(" ".join(rng.choice(words[k % 7 :: 7]) for k in range(rng.randint(60, 200))))
  return folder


@pytest.fixture(scope="session")
def base_config(corpus):
  """L1 warm-up until step 6, then the L0 controller; re-initialisation; two micro-batches; documents masked."""
  config = LmConfig()
  config.precision.recipe = "fp32"
  model, data, training, sparsity = config.model, config.data, config.training, config.sparsity
  model.vocab_size, model.context_length, model.num_layers = 300, 16, 2
  model.model_width, model.num_heads, model.num_kv_heads, model.ffn_width = 32, 4, 2, 64
  data.source, data.path, data.cache_dir = "text", str(corpus / "*.txt"), str(corpus / "cache")
  data.document_mask = True
  sparsity.l1_coefficient, sparsity.l1_warmup_start, sparsity.l1_warmup_end = 1e-3, 2, 6
  sparsity.target_l0, sparsity.reinit_rate = 8.0, 0.1
  training.steps, training.batch_size, training.accumulation_steps, training.warmup_steps = 16, 8, 2, 4
  training.log_every, training.eval_every, training.eval_batches = 1, 8, 2
  config.checkpoint.every, config.parallel.data = 5, 1
  config.validate()
  return config


@pytest.fixture(scope="session")
def trained_once(base_config, tmp_path_factory):
  """The folder of a finished run, not to be touched."""
  from sparse_lm.training.language_model import train

  folder = tmp_path_factory.mktemp("trained")
  train(copy.deepcopy(base_config), folder)
  return folder
