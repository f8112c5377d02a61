"""Floating-point operations of a step, and the share of the hardware's peak that they reach.

Counted by hand from the shapes, as if the FFN were dense: 2 operations a weight and token for every projection (the
tied head once, the embedding look-up not at all), and for attention 4 H K operations for each of the (L + 1) / 2 keys
that a token sees on average under the causal mask. The backward pass costs twice the forward; recomputation is not
counted.
"""

import jax

from sparse_lm.config import ModelConfig

FORMULA = (
  "MFU = 3 * tokens/s * (2 * projection weights + 4 * layers * model width * (context + 1) / 2)"
  " / (devices * peak FLOP/s)"
)

# Dense bf16 FLOP/s by the vendors' data sheets; matched as a prefix of the device's name.
PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100": 989e12, "NVIDIA A100": 312e12}

# Bytes a second of their memory, by the same sheets.
PEAK_BYTES = {"NVIDIA H200": 4.8e12, "NVIDIA H100 PCIe": 2.0e12, "NVIDIA H100": 3.35e12, "NVIDIA A100": 2.0e12}


def forward_flops_per_token(model: ModelConfig, *, with_head: bool = True) -> float:
  """Operations of the forward pass for one token of a full context."""
  width, kv_width = model.model_width, model.kv_heads * model.head_width
  attention = 2 * width * width + 2 * width * kv_width
  matrices = {"gated_relu": 3, "gated_silu": 3, "relu": 2, "none": 0}[model.ffn_kind]
  projections = model.num_layers * (attention + matrices * width * model.ffn_width)
  head = model.vocab_size * width if with_head else 0
  scores = model.num_layers * 4 * width * (model.context_length + 1) / 2
  return 2 * (projections + head) + scores


def peak_flops(devices: list[jax.Device]) -> float | None:
  """Of all devices together; None where the peak is not known (CPUs)."""
  return _peak(PEAK_FLOPS, devices)


def peak_bytes_per_second(devices: list[jax.Device]) -> float | None:
  """What the memories of all devices deliver together; None where it is not known."""
  return _peak(PEAK_BYTES, devices)


def _peak(table: dict[str, float], devices: list[jax.Device]) -> float | None:
  return next((p * len(devices) for name, p in table.items() if devices[0].device_kind.startswith(name)), None)


def training_mfu(model: ModelConfig, tokens_per_second: float, devices: list[jax.Device]) -> float | None:
  """Model FLOP/s over peak (FORMULA); None where the peak is not known."""
  peak = peak_flops(devices)
  return None if peak is None else 3 * forward_flops_per_token(model) * tokens_per_second / peak
