"""The attention family on Hopper: the kernels joined.

Dimension key: T query tokens, S key tokens, B rows, L queries of every row, H query heads, G key heads, K head width.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.jagged import backward_hopper, bias_hopper, block_hopper, forward_hopper
from pallas_kernels.jagged.bias_hopper import Bias
from pallas_kernels.jagged.form import Form
from pallas_kernels.jagged.reference import Gradients
from pallas_kernels.jagged.rotary import Rotary
from pallas_kernels.jagged.schedule import Schedule, TileList

_WIDTHS = (64, 96, 128)


def unsupported(dtype, width: int, places: int) -> str | None:
  """Why the kernels cannot serve such arguments, or None if they can; `places` of a bias, 0 without one."""
  if dtype not in (jnp.bfloat16, jnp.float16):
    return f"{jnp.dtype(dtype).name} is neither bfloat16 nor float16"
  if width not in _WIDTHS:
    return f"head width K={width} is none of {_WIDTHS}; pad q, k and v with zero columns"
  if places > (most := bias_hopper.most_places(width)):
    return f"bias.position of {places} numbers; with K={width} the kernel of its gradient has room for {most}"
  return None


def forward(
  q_THK, k_SGK, v_SGK, bias: Bias | None, schedule: Schedule, form: Form, *, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
  """o_THK, and for softmax lse_HT, which has no value for tokens in no row. q is there for every row.

  Block attention has no sums.
  """
  if q_THK.size == 0 or k_SGK.size == 0:
    return jnp.zeros_like(q_THK), jnp.zeros(q_THK.shape[1::-1], jnp.float32) if form.is_softmax else None
  if (blocks := _blocks(schedule, form, bias, q_THK, k_SGK)) is not None:
    return block_hopper.forward(q_THK, k_SGK, v_SGK, blocks, form, interpret=interpret), None
  return forward_hopper.forward(q_THK, k_SGK, v_SGK, schedule.forward, form, bias, interpret=interpret)


def backward(
  q_THK,
  k_SGK,
  v_SGK,
  o_THK,
  lse_HT,
  d_o_THK,
  bias: Bias | None,
  rotary: Rotary | None,
  schedule: Schedule,
  form: Form,
  *,
  interpret: bool,
) -> Gradients:
  """Gradients in the dtypes of the arguments, turned back where q and k were turned."""
  if q_THK.size == 0 or k_SGK.size == 0:
    return Gradients(jnp.zeros_like(q_THK), jnp.zeros_like(k_SGK), jnp.zeros_like(v_SGK), None, None)
  turn = () if rotary is None else (rotary.cos_TP, rotary.sin_TP)
  if (blocks := _blocks(schedule, form, bias, q_THK, k_SGK)) is not None:
    d_q_THK, d_k_SGK, d_v_SGK = block_hopper.backward(
      q_THK, k_SGK, v_SGK, d_o_THK, blocks, turn, form, interpret=interpret
    )
    return Gradients(d_q_THK, d_k_SGK, d_v_SGK, None, None)
  delta_HT = None
  if form.is_softmax:
    delta_HT = jnp.einsum("THK,THK->HT", o_THK, d_o_THK, preferred_element_type=jnp.float32)
  arrays = q_THK, k_SGK, v_SGK, d_o_THK, lse_HT, delta_HT
  d_q_THK = backward_hopper.query_gradient(*arrays, schedule.query_gradient, turn, bias, form, interpret=interpret)
  d_k_SGK, d_v_SGK = backward_hopper.key_gradients(
    *arrays, schedule.key_gradients, turn, bias, form, interpret=interpret
  )
  d_tables = None, None
  if bias is not None:
    d_tables = bias_hopper.table_gradients(*arrays, schedule.query_gradient, bias, form, interpret=interpret)
  return Gradients(d_q_THK, d_k_SGK, d_v_SGK, *d_tables)


def _blocks(schedule: Schedule, form: Form, bias: Bias | None, q_THK, k_SGK) -> TileList | None:
  """The blocks that have kernels of their own; None where general ones serve."""
  return schedule.blocks if form.own_blocks and bias is None and q_THK.shape == k_SGK.shape else None
