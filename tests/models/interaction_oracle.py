"""Interactions of a recommender in float64 NumPy, a sample at a time, written from the papers; and how to compare.

Every oracle takes nested dicts of parameters and one sample. It shares no line and no default with the library.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

FAST = {"xla_backend_optimization_level": 0}  # to compile
jit = functools.partial(jax.jit, compiler_options=FAST)


def relu(x):
  return x * (x > 0)


def silu(x):
  return x / (1 + np.exp(-x))


def standardise(rows):
  return np.array([(row - np.mean(row)) / np.sqrt(np.var(row) + 1e-5) for row in rows])


def mlp(p, x, act=relu):
  layers = p["layers"]
  for i in range(len(layers)):
    x = layers[i]["w_FD"] @ x + layers[i]["b_F"]
    if i + 1 < len(layers):
      x = act(x)
  return x


def fmb(p, tokens, act=relu):
  """By the dots of all pairs of tokens."""
  pairs = np.array([[a @ b for b in tokens] for a in tokens])
  (flat,) = standardise([(pairs @ p["y_RN"].T).flatten()])
  return mlp(p["mlp"], flat, act).reshape(-1, tokens.shape[1])


def resized(p, tokens):
  return p["w_CN"] @ tokens if p else tokens


def wukong(p, tokens, act=relu):
  for i in range(len(p["layers"])):
    q = p["layers"][i]
    both = np.array([*fmb(q["fmb"], tokens, act), *(q["lcb"]["w_CN"] @ tokens)])
    tokens = standardise(both + resized(q.get("shortcut"), tokens))
  return tokens


def wukong_experts(p, tokens):
  experts = len(p["experts"]["layers"][0]["fmb"]["y_RN"])
  of = lambda e: jax.tree.map(lambda w: w[e], p["experts"])
  return sum(wukong(of(e), part) for e, part in enumerate(np.split(tokens, experts)))


def cross(p, first):
  x = first
  for i in range(len(p["projections"])):
    q = p["projections"][i]
    w, b = (q["u"]["w_FD"] @ q["v_RD"], q["u"]["b_F"]) if "u" in q else (q["w_FD"], q["b_F"])
    x = np.array([first[j] * (sum(w[j] * x) + b[j]) + x[j] for j in range(len(x))])
  return x


def dots(tokens):
  n = len(tokens)
  return np.array([tokens[i] @ tokens[j] for i in range(n) for j in range(i + 1, n)])


def interaction(name, p, tokens):
  width = tokens.shape[1]
  if name.endswith("cross"):
    assert ("v_RD" in p["network"]["projections"][0]) == (name == "low_rank_cross")
    return resized(p.get("compress"), cross(p["network"], tokens.flatten()).reshape(tokens.shape))
  return {
    "dots": lambda: mlp(p["mlp"], dots(tokens)).reshape(-1, width),
    "fm": lambda: fmb(p, tokens),
    "linear": lambda: p["w_CN"] @ tokens,
    "mlp": lambda: mlp(p["mlp"], tokens.flatten()).reshape(-1, width),
  }[name]()


def dhen(p, tokens, names):
  for i in range(len(p["layers"])):
    q = p["layers"][i]
    parts = [interaction(name, q["interactions"][k], tokens) for k, name in enumerate(names)]
    tokens = standardise(resized(q.get("shortcut"), tokens) + sum(parts))
  return tokens


def built(make):
  """make(rngs) with parameters drawn here, biases too, so that one that is left out shows; compiles nothing."""
  rng = np.random.default_rng(0)
  draw = lambda w: jnp.asarray(rng.normal(size=w.shape) / max(w.shape[-1], 1) ** 0.5, w.dtype)
  return jax.tree.map(draw, jax.eval_shape(lambda: make(nnx.Rngs(0))))


def inputs(*shape):
  return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def parameters(module):
  """Nested dicts of float64 arrays, by attribute name or place in a list."""
  return jax.tree.map(lambda w: np.asarray(w, np.float64), nnx.to_pure_dict(nnx.state(module)))


@jit
def value_and_gradients(module, x, d_y):
  """y = module(x), and the gradients of sum(y * d_y) by module and x."""
  y, back = jax.vjp(lambda module, x: module(x), module, x)
  return y, *back(jnp.asarray(d_y, y.dtype))


def assert_equals(module, oracle, x):
  """Values; and each array's gradient along a random direction, against a central difference of the oracle."""
  p = parameters(module), np.asarray(x, np.float64)
  exact = lambda p: np.array([oracle(p[0], sample) for sample in p[1]])
  expected = exact(p)
  rng = np.random.default_rng(0)
  d_y = rng.normal(size=expected.shape)
  y, d_module, d_x = value_and_gradients(module, x, d_y)
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())

  leaves, structure = jax.tree.flatten(p)
  gradients, same = jax.tree.flatten((parameters(d_module), np.asarray(d_x, np.float64)))
  assert structure == same
  for i, gradient in enumerate(gradients):
    step = 1e-6 * rng.normal(size=gradient.shape)
    ends = [exact(structure.unflatten([*leaves[:i], leaves[i] + s * step, *leaves[i + 1 :]])) for s in (1, -1)]
    numerical = np.sum((ends[0] - ends[1]) * d_y) / 2
    error = abs(numerical - np.sum(gradient * step))
    assert error <= 1e-3 * np.linalg.norm(gradient) * 1e-6, jax.tree_util.tree_flatten_with_path(p)[0][i][0]


