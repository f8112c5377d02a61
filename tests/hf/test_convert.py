"""Checkpoints of transformers in, ours out, and the same logits at every position on both sides."""

import hashlib
import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import program
import pytest
import torch
import transformers
from flax import nnx
from hf_models import SHAPE, VOCAB, logits_of, make_model, restyle, save
from safetensors.numpy import load_file, save_file

from sparse_lm import config_io, inference
from sparse_lm.config import LmConfig, ModelConfig, PrecisionConfig
from sparse_lm.errors import UserError
from sparse_lm.hf import HfFolder, convert, write_folder
from sparse_lm.inference.opening import abstract_parameters
from sparse_lm.models.transformer import Transformer
from sparse_lm.training import checkpoint, recorder
from sparse_lm.training.language_model import train
from sparse_lm.training.progress import Progress

TOKENS_BL = np.random.default_rng(0).integers(0, VOCAB, (2, 23))


def ours(path, **options):
  """Our logits of a folder."""
  opened = inference.open_model(path, recipe="fp32", report=lambda line: None, **options)

  @jax.jit
  def logits(model, tokens_BL):
    return model.logits(model(tokens_BL)[0])

  return np.asarray(logits(opened.model, jnp.asarray(TOKENS_BL, jnp.int32)))


def assert_same_logits(found_BLV, wanted_BLV):
  assert np.abs(wanted_BLV).max() > 2  # or a mistake could hide
  np.testing.assert_allclose(found_BLV, wanted_BLV, rtol=2e-4, atol=2e-4 * np.abs(wanted_BLV).max())


