"""Where each of our parameters lies in a Hugging Face checkpoint, and how our config reads in its config.json.

A checkpoint stores a tensor for each layer; we stack them. All of its matrices have two axes, and each is either like
ours with the leading axes merged ("rows": [H * K, D], [F, D], [V, D]) or the transpose of that ("columns": [D, F]).

The authors of the paper have published three ways to store the feed-forward weights, which differ in names and in which
matrices are transposed (`FEEDFORWARD`); every one of their models is ReLU, though its config says `hidden_act: silu`.

Dimension key: D model width, F hidden neurons, V vocabulary, H heads, K head width.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

from sparse_lm import config_io
from sparse_lm.config import ModelConfig
from sparse_lm.errors import UserError

Json = dict[str, Any]
AUTHORS = "llama_sparse_relu"


@dataclasses.dataclass(frozen=True)
class Stored:
  """A tensor of a checkpoint; `{layer}` in its key stands for the number of the layer."""

  key: str
  form: Literal["vector", "rows", "columns"]


_LAYER = "model.layers.{layer}."
_OUTSIDE_FEEDFORWARD = {
  "embedding_VD": Stored("model.embed_tokens.weight", "rows"),
  "head_VD": Stored("lm_head.weight", "rows"),
  "final_norm/scale_D": Stored("model.norm.weight", "vector"),
  "blocks/attention_norm/scale_D": Stored(_LAYER + "input_layernorm.weight", "vector"),
  "blocks/feedforward_norm/scale_D": Stored(_LAYER + "post_attention_layernorm.weight", "vector"),
  "blocks/attention/w_query_HKD": Stored(_LAYER + "self_attn.q_proj.weight", "rows"),
  "blocks/attention/w_key_GKD": Stored(_LAYER + "self_attn.k_proj.weight", "rows"),
  "blocks/attention/w_value_GKD": Stored(_LAYER + "self_attn.v_proj.weight", "rows"),
  "blocks/attention/w_out_HKD": Stored(_LAYER + "self_attn.o_proj.weight", "columns"),
}
_GATE, _UP, _DOWN = (f"blocks/feedforward/w_{name}_FD" for name in ("gate", "up", "down"))


def _feedforward(names: str, gate: str, up: str, down: str) -> dict[str, Stored]:
  keys = [f"{_LAYER}mlp.{name}" for name in names.split()]
  return {ours: Stored(key, form) for ours, key, form in zip((_GATE, _UP, _DOWN), keys, (gate, up, down))}  # type: ignore[arg-type]


HF_NAMES = "gate_proj.weight up_proj.weight down_proj.weight"
_OLDER_NAMES = "gate_weight up_weight down_weight"
# By whether the block is gated: the older style stores a non-gated up projection as it stores a gate.
FEEDFORWARD: dict[bool, tuple[dict[str, Stored], ...]] = {
  True: (
    _feedforward(HF_NAMES, "rows", "rows", "columns"),
    _feedforward(_OLDER_NAMES, "columns", "rows", "rows"),
    _feedforward("GATE UP DOWN", "rows", "rows", "rows"),
  ),
  False: (
    _feedforward(HF_NAMES, "rows", "rows", "columns"),
    _feedforward(_OLDER_NAMES, "columns", "columns", "rows"),
    _feedforward("GATE UP DOWN", "rows", "rows", "rows"),
  ),
}


def tensors(config: ModelConfig, feedforward: Mapping[str, Stored] | None = None) -> dict[str, Stored]:
  """Where each parameter of a model lies, by the parameter's path; None: in the style of transformers itself."""
  gated = config.ffn_kind.startswith("gated")
  found = _OUTSIDE_FEEDFORWARD | dict(feedforward or FEEDFORWARD[gated][0])
  if config.tie_embeddings:
    del found["head_VD"]
  if not gated:
    del found[_GATE]
  return found


def style_of(keys: Collection[str]) -> tuple[bool, dict[str, Stored]]:
  """(gated, where the feed-forward weights lie), from the names that a checkpoint has for its first layer.

  Raises:
    UserError: it has none of the known ones.
  """
  for with_gate, without_gate in zip(FEEDFORWARD[True], FEEDFORWARD[False]):
    if with_gate[_UP].key.format(layer=0) in keys:
      gated = with_gate[_GATE].key.format(layer=0) in keys
      return gated, with_gate if gated else without_gate
  known = ", ".join(style[_UP].key.format(layer=0) for style in FEEDFORWARD[True])
  raise UserError(f"it has no feed-forward weights under a known name (looked for {known})")


