"""What one call of the attention family computes: scales, activation, mask. Forward and backward share it.

s = pre_scale * (q . k) + bias,   p = post_scale * act(s) where visible, else 0,   o = p v          (GDPA, HSTU)
s as above,                       p = post_scale * softmax over the visible keys,   o = p v
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.jagged.activations import ACTIVATIONS
from pallas_kernels.jagged.geometry import Mask

SOFTMAX = "softmax"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
  """Static, and so part of what a program is compiled for."""

  activations: tuple[str, ...]  # one for all heads, or one for each
  pre_scale: float
  post_scale: float
  mask: Mask
  broadcast_q: bool = False  # the same queries for every row
  own_blocks: bool = False  # the kernels of block attention may serve
  turn_values: bool = False  # by the rotary embedding, as it turns q and k

  @property
  def is_softmax(self) -> bool:
    """Then the other heads' are it too."""
    return self.activations[0] == SOFTMAX

  def activate(self, s_HQS: jax.Array) -> jax.Array:
    """act(s), head by head."""
    return self._by_head([ACTIVATIONS[name].value for name in self.activations], s_HQS)

  def slope(self, s_HQS: jax.Array) -> jax.Array:
    """act'(s)."""
    return self._by_head([ACTIVATIONS[name].derivative for name in self.activations], s_HQS)

  def activate_one(self, s_QS: jax.Array, head) -> jax.Array:
    """act(s) of one head, whose number kernels know at run time."""
    return self._of_head("value", s_QS, head)

  def slope_one(self, s_QS: jax.Array, head) -> jax.Array:
    """act'(s) of one head."""
    return self._of_head("derivative", s_QS, head)

  def _of_head(self, which: str, s_QS: jax.Array, head) -> jax.Array:
    names = sorted(set(self.activations))
    functions = [getattr(ACTIVATIONS[name], which) for name in names]
    if len(functions) == 1:
      return functions[0](s_QS)
    choice = jnp.int32(0)
    for h, name in enumerate(self.activations):
      choice = jnp.where(head == h, names.index(name), choice)
    return lax.switch(choice, functions, s_QS)

  @staticmethod
  def _by_head(functions, s_HQS: jax.Array) -> jax.Array:
    if len(functions) == 1:
      return functions[0](s_HQS)
    return jnp.stack([function(s_QS) for function, s_QS in zip(functions, s_HQS, strict=True)])
