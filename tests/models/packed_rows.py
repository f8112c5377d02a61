"""What tests of modules on packed tokens share: rows with NaN behind them, plain attention of one row, comparisons.

Oracles take `xp`: NumPy in float64 for values, jax.numpy for gradients. They see one row at a time, and no offsets.
"""

import itertools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from flax import nnx

PADDING = 3


def jit(f):
  """Compiled in a fifth of the time; these programs are small."""
  return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def offsets_of(lengths):
  return np.cumsum([0, *lengths]).astype(np.int32)


def tokens_of(lengths, *shape, seed=0):
  """[sum + 3, *shape], the last three NaN."""
  x = np.random.default_rng(seed).normal(size=(sum(lengths) + PADDING, *shape)).astype(np.float32)
  x[sum(lengths) :] = np.nan
  return x


def parameters(module):
  """Nested dicts of float64 arrays, by attribute name."""
  return jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(module)))


def by_row(xp, f, lengths, *packed):
  """f of each row's slices, joined again."""
  offsets = offsets_of(lengths)
  return xp.concatenate([f(*(a[start:end] for a in packed)) for start, end in itertools.pairwise(offsets)])


def rms(xp, x, epsilon=1e-5):
  return x / xp.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


def layer(xp, x, epsilon=1e-5):
  return rms(xp, x - x.mean(-1, keepdims=True), epsilon)


def silu(xp, x):
  return x / (1 + xp.exp(-x))


def softmax_attention(xp, q, k, v, sees=lambda i, j: True):
  """Heads of one row, [L, H, K]; every query of a row sees something."""
  seen = np.array([[sees(i, j) for j in range(len(k))] for i in range(len(q))], bool).reshape(1, len(q), len(k))
  e = xp.exp(xp.einsum("ihk,jhk->hij", q, k) / np.sqrt(q.shape[2])) * seen
  return xp.einsum("hij,jhk->ihk", e / e.sum(-1, keepdims=True), v) if len(k) else 0 * q


def project(xp, x, w):
  return xp.einsum("td,hkd->thk", x, w)


def merge(xp, o, w):
  return xp.einsum("thk,hkd->td", o, w)


def assert_close(found, expected, message="", tolerance=1e-4):
  """Against the largest expected number: sums of others may cancel."""
  expected = np.asarray(expected)
  atol = tolerance * max(np.abs(expected).max(initial=0), 1e-3)
  np.testing.assert_allclose(found, expected, rtol=tolerance, atol=atol, err_msg=message)


def assert_agrees(module, call, oracle, *inputs):
  """Values and gradients, of parameters and inputs, with the oracle's; what lies behind its values is padding."""
  exact = [np.asarray(a, np.float64) for a in inputs]
  expected = oracle(np, parameters(module), *exact)
  weights = np.random.default_rng(9).normal(size=expected.shape)
  every = tuple(range(1 + len(inputs)))

  def loss(module, *inputs):
    out = call(module, *inputs)
    return jnp.sum(out[: len(weights)] * jnp.asarray(weights, out.dtype)), out

  (_, out), (d_module, *d_inputs) = jit(jax.value_and_grad(loss, every, has_aux=True))(module, *inputs)
  assert_close(out[: len(weights)], expected)
  with jax.enable_x64(True):
    expected_loss = lambda p, *inputs: jnp.sum(oracle(jnp, p, *inputs) * weights)
    d_p, *d_expected = jit(jax.grad(expected_loss, every))(parameters(module), *exact)
  compare = lambda path, a, b: assert_close(a, b, f"gradient of {jax.tree_util.keystr(path)}")
  jax.tree_util.tree_map_with_path(compare, nnx.to_pure_dict(nnx.state(d_module)), d_p)
  for n, (a, b) in enumerate(zip(d_inputs, d_expected, strict=True)):
    assert_close(a, b, f"gradient of input {n}")


def dot_flops(f, *args):
  """2 times the multiplications of all projections in f: attention, inside its custom_vjp, is left out."""

  def count(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
      if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        sizes = [equation.invars[0].aval.shape[axis] for axis in contracted]
        total += 2 * equation.outvars[0].aval.size * int(np.prod(sizes))
      elif not equation.primitive.name.startswith("custom_vjp"):
        total += sum(count(inner) for inner in jax.extend.core.jaxprs_in_params(equation.params))
    return total

  return count(jax.make_jaxpr(f)(*args).jaxpr)
