"""Named sizes of embedding bags, shared by tests, compile checks and benchmarks.

Dimension key: V table rows, D row width, B bags, T ids. T is B * mean_length; the lengths are drawn uneven, since equal
ones flatter every schedule.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class BagShape:
  V: int
  D: int
  B: int
  mean_length: int
  dtype: type = jnp.float32
  zipf: bool = False  # ids by popularity 1 / rank, as in click logs; otherwise every row is equally likely

  @property
  def T(self) -> int:
    return self.B * self.mean_length

  def draw_ids(self, rng: np.random.Generator) -> np.ndarray:
    if not self.zipf:
      return rng.integers(0, self.V, self.T, dtype=np.int32)
    # Inverse of the continuous 1/x law on [1, V + 1): no table of V probabilities. Popular rows are scattered, because
    # a hash gives them no order in memory either.
    ranks = np.floor(np.exp(rng.random(self.T) * np.log(self.V + 1.0))).astype(np.int64) - 1
    return rng.permutation(self.V).astype(np.int32)[np.minimum(ranks, self.V - 1)]

  def draw_offsets(self, rng: np.random.Generator) -> np.ndarray:
    """Geometric-like lengths: sorted uniform cuts of the T ids, so some bags are empty and a few are long."""
    cuts = np.sort(rng.integers(0, self.T + 1, self.B - 1))
    return np.concatenate([[0], cuts, [self.T]]).astype(np.int32)


_FRONT_END = BagShape(V=1 << 20, D=128, B=65536, mean_length=20)

BENCHMARK = {
  "fp32_uniform": _FRONT_END,
  "fp32_zipf": dataclasses.replace(_FRONT_END, zipf=True),
  "bf16_uniform": dataclasses.replace(_FRONT_END, dtype=jnp.bfloat16),
  "bf16_zipf": dataclasses.replace(_FRONT_END, dtype=jnp.bfloat16, zipf=True),
  "fp32_wide": BagShape(V=1 << 18, D=512, B=16384, mean_length=20),
  "bf16_wide": BagShape(V=1 << 18, D=1024, B=16384, mean_length=20, dtype=jnp.bfloat16),
  "fp32_short_bags": BagShape(V=1 << 20, D=128, B=262144, mean_length=2),
}

# Small enough for the interpreter; the widths take every load width and a second block of columns.
TEST = {
  "one_block": BagShape(V=11, D=128, B=5, mean_length=4),
  "wide_fp32": BagShape(V=7, D=1024, B=3, mean_length=3),
  "wide_bf16": BagShape(V=7, D=1024, B=3, mean_length=3, dtype=jnp.bfloat16),
  "odd_blocks_bf16": BagShape(V=7, D=384, B=3, mean_length=3, dtype=jnp.bfloat16),
}
