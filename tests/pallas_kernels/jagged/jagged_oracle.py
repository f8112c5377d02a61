"""Attention on jagged rows as float64 loops over rows and heads, with all gradients; shares nothing with the code.

Derivatives of activations are differences, so that no formula is written twice.
"""

import dataclasses
import math

import numpy as np
from scipy import special

ACTIVATIONS = {
  "raw": lambda x: x,
  "gelu": lambda x: x * special.ndtr(x),
  "gelu_approx": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
  "relu": lambda x: np.maximum(x, 0),
  "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
  "relu_square": lambda x: np.maximum(x, 0) ** 2,
  "silu": lambda x: x * special.expit(x),
  "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
}


@dataclasses.dataclass
class Bias:
  """Tables of 2 N - 1 and 129 numbers, and a time for each token."""

  position: np.ndarray
  time: np.ndarray
  timestamps: np.ndarray

  def places(self, start, end):
    """Of a row: where each pair looks in either table."""
    n = (len(self.position) + 1) // 2
    position, bucket = (np.zeros((end - start, end - start), int) for _ in range(2))
    for i in range(end - start):
      for j in range(end - start):
        position[i, j] = j - i + n - 1
        asked = self.timestamps[min(start + i + 1, end - 1)]
        distance = max(1, abs(int(asked) - int(self.timestamps[start + j])))
        bucket[i, j] = min(128, math.floor(math.log(distance) / 0.301))
    return position, bucket


def sees(i, j, *, causal=False, window=None, block=None, history=None) -> bool:
  """Of query i and key j of one row."""
  return (
    (not causal or j <= i)
    and (window is None or abs(i - j) <= window)
    and (block is None or i // block == j // block)
    and (history is None or j < history or i == j)
  )


def turn(x, angles):
  """Pairs of neighbouring features of [T, H, K], as complex numbers, by angles [T, K / 2]."""
  z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles[:, None])
  return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def turned_attention(q, k, v, q_offsets, k_offsets, *, angles, values, **options):
  """`attention` of turned q and k, and v if asked for; gradients are those before they were turned."""
  wide = [np.asarray(a, np.float64) for a in (q, k, v)]
  turned = [turn(a, angles) if name != "v" or values else a for name, a in zip("qkv", wide, strict=True)]
  o, d = attention(*turned, q_offsets, k_offsets, **options)
  return o, {name: turn(a, -angles) if name in "qk" or (name == "v" and values) else a for name, a in d.items()}


def attention(
  q,
  k,
  v,
  q_offsets,
  k_offsets,
  *,
  activation="softmax",
  pre=None,
  post=1.0,
  num_targets=None,
  bias=None,
  d_o=None,
  **mask,
):
  """o, and for a cotangent d_o a dict of all gradients."""
  q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
  heads, repeats = q.shape[1], q.shape[1] // k.shape[1]
  names = [activation] * heads if isinstance(activation, str) else activation
  o = np.zeros_like(q)
  d = {"q": np.zeros_like(q), "k": np.zeros_like(k), "v": np.zeros_like(v)}
  if bias is not None:
    d |= {"position": np.zeros(len(bias.position)), "time": np.zeros(len(bias.time))}
  for b in range(len(q_offsets) - 1):
    own, keys = slice(q_offsets[b], q_offsets[b + 1]), slice(k_offsets[b], k_offsets[b + 1])
    history = None if num_targets is None else own.stop - own.start - num_targets[b]
    seen = np.array(
      [
        [sees(i, j, history=history, **mask) for j in range(keys.stop - keys.start)]
        for i in range(own.stop - own.start)
      ]
    ).reshape(own.stop - own.start, keys.stop - keys.start)
    if not seen.any():
      continue
    for h, name in enumerate(names):
      g = h // repeats
      scale = pre if pre is not None else (1 / math.sqrt(q.shape[2]) if name == "softmax" else 1.0)
      s = scale * q[own, h] @ k[keys, g].T
      if bias is not None:
        places = bias.places(own.start, own.stop)
        s = s + bias.position[places[0]] + bias.time[places[1]]
      if name == "softmax":
        s = np.where(seen, s, -np.inf)
        top = np.max(s, axis=1, keepdims=True)
        e = np.exp(s - np.where(np.isfinite(top), top, 0))
        p = e / np.maximum(e.sum(axis=1, keepdims=True), 1e-300)
      else:
        p = np.where(seen, ACTIVATIONS[name](s), 0)
      o[own, h] = post * p @ v[keys, g]
      if d_o is None:
        continue
      up = np.asarray(d_o, np.float64)[own, h]
      d_p = post * up @ v[keys, g].T
      d["v"][keys, g] += post * p.T @ up
      if name == "softmax":
        d_s = p * (d_p - np.sum(p * d_p, axis=1, keepdims=True))
      else:
        act = ACTIVATIONS[name]
        d_s = np.where(seen, d_p * (act(s + 1e-6) - act(s - 1e-6)) / 2e-6, 0)
      d["q"][own, h] += scale * d_s @ k[keys, g]
      d["k"][keys, g] += scale * d_s.T @ q[own, h]
      if bias is not None:
        np.add.at(d["position"], places[0], d_s)
        np.add.at(d["time"], places[1], d_s)
  return o, d