MODELS = {
  "silu": {"hidden_act": "silu"},
  "relu": {"hidden_act": "relu"},
  "grouped_query": {"num_key_value_heads": 2},
  "one_key_value_head": {"num_key_value_heads": 1},
  "tied": {"tie_word_embeddings": True},
  "theta_100000": {"rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}},
  "large_epsilon": {"rms_norm_eps": 0.3},
  "not_gated": {"family": "Arcee", "hidden_act": "relu"},
  "not_gated_tied_grouped": {
    "family": "Arcee",
    "hidden_act": "relu",
    "tie_word_embeddings": True,
    "num_key_value_heads": 2,
  },
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_a_folder_gives_the_logits_of_transformers_and_so_does_its_export(changes, tmp_path, tokenizer_json):
  theirs = make_model(**changes)
  folder = save(theirs, tmp_path / "hf", tokenizer_json)
  wanted = logits_of(theirs, TOKENS_BL)
  assert_same_logits(ours(folder), wanted)

  convert.import_folder(folder, tmp_path / "run", report=lambda line: None)
  convert.export_run(tmp_path / "run", tmp_path / "out", report=lambda line: None)
  loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
  assert type(loaded) is type(theirs)
  np.testing.assert_array_equal(logits_of(loaded.eval(), TOKENS_BL), wanted)
  before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
  assert before.keys() == after.keys()
  for key in before:
    np.testing.assert_array_equal(before[key], after[key])


@pytest.mark.parametrize("style", ["hf", "older", "kernel"])
@pytest.mark.parametrize("gated", [True, False])
def test_the_authors_checkpoints_are_relu_in_every_style_whatever_their_config_says(
  style, gated, tmp_path, tokenizer_json
):
  theirs = make_model(family="Llama" if gated else "Arcee", hidden_act="relu", tie_word_embeddings=True)
  folder = restyle(save(theirs, tmp_path / "hf", tokenizer_json), style, gated=gated)
  assert json.loads((folder / "config.json").read_text())["hidden_act"] == "silu"
  assert_same_logits(ours(folder), logits_of(theirs, TOKENS_BL))


def test_the_oracle_tells_relu_from_silu_and_one_theta_from_another():
  """Or the tests above could not fail."""
  wanted = logits_of(make_model(hidden_act="relu"), TOKENS_BL)
  for changes in ({"hidden_act": "silu"}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}):
    other = logits_of(make_model(**{"hidden_act": "relu"} | changes), TOKENS_BL)
    assert np.abs(other - wanted).max() > 0.05 * np.abs(wanted).max()


def test_theta_is_read_where_transformers_4_wrote_it(tmp_path, tokenizer_json):
  theirs = make_model(rope_parameters={"rope_type": "default", "rope_theta": 100_000.0})
  folder = save(theirs, tmp_path / "hf", tokenizer_json)
  values = json.loads((folder / "config.json").read_text())
  del values["rope_parameters"]
  (folder / "config.json").write_text(json.dumps(values | {"rope_theta": 100_000.0, "rope_scaling": None}))
  assert_same_logits(ours(folder), logits_of(theirs, TOKENS_BL))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_weights_go_there_and_back_bit_for_bit(dtype, tmp_path, tokenizer_json):
  theirs = make_model().to(getattr(torch, dtype))
  folder = save(theirs, tmp_path / "hf", tokenizer_json)
  convert.import_folder(folder, tmp_path / "run", report=lambda line: None)
  convert.export_run(tmp_path / "run", tmp_path / "out", dtype=dtype, report=lambda line: None)
  before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
  assert before.keys() == after.keys()
  for key in before:
    assert before[key].dtype == after[key].dtype == dtype
    np.testing.assert_array_equal(before[key].view(np.uint16), after[key].view(np.uint16))
  assert HfFolder(folder).precision.recipe == "bf16"


def test_a_checkpoint_in_several_files_is_read_into_shares_of_eight_devices_and_written_in_several(
  tmp_path, tokenizer_json
):
  theirs = make_model(tie_word_embeddings=True)
  folder = save(theirs, tmp_path / "hf", tokenizer_json, max_shard_size="30KB")
  assert len([*folder.glob("*.safetensors")]) > 2
  source = HfFolder(folder)
  mesh = jax.make_mesh((1, 8), ("data", "fsdp"))
  with jax.set_mesh(mesh):
    model = source.load(abstract_parameters(source.config, source.precision, jnp.dtype(jnp.float32)))
  w_gate_FD = model.blocks.feedforward.w_gate_FD[...]
  assert {shard.data.shape for shard in w_gate_FD.addressable_shards} == {(2, 48, 4)}
  assert_same_logits(ours(folder), logits_of(theirs, TOKENS_BL))

  tokenizer = source.tokenizer()
  write_folder(tmp_path / "out", model, source.config, tokenizer, dtype="float32", file_bytes=30_000)
  files = [*(tmp_path / "out").glob("*.safetensors")]
  assert len(files) > 2
  assert all(path.stat().st_size < 45_000 for path in files)  # the embedding alone is 38,400 bytes
  loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
  np.testing.assert_array_equal(logits_of(loaded, TOKENS_BL), logits_of(theirs, TOKENS_BL))


def write_run(workdir, config, tokenizer_json, *, vocab_size):
  """A run's folder with random parameters, as training leaves it; vocab_size None: as it left it once."""
  model = jax.jit(lambda: Transformer(config, PrecisionConfig("fp32"), rngs=nnx.Rngs(0)))()
  saver = checkpoint.Saver(workdir / "checkpoints", 1)
  fingerprint = hashlib.sha256(tokenizer_json.read_bytes()).hexdigest()
  values = {"model": {**vars(config)}, "precision": {"recipe": "fp32"}}
  metadata = {"config": values, "tokenizer": fingerprint, "dataset": "y", "step": 7}
  saver.save(7, {"model": model}, metadata | ({} if vocab_size is None else {"vocab_size": vocab_size}))
  saver.wait()
  shutil.copy(tokenizer_json, workdir / "tokenizer.json")
  return model


@pytest.mark.parametrize("tied", [True, False])
def test_padding_rows_of_the_vocabulary_are_never_exported(tied, tmp_path, tokenizer_json):
  config = ModelConfig(
    vocab_size=320, context_length=64, num_layers=1, model_width=32, num_heads=4, ffn_width=48, tie_embeddings=tied
  )
  model = write_run(tmp_path / "run", config, tokenizer_json, vocab_size=275)
  convert.export_run(tmp_path / "run", tmp_path / "out", report=lambda line: None)
  weights = load_file(tmp_path / "out" / "model.safetensors")
  np.testing.assert_array_equal(weights["model.embed_tokens.weight"], model.embedding_VD[...][:275])
  assert ("lm_head.weight" in weights) is not tied
  if not tied:
    np.testing.assert_array_equal(weights["lm_head.weight"], model.head_VD[...][:275])
  assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 275
  opened = inference.open_model(tmp_path / "run", report=lambda line: None)
  assert opened.model.embedding_VD[...].shape == (275, 32)
  assert (opened.config.vocab_size, opened.step) == (275, 7)


def test_the_exported_tokenizer_is_the_models(tmp_path, tokenizer_json):
  folder = save(make_model(), tmp_path / "hf", tokenizer_json)
  convert.import_folder(folder, tmp_path / "run", report=lambda line: None)
  convert.export_run(tmp_path / "run", tmp_path / "out", report=lambda line: None)
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
  text = "the cats, 12 in number, sat — naïve"
  assert tokenizer(text, add_special_tokens=False)["input_ids"] == HfFolder(folder).tokenizer().encode(text)
  assert tokenizer.eos_token == "<|endoftext|>"


# Wrong input ----------------------------------------------------------------------------------------------------------


def edited(folder, **changes):
  values = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(values | changes))


def without(folder, key):
  weights = load_file(folder / "model.safetensors")
  del weights[key]
  save_file(weights, folder / "model.safetensors")


