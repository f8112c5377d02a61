"""Attention with rows sharded over eight CPU devices equals the local call on each shard, gradients summed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import jagged, sharding

LENGTHS = [[3, 0, 5], [0, 0, 0], [8, 1, 1], [1, 1, 1]]  # of four shards; one is empty
TOKENS, HEADS, WIDTH = 12, 2, 8
OFFSETS_SB = np.array([np.cumsum([0, *lengths]) for lengths in LENGTHS], np.int32)


@pytest.fixture(params=[("data",), pytest.param(("data", "replica"), marks=pytest.mark.slow)], ids=str)
def mesh_and_axes(request):
  sizes = (4,) if len(request.param) == 1 else (2, 2)
  kinds = (AxisType.Explicit,) * len(sizes)
  return jax.make_mesh(sizes, request.param, axis_types=kinds, devices=jax.devices()[:4]), request.param


def draw(*shape):
  return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def place(mesh, axes, a):
  return jax.device_put(a, NamedSharding(mesh, P(axes)))


def loss(o):
  return jnp.sum(o * jnp.cos(jnp.arange(o.size).reshape(o.shape)))


def test_equals_the_local_call_of_each_shard(mesh_and_axes):
  mesh, axes = mesh_and_axes
  q, k, v = (draw(4, TOKENS, HEADS, WIDTH) for _ in range(3))
  times = np.sort(np.random.default_rng(1).integers(0, 999, (4, TOKENS)), axis=1).astype(np.int32)
  targets = np.minimum(np.diff(OFFSETS_SB, axis=1), 1).astype(np.int32)
  tables, (cos, sin) = (draw(15), draw(129)), (f(draw(4, TOKENS, WIDTH // 2)) for f in (np.cos, np.sin))
  options = dict(causal=True, activation="silu")

  def local(q, k, v, *tables):
    return jnp.stack(
      [
        jagged.attention(
          q[s], k[s], v[s], OFFSETS_SB[s], num_targets=targets[s],
          bias=jagged.RelativeBias(*tables, jnp.asarray(times[s])), rotary=jagged.Rotary(cos[s], sin[s]), **options,
        )
        for s in range(4)
      ]
    )  # fmt: skip

  def spread(q, k, v, *tables):
    rest = dict(num_targets_SB=place(mesh, axes, targets), mesh=mesh, axes=axes)
    rest |= dict(rotary=jagged.Rotary(place(mesh, axes, cos), place(mesh, axes, sin)))
    bias = jagged.RelativeBias(*tables, place(mesh, axes, times))
    return sharding.jagged_attention(q, k, v, place(mesh, axes, OFFSETS_SB), bias=bias, **rest, **options)

  placed = [place(mesh, axes, a) for a in (q, k, v)]
  o, expected = spread(*placed, *tables), local(q, k, v, *tables)
  assert o.sharding.spec[0] in (axes, axes[0])
  np.testing.assert_allclose(o, expected, atol=1e-5)
  every = tuple(range(5))
  found = jax.jit(jax.grad(lambda *a: loss(spread(*a)), every))(*placed, *tables)
  expected = jax.grad(lambda *a: loss(local(*a)), every)(q, k, v, *tables)
  for d, expected_d in zip(found, expected, strict=True):
    np.testing.assert_allclose(d, expected_d, atol=1e-4)


@pytest.mark.slow
def test_seeds_get_the_gradient_of_all_shards(mesh_and_axes):
  mesh, axes = mesh_and_axes
  q, k, v = draw(5, HEADS, WIDTH), *(draw(4, TOKENS, HEADS, WIDTH) for _ in range(2))
  local = lambda q: jnp.stack(
    [jagged.attention(q, k[s], v[s], None, OFFSETS_SB[s], broadcast_q=True) for s in range(4)]
  )

  def spread(q):
    keys = (place(mesh, axes, a) for a in (k, v))
    offsets = place(mesh, axes, OFFSETS_SB)
    return sharding.jagged_attention(q, *keys, None, offsets, broadcast_q=True, mesh=mesh, axes=axes)

  placed = jax.device_put(q, NamedSharding(mesh, P()))
  np.testing.assert_allclose(spread(placed), local(q), atol=1e-5)
  found, expected = (
    jax.jit(jax.grad(lambda q, call=call: loss(call(q))))(x) for call, x in ((spread, placed), (local, q))
  )
  np.testing.assert_allclose(found, expected, atol=1e-4)


def test_refusals(mesh_and_axes):
  mesh, axes = mesh_and_axes
  q = place(mesh, axes, draw(4, TOKENS, HEADS, WIDTH))
  call = lambda q_offsets, k=q, **options: sharding.jagged_attention(
    q, k, k, q_offsets, mesh=mesh, axes=axes, **options
  )
  with pytest.raises(ValueError, match=r"q_offsets_SB must be \[4, \.\.\.\], .*, got shape \(4,\)"):
    call(OFFSETS_SB[0])
  with pytest.raises(ValueError, match=r"k_SXGK must be \[4, \.\.\.\].*got shape \(3, 12, 2, 8\)"):
    call(OFFSETS_SB, k=draw(3, TOKENS, HEADS, WIDTH))
  with pytest.raises(ValueError, match=r"q_offsets_SB\[2\]\[3\] = 13 points past the T = 12 tokens"):
    call(np.where(OFFSETS_SB == 10, 13, OFFSETS_SB))
  with pytest.raises(ValueError, match=r"q_LHK is sharded as .*; replicate it"):
    call(None, k_offsets_SB=OFFSETS_SB, broadcast_q=True)
  with pytest.raises(ValueError, match=r"axes \['model'\] are not among the axes"):
    sharding.jagged_attention(q, q, q, OFFSETS_SB, mesh=mesh, axes="model")
