"""A decoder in float64 NumPy with loops, written from the papers; shares no line with the library."""

import numpy as np


def norm(x, scale, epsilon):
  return np.array([row / np.sqrt(np.sum(row * row) / len(row) + epsilon) for row in x]) * scale


def rope(head, position, theta):
  """Complex rotation of the pairs (i, i + K/2)."""
  half = len(head) // 2
  turned = (head[:half] + 1j * head[half:]) * np.exp(1j * position * theta ** (-np.arange(half) / half))
  return np.concatenate([turned.real, turned.imag])


def attention(x, w, documents, theta):
  length = len(x)
  heads, groups = w["w_query_HKD"].shape[0], w["w_key_GKD"].shape[0]
  out = np.zeros_like(x)
  for h in range(heads):
    g = h // (heads // groups)
    q = np.array([rope(w["w_query_HKD"][h] @ x[i], i, theta) for i in range(length)])
    k = np.array([rope(w["w_key_GKD"][g] @ x[i], i, theta) for i in range(length)])
    v = np.array([w["w_value_GKD"][g] @ x[i] for i in range(length)])
    for i in range(length):
      seen = [j for j in range(i + 1) if documents is None or documents[j] == documents[i]]
      scores = np.array([q[i] @ k[j] for j in seen]) / np.sqrt(q.shape[1])
      p = np.exp(scores - scores.max())
      out[i] += w["w_out_HKD"][h].T @ (sum(a * v[j] for a, j in zip(p, seen)) / p.sum())
  return out


def feedforward(x, w, kind):
  """Output, hidden values, and which neurons fire."""
  if kind == "none":
    return np.zeros_like(x), np.zeros((len(x), 0)), np.zeros((len(x), 0), bool)
  up = x @ w["w_up_FD"].T
  if kind == "relu":
    gate, h = up, np.maximum(up, 0)
  else:
    gate = x @ w["w_gate_FD"].T
    h = up * (np.maximum(gate, 0) if kind == "gated_relu" else gate / (1 + np.exp(-gate)))
  return h @ w["w_down_FD"], h, gate > 0


def layer_of(tree, layer):
  return {k: layer_of(v, layer) if isinstance(v, dict) else v[layer] for k, v in tree.items()}


def decoder(parameters, tokens, config, documents=None):
  """Hidden states after the last norm, logits, and per layer (hidden values, fires), for one sequence."""
  x = parameters["embedding_VD"][tokens]
  layers = []
  for layer in range(config.num_layers):
    block = layer_of(parameters["blocks"], layer)
    x = x + attention(
      norm(x, block["attention_norm"]["scale_D"], config.norm_epsilon), block["attention"], documents, config.rope_theta
    )
    y, h, fires = feedforward(
      norm(x, block["feedforward_norm"]["scale_D"], config.norm_epsilon), block.get("feedforward", {}), config.ffn_kind
    )
    x = x + y
    layers.append((h, fires))
  x = norm(x, parameters["final_norm"]["scale_D"], config.norm_epsilon)
  return x, x @ parameters.get("head_VD", parameters["embedding_VD"]).T, layers