def assert_nan_stays_in_its_sample(module, x):
  """In values and in the gradient by x."""
  bad = x.copy()
  bad[1] = np.nan
  d_y = np.ones(jax.eval_shape(module, x).shape, np.float32)
  (y, _, d_x), (bad_y, _, bad_d_x) = value_and_gradients(module, x, d_y), value_and_gradients(module, bad, d_y)
  assert np.isnan(bad_y[1]).all()
  others = [i for i in range(len(x)) if i != 1]
  np.testing.assert_array_equal(np.asarray(bad_y)[others], np.asarray(y)[others])
  np.testing.assert_array_equal(np.asarray(bad_d_x)[others], np.asarray(d_x)[others])


def assert_a_batch_of_none_works(module, *shape):
  """Values of the right shape, gradients of zero."""
  y_shape = jax.eval_shape(module, inputs(1, *shape)).shape
  y, d_module, d_x = value_and_gradients(module, inputs(0, *shape), np.zeros((0, *y_shape[1:])))
  assert y.shape == (0, *y_shape[1:])
  assert d_x.shape == (0, *shape)
  assert all((np.asarray(w) == 0).all() for w in jax.tree.leaves(d_module))


def assert_flops(make, flops, *shape, batch=4):
  """The formula against XLA's count, which has the elementwise work too. No array is made."""
  module = jax.eval_shape(lambda: make(nnx.Rngs(0)))
  x = jax.ShapeDtypeStruct((batch, *shape), jnp.float32)
  counted = jit(lambda module, x: module(x)).lower(module, x).compile().cost_analysis()["flops"] / batch
  assert 0 <= counted / flops(module) - 1 < 0.03, (counted, flops(module))


def assert_same_on_eight_devices(module, x, d_y):
  """The batch split over all, each matrix shared along its last axis where that divides."""
  expected = value_and_gradients(module, x, d_y)
  mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
  last = lambda w: "fsdp" if w.ndim > 1 and w.shape[-1] % 4 == 0 else None
  spread = lambda w: jax.device_put(w, NamedSharding(mesh, P(*[None] * (w.ndim - 1), last(w))))
  rows = NamedSharding(mesh, P(("data", "fsdp")))
  with jax.set_mesh(mesh):
    found = value_and_gradients(jax.tree.map(spread, module), *jax.device_put((x, d_y), rows))
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(np.abs(b).max()))
