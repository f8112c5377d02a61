"""Rotary embedding of queries and keys, whose gradients the kernels turn back before they round them.

Dimension key: T tokens, H heads, K head width, P = K / 2 pairs of neighbouring features.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotary:
  """Angles by which pairs of features (2 p, 2 p + 1) are turned, one for each token and pair (gem, 3.3).

  (x, y) becomes (x cos - y sin, y cos + x sin). Angles may come from positions, from times, or from both. They are
  constants: no gradient reaches them.

  Args:
    cos_TP: f32[T, K / 2], of the tokens of q, which are those of k.
    sin_TP: likewise.
    values: turn v, too, as block attention does.
  """

  cos_TP: jax.Array
  sin_TP: jax.Array
  values: bool = dataclasses.field(default=False, metadata=dict(static=True))

  def check(self, op: str, num_tokens: int, num_keys: int, width: int) -> None:
    """Raises for shapes and dtypes that do not fit."""
    if num_keys != num_tokens:
      raise ValueError(f"{op}: rotary is for q and k of the same tokens, and q has {num_tokens}, k {num_keys} of them")
    if width % 2:
      raise ValueError(f"{op}: rotary turns pairs of features, and the heads have K={width}; pad q, k and v")
    if not isinstance(self.values, bool):
      raise TypeError(f"{op}: rotary.values={self.values!r} must be True or False")
    for name, a_TP in (("cos_TP", self.cos_TP), ("sin_TP", self.sin_TP)):
      if not hasattr(a_TP, "dtype"):
        raise TypeError(f"{op}: rotary.{name} must be an array, got {type(a_TP).__name__}")
      if a_TP.shape != (num_tokens, width // 2) or a_TP.dtype != jnp.float32:
        raise ValueError(
          f"{op}: rotary.{name} must be float32[{num_tokens}, {width // 2}], an angle for each token and pair of"
          f" features, got {a_TP.dtype}{a_TP.shape}"
        )

  def until(self, end) -> "Rotary":
    """Does not turn the tokens from `end` on, whose angles may be anything."""
    inside_T1 = (jnp.arange(len(self.cos_TP)) < end)[:, None]
    return Rotary(jnp.where(inside_T1, self.cos_TP, 1), jnp.where(inside_T1, self.sin_TP, 0), self.values)

  def turned(self, x_THK: jax.Array) -> jax.Array:
    """In float32, rounded to the dtype of x."""
    return _turned(x_THK, self.cos_TP, self.sin_TP)

  def turned_back(self, x_THK: jax.Array) -> jax.Array:
    """The inverse of `turned`, and its transpose."""
    return _turned(x_THK, self.cos_TP, -self.sin_TP)


def _turned(x_THK: jax.Array, cos_TP: jax.Array, sin_TP: jax.Array) -> jax.Array:
  wide = x_THK.astype(jnp.promote_types(x_THK.dtype, jnp.float32))
  x_THP, y_THP = wide[..., 0::2], wide[..., 1::2]
  cos_T1P, sin_T1P = cos_TP[:, None], sin_TP[:, None]
  pairs = jnp.stack([x_THP * cos_T1P - y_THP * sin_T1P, y_THP * cos_T1P + x_THP * sin_T1P], axis=-1)
  return pairs.reshape(x_THK.shape).astype(x_THK.dtype)
