"""Named sizes of jagged attention, for benchmarks; the lengths follow the protocol of the published GDPA kernels.

Dimension key: B rows, L longest row, H query heads, K head width.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class JaggedShape:
  """Rows of up to `L` tokens; `fill` is about the mean share of L that a row has."""

  B: int
  L: int
  H: int = 4
  K: int = 128
  fill: float = 1.0
  keys: int | None = None  # of every row; None: the queries' own tokens
  queries: int | None = None  # of every row, the same ones; None: as many as keys
  dtype: type = jnp.bfloat16

  def draw_lengths(self, rng: np.random.Generator) -> np.ndarray:
    """Uniform integers in [(2 fill - 1) L, L], or in [1, 2 fill L] below a half."""
    if self.fill < 0.5:
      return rng.integers(1, int(2 * self.fill * self.L) + 1, self.B)
    return rng.integers(int((2 * self.fill - 1) * self.L), self.L + 1, self.B)


def _rec(L: int, fill: float, **changes) -> JaggedShape:
  return JaggedShape(B=1152, L=L, fill=fill, **changes)


BENCHMARK = {f"L={L} fill={fill:g}": _rec(L, fill) for L in (256, 512, 1024, 2048) for fill in (1.0, 0.5)}
BENCHMARK |= {f"L={L} keys=256": _rec(L, 1.0, keys=256) for L in (1024, 2048)}
BENCHMARK |= {
  "L=2048 seeds=64 fill=0.5": _rec(2048, 0.5, queries=64),
  "hstu L=2048": JaggedShape(B=256, L=2048),
  # Lengths from 1000 to 2000 tokens, 1.73 million in all, as in the published benchmark of block attention.
  "blocks L=2000 fill=0.75": _rec(2000, 0.75),
}