def with_more(folder, key):
  weights = load_file(folder / "model.safetensors")
  save_file(weights | {key: np.zeros(3, np.float32)}, folder / "model.safetensors")


def cut(folder):
  raw = (folder / "model.safetensors").read_bytes()
  (folder / "model.safetensors").write_bytes(raw[:-10])


DAMAGE = {
  "other_family": (
    lambda f: edited(f, model_type="mistral"),
    r"model_type='mistral' is not supported; supported: llama",
  ),
  "scaled_rope": (
    lambda f: edited(f, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}),
    r"rope_type='llama3' is not supported",
  ),
  "bias": (lambda f: edited(f, attention_bias=True), r"attention_bias=True is not supported"),
  "wide_heads": (lambda f: edited(f, head_dim=16), r"head_dim=16 is not supported; our models have head_dim=8"),
  "gelu": (lambda f: edited(f, hidden_act="gelu"), r"hidden_act='gelu' with a gate is not supported"),
  "wrong_width": (
    lambda f: edited(f, intermediate_size=52),
    r"mlp\.down_proj\.weight has shape \[32, 48\], but config\.json asks for \[32, 52\]",
  ),
  "more_layers": (
    lambda f: edited(f, num_hidden_layers=3),
    r"model\.layers\.2\..* missing; is the checkpoint complete",
  ),
  "fewer_layers": (lambda f: edited(f, num_hidden_layers=1), r"model\.layers\.1\..* unknown; our model has no such"),
  "no_head": (lambda f: without(f, "lm_head.weight"), r"lm_head\.weight is missing"),
  "lost_tensor": (
    lambda f: without(f, "model.layers.1.mlp.up_proj.weight"),
    r"layers\.1\.mlp\.up_proj\.weight is missing",
  ),
  "bias_tensor": (lambda f: with_more(f, "model.norm.bias"), r"model\.norm\.bias is unknown"),
  "cut": (cut, r"model\.safetensors is damaged or cut short"),
  "no_weights": (lambda f: (f / "model.safetensors").unlink(), r"there is no \.safetensors file"),
  "no_json": (lambda f: (f / "config.json").write_text("{"), r"is no model|cannot be read"),
  "no_size": (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), r"config\.json has no vocab_size"),
  "text_size": (lambda f: edited(f, hidden_size="32"), r"model_width='32' must be a whole number"),
  "no_tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer=.*tokenizer\.json'?: cannot be read"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_wrong_with_a_folder_is_said_in_one_line(damage, message, tmp_path, tokenizer_json):
  folder = save(make_model(), tmp_path / "hf", tokenizer_json)
  damage(folder)
  with pytest.raises(UserError, match=message) as caught:
    inference.open_model(folder, report=lambda line: None)
  assert "\n" not in str(caught.value)


