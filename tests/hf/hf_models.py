"""Small checkpoints made by transformers itself, the oracle, in every way that their weights are stored."""

import json

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB = 300


SHAPE = {
  "vocab_size": VOCAB,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 4,
  "max_position_embeddings": 64,
  "bos_token_id": 0,
  "eos_token_id": 0,
}


def make_model(*, family="Llama", seed=0, **changes):
  """A model of transformers with weights so large that any mistake shows in the logits."""
  config = getattr(transformers, f"{family}Config")(**SHAPE | {"tie_word_embeddings": False} | changes)
  torch.manual_seed(seed)
  model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 2 else 0.5))
  return model


def logits_of(model, tokens_BL):
  """f32[B, L, V] at every position."""
  with torch.no_grad():
    return model(torch.tensor(np.asarray(tokens_BL), dtype=torch.long)).logits.float().numpy()


def save(model, folder, tokenizer_json, **options):
  """As a user of transformers would save it."""
  model.save_pretrained(folder, **options)
  (folder / "tokenizer.json").write_text(tokenizer_json.read_text())
  return folder


def restyle(folder, style, *, gated):
  """Rewrites a saved folder in one of the authors' styles, with what else their files hold; `hidden_act` is wrong."""
  path = folder / "model.safetensors"
  weights = load_file(path)
  names = {
    "hf": ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    "older": ("gate_weight", "up_weight", "down_weight"),
    "kernel": ("GATE", "UP", "DOWN"),
  }[style]
  for layer in range(SHAPE["num_hidden_layers"]):
    mlp = f"model.layers.{layer}.mlp."
    gate, up, down = (weights.pop(f"{mlp}{name}_proj.weight", None) for name in ("gate", "up", "down"))
    if style == "older":
      gate, up, down = (None if gate is None else gate.T), (up if gated else up.T), down.T
    if style == "kernel":
      down = down.T
    for name, weight in zip(names, (gate, up, down)):
      if weight is not None:
        weights[mlp + name] = weight.contiguous()
    weights[f"{mlp}tracker.age"] = torch.arange(48)
    weights[f"{mlp}metrics_accumulator.l0"] = torch.zeros(1)
  save_file(weights, path, {"format": "pt"})
  values = json.loads((folder / "config.json").read_text())
  values |= {"model_type": "llama_sparse_relu", "hidden_act": "silu", "architectures": ["LlamaSparseReluForCausalLM"]}
  (folder / "config.json").write_text(json.dumps(values))
  return folder