def ignored(key: str, config: ModelConfig) -> bool:
  """True for what holds no parameter: statistics of the authors' training, old tables of rotary frequencies, a copy."""
  parts = key.split(".")
  return (
    "tracker" in parts
    or "metrics_accumulator" in parts
    or key.endswith("rotary_emb.inv_freq")
    or (config.tie_embeddings and key == "lm_head.weight")
  )


def config_from_hf(values: Json, *, gated: bool, has_head: bool) -> ModelConfig:
  """The model that a config.json describes.

  Args:
    values: the content of config.json; what it leaves out has the default of transformers.
    gated: whether the checkpoint has gate matrices.
    has_head: whether the checkpoint has an output head; decides only if config.json does not say.

  Raises:
    UserError: it describes something that our models do not compute.
  """
  kind = values.get("model_type")
  if kind not in ("llama", "arcee", AUTHORS):
    raise UserError(f"model_type={kind!r} is not supported; supported: llama, arcee, {AUTHORS}")
  try:
    sizes = {ours: values[theirs] for ours, theirs in _SIZES.items()}
  except KeyError as error:
    raise UserError(f"config.json has no {error.args[0]}") from None
  rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
  found = {
    **sizes,
    "num_kv_heads": values.get("num_key_value_heads"),
    "context_length": values.get("max_position_embeddings", 4096 if kind == "arcee" else 2048),
    "ffn_kind": _ffn_kind(values, gated=gated),
    "tie_embeddings": values.get("tie_word_embeddings", not has_head),
    "rope_theta": rope.get("rope_theta", values.get("rope_theta", 10_000.0)),
    "norm_epsilon": values.get("rms_norm_eps", 1e-6 if kind == "llama" else 1e-5),
    "init_std": values.get("initializer_range", 0.02),
  }
  config = config_io.from_dict(ModelConfig, found)
  config.validate()
  refused = {
    "rope_type": (rope.get("rope_type", rope.get("type", "default")), ("default",)),
    "attention_bias": (values.get("attention_bias", False), (False,)),
    "mlp_bias": (values.get("mlp_bias", False), (False,)),
    "head_dim": (values.get("head_dim"), (None, config.head_width)),
  }
  for name, (value, allowed) in refused.items():
    if value not in allowed:
      raise UserError(f"{name}={value!r} is not supported; our models have {name}={allowed[-1]!r}")
  return config


_SIZES = {
  "vocab_size": "vocab_size",
  "num_layers": "num_hidden_layers",
  "model_width": "hidden_size",
  "num_heads": "num_attention_heads",
  "ffn_width": "intermediate_size",
}


def _ffn_kind(values: Json, *, gated: bool) -> str:
  kind = values["model_type"]
  if kind == AUTHORS:  # its hidden_act is a leftover of the config that it was made from
    return "gated_relu" if gated else "relu"
  activation = values.get("hidden_act", "silu" if kind == "llama" else "relu2")
  known = {(True, "relu"): "gated_relu", (True, "silu"): "gated_silu", (False, "relu"): "relu"}
  if (gated, activation) not in known:
    raise UserError(
      f"hidden_act={activation!r} {'with' if gated else 'without'} a gate is not supported; supported: relu, and silu"
      " with a gate"
    )
  return known[gated, activation]


def config_to_hf(config: ModelConfig, *, dtype: str, eos_id: int) -> Json:
  """The config.json from which transformers builds the same function.

  A block without gate is what transformers has as Arcee with `hidden_act: relu`.

  Raises:
    UserError: transformers has no such model.
  """
  families = {"gated_relu": ("Llama", "relu"), "gated_silu": ("Llama", "silu"), "relu": ("Arcee", "relu")}
  if config.ffn_kind not in families:
    raise UserError(
      f"model.ffn_kind={config.ffn_kind!r} has no counterpart in transformers; {', '.join(families)} have"
    )
  family, activation = families[config.ffn_kind]
  return {
    "architectures": [f"{family}ForCausalLM"],
    "model_type": family.lower(),
    **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
    "num_key_value_heads": config.kv_heads,
    "head_dim": config.head_width,
    "hidden_act": activation,
    "max_position_embeddings": config.context_length,
    "rms_norm_eps": config.norm_epsilon,
    "initializer_range": config.init_std,
    "tie_word_embeddings": config.tie_embeddings,
    "rope_theta": config.rope_theta,  # where transformers 4 reads it
    "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},  # where transformers 5 does
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": eos_id,  # documents are separated by one token, which ends one and starts the next
    "eos_token_id": eos_id,
    "dtype": dtype,  # transformers 5
    "torch_dtype": dtype,  # transformers 4
  }