def test_a_tokenizer_with_more_ids_than_rows_is_refused(tmp_path, tokenizer_json):
  folder = save(make_model(vocab_size=270), tmp_path / "hf", tokenizer_json)
  with pytest.raises(UserError, match=r"the tokenizer has 275 ids, but .* has 270 rows"):
    convert.import_folder(folder, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_a_model_without_neurons_and_weights_beyond_float16_are_not_exported(tmp_path, tokenizer_json):
  shape = {"vocab_size": 275, "context_length": 8, "num_layers": 1, "model_width": 8, "num_heads": 1}
  write_run(tmp_path / "none", ModelConfig(**shape, ffn_kind="none"), tokenizer_json, vocab_size=275)
  with pytest.raises(UserError, match=r"ffn_kind='none' has no counterpart in transformers"):
    convert.export_run(tmp_path / "none", tmp_path / "out", report=lambda line: None)
  write_run(tmp_path / "big", ModelConfig(**shape, init_std=1e5), tokenizer_json, vocab_size=275)
  with pytest.raises(UserError, match=r"weights beyond the range of float16; give --dtype=bfloat16"):
    convert.export_run(tmp_path / "big", tmp_path / "out", dtype="float16", report=lambda line: None)
  assert [*tmp_path.glob("*out*")] == []


def test_a_checkpoint_of_before_is_refused_in_one_line(tmp_path, tokenizer_json):
  shape = {"vocab_size": 275, "context_length": 8, "num_layers": 1, "model_width": 8, "num_heads": 1, "ffn_width": 8}
  write_run(tmp_path / "run", ModelConfig(**shape), tokenizer_json, vocab_size=None)
  with pytest.raises(UserError, match=r"checkpoints/7 is of a version that did not say which rows"):
    inference.open_model(tmp_path / "run")


def test_nothing_is_overwritten(tmp_path, tokenizer_json):
  folder = save(make_model(), tmp_path / "hf", tokenizer_json)
  convert.import_folder(folder, tmp_path / "run", report=lambda line: None)
  with pytest.raises(UserError, match=r"already holds a run; give another --workdir"):
    convert.import_folder(folder, tmp_path / "run", report=lambda line: None)
  (tmp_path / "file").write_text("")
  for target, why in ((folder, "is not empty"), (tmp_path / "file", "is a file")):
    with pytest.raises(UserError, match=rf"exists and {why}"):
      convert.export_run(tmp_path / "run", target, report=lambda line: None)


def test_an_import_that_was_killed_is_done_again(tmp_path, tokenizer_json):
  folder = save(make_model(), tmp_path / "hf", tokenizer_json)
  path = convert.import_folder(folder, tmp_path / "run", report=lambda line: None)
  shutil.rmtree(path)  # killed after config.json, before its checkpoint was whole
  assert convert.import_folder(folder, tmp_path / "run", report=lambda line: None) == path
  assert inference.open_model(tmp_path / "run").step == 0


def test_the_program_converts_both_ways_and_refuses_in_one_line(tmp_path, tokenizer_json):
  folder = save(make_model(), tmp_path / "hf", tokenizer_json)
  run, into, out = f"--workdir={tmp_path / 'run'}", f"--from_hf={folder}", f"--to_hf={tmp_path / 'out'}"
  imported, exported, *wrong = program.answers(
    "experiments.convert_hf",
    [into, run],
    [out, run, "--dtype=bfloat16"],
    [into, out, run],
    [run],
    [into],
    [out, run, "--fsdp=2"],
    [into, run, "--dtype=bfloat16"],
    [f"--to_hf={tmp_path / 'other'}", f"--workdir={tmp_path / 'nowhere'}"],
  )
  assert (imported[0], imported[2], exported[0], exported[2]) == (0, "", 0, "")
  assert f"checkpoint.restore_path={tmp_path / 'run' / 'checkpoints' / '0'}" in imported[1]
  assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype == "bfloat16"
  said = [
    "give one of --from_hf=FOLDER",
    "give one of --from_hf=FOLDER",
    "--workdir is missing",
    "--fsdp has no effect in this direction",
    "--dtype has no effect in this direction",
    f"there is no {tmp_path / 'nowhere'}",
  ]
  for (code, _, stderr), message in zip(wrong, said, strict=True):
    assert (code, stderr.count("\n")) == (2, 1), stderr
    assert message in stderr


@pytest.mark.slow
def test_training_starts_from_a_converted_checkpoint_but_not_in_its_folder(tmp_path, config_for, tokenizer_json):
  folder = save(make_model(hidden_act="relu", num_key_value_heads=2), tmp_path / "hf", tokenizer_json)
  path = convert.import_folder(folder, tmp_path / "run", report=lambda line: None)
  config = config_for(path, tokenizer_json)
  train(config, tmp_path / "tuned", progress=Progress(1, io.StringIO()))
  before, after = (inference.open_model(tmp_path / name, report=lambda line: None) for name in ("run", "tuned"))
  leaves = zip(jax.tree.leaves(before.model), jax.tree.leaves(after.model))
  moved = [float(jnp.abs(a[: len(b)] - b).max()) for a, b in leaves]  # the imported vocabulary has more rows
  assert 0 < max(moved) < 0.01  # two small steps away, and nowhere near a fresh start
  converted = recorder.read_json(tmp_path / "run" / "config.json")
  with pytest.raises(UserError, match=r"holds the parameters of a converted checkpoint, and no run; .*restore_path="):
    train(config, tmp_path / "run", progress=Progress(1, io.StringIO()))
  assert recorder.read_json(tmp_path / "run" / "config.json") == converted


@pytest.fixture
def config_for(corpus):
  """Two steps of training the model of a converted checkpoint on the small corpus."""

  def make(path, tokenizer_json):
    config = config_io.from_dict(LmConfig, checkpoint.read_metadata(path)["config"])
    config.data.source, config.data.path, config.data.tokenizer = "text", f"{corpus}/*.txt", str(tokenizer_json)
    config.data.cache_dir, config.training.steps, config.training.batch_size = str(corpus / "cache"), 2, 2
    config.training.warmup_steps, config.training.learning_rate, config.parallel.data = 0, 1e-3, 1
    config.training.eval_batches, config.checkpoint.restore_path = 1, str(path)
    config.validate()
    return config

  return make


def test_a_converted_checkpoint_has_a_config_that_training_takes(tmp_path, tokenizer_json):
  folder = save(make_model(), tmp_path / "hf", tokenizer_json)
  path = convert.import_folder(folder, tmp_path / "run", report=lambda line: None)
  metadata = checkpoint.read_metadata(path)
  assert metadata["config"]["model"]["model_width"] == SHAPE["hidden_size"]
  assert metadata["dataset"] is None
  assert LmConfig(model=ModelConfig(**metadata["config"]["model"])).validate() is None
