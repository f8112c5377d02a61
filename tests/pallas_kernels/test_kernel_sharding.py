"""Sharded wrappers equal the local call shard by shard: 8 virtual devices for the reference, one for the interpreter.

Dimension key: S shards, V table rows, D row or model width, T ids of a shard, B bags of a shard, M tokens, F hidden
neurons.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import embedding, sharding, twell
from pallas_kernels.embedding import bag_hopper
from pallas_kernels.twell import reference

V, D, T, B = 6, 128, 10, 3


def mesh_of(*sizes, kind=AxisType.Explicit):
  names = ("data", "replica")[: len(sizes)]
  return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=jax.devices()[: np.prod(sizes)])


def draw(shards):
  """Shard 1 is empty; every shard has another number of tokens."""
  rng = np.random.default_rng(shards)
  offsets_SB = np.sort(rng.integers(0, T + 1, (shards, B + 1)).astype(np.int32), axis=1)
  offsets_SB[:, 0] = 0
  offsets_SB[1:2] = 0
  ids_ST = rng.integers(-1, V + 1, (shards, T)).astype(np.int32)
  return (
    rng.normal(size=(V, D)).astype(np.float32),
    ids_ST,
    offsets_SB,
    rng.normal(size=ids_ST.shape).astype(np.float32),
  )


def place(mesh, axes, table_VD, *rows):
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  return put(table_VD, P()), *(put(x, P(axes)) for x in rows)


def shard_by_shard(table_VD, ids_ST, offsets_SB, weights_ST):
  local = functools.partial(embedding.bag, implementation="reference")
  return np.concatenate([local(table_VD, *shard) for shard in zip(ids_ST, offsets_SB, weights_ST)])


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize(
  ("sizes", "axes"), [((8,), "data"), ((4, 2), "data"), ((4, 2), ("data", "replica"))], ids=["one", "of_two", "both"]
)
def test_eight_devices_equal_one_shard_after_another(sizes, axes, kind):
  mesh, shards = mesh_of(*sizes, kind=kind), 8 if axes == ("data", "replica") else sizes[0]
  arrays = draw(shards)
  with jax.set_mesh(mesh):
    bag = jax.jit(functools.partial(sharding.embedding_bag, axes=axes))
    out_BD = bag(*place(mesh, axes, *arrays))
  assert out_BD.sharding.shard_shape(out_BD.shape) == (B, D)
  np.testing.assert_allclose(out_BD, shard_by_shard(*arrays), rtol=1e-6, atol=1e-6)


def test_the_compiled_call_moves_nothing_between_devices():
  """F25: no silent gather of ids, bags or table."""
  mesh = mesh_of(8)
  bag = jax.jit(functools.partial(sharding.embedding_bag, mesh=mesh, axes="data"))
  text = bag.lower(*place(mesh, "data", *draw(8))).compile().as_text()
  for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
    assert collective not in text


def test_the_sink_receives_d_out_of_its_own_shard():
  mesh = mesh_of(8)
  table_VD, ids_ST, offsets_SB, weights_ST = place(mesh, "data", *draw(8))
  sink, d_out_BD = place(mesh, "data", 0, np.zeros((8 * B, D), np.float32), np.arange(8.0 * B * D).reshape(8 * B, D))[
    1:
  ]

  def loss(sink, weights_ST):
    out_BD = sharding.embedding_bag(table_VD, ids_ST, offsets_SB, weights_ST, mesh=mesh, axes="data", sink=sink)
    return jnp.sum(out_BD * d_out_BD)

  d_sink_BD, d_weights_ST = jax.jit(jax.grad(loss, argnums=(0, 1)))(sink, weights_ST)
  np.testing.assert_array_equal(d_sink_BD, d_out_BD)
  assert d_weights_ST.shape == weights_ST.shape


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_the_kernel_runs_inside_the_wrapper(run, mode):
  mesh = mesh_of(1)
  arrays = draw(1)
  bag = functools.partial(sharding.embedding_bag, mesh=mesh, axes="data", mode=mode)
  kernel, reference = (jax.jit(functools.partial(bag, implementation=i)) for i in ("interpret", "reference"))
  placed = place(mesh, "data", *arrays)
  np.testing.assert_allclose(run(kernel, *placed), run(reference, *placed), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_the_kernel_runs_inside_the_wrapper_on_every_gpu(hopper, run):
  shards = len(jax.devices())
  mesh, arrays = mesh_of(shards), draw(shards)
  bag = jax.jit(functools.partial(sharding.embedding_bag, mesh=mesh, axes="data", implementation="hopper"))
  np.testing.assert_allclose(run(bag, *place(mesh, "data", *arrays)), shard_by_shard(*arrays), rtol=1e-5, atol=1e-5)


def test_a_direct_call_with_sharded_bags_names_the_wrapper():
  placed = place(mesh_of(8), "data", np.zeros((V, D), np.float32), np.zeros(8, np.int32), np.arange(8, dtype=np.int32))
  for call in (embedding.bag, jax.jit(embedding.bag)):
    with pytest.raises(
      ValueError, match=r"ids is sharded over devices as .*call pallas_kernels\.sharding\.embedding_bag"
    ):
      call(*placed)


class TestRefusals:
  def test_a_sharded_table(self):
    mesh = mesh_of(2)
    table_VD, *rows = draw(2)
    sharded_VD = jax.device_put(table_VD, NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"table_VD is sharded as .*; replicate it"):
      sharding.embedding_bag(sharded_VD, *place(mesh, "data", table_VD, *rows)[1:], mesh=mesh, axes="data")

  def test_another_number_of_shards_than_devices(self):
    with pytest.raises(ValueError, match=r"ids_ST must be \[8, \.\.\.\], .*\('data',\), got shape \(4, 10\)"):
      sharding.embedding_bag(*draw(4), mesh=mesh_of(8), axes="data")

  def test_an_axis_that_the_mesh_does_not_have(self):
    with pytest.raises(ValueError, match=r"axes \['model'\] are not among the axes \('data',\)"):
      sharding.embedding_bag(*draw(8), mesh=mesh_of(8), axes=("data", "model"))

  def test_offsets_of_one_shard_that_decrease(self):
    table_VD, ids_ST, offsets_SB, weights_ST = draw(8)
    offsets_SB[3] = 0, 4, 3, 5
    placed = place(mesh_of(8), "data", table_VD, ids_ST, offsets_SB, weights_ST)
    with pytest.raises(ValueError, match=r"offsets_SB\[3\]\[2\] = 3 is below offsets_SB\[3\]\[1\] = 4"):
      sharding.embedding_bag(*placed, mesh=mesh_of(8), axes="data")


def test_a_kernels_result_and_the_table_vary_over_the_axes_of_the_bags(monkeypatch):
  """Traced only: eight devices cannot be interpreted. A result called unvarying would be taken as equal everywhere."""
  seen = []

  def kernel(table_VD, ids_T, offsets, weights_T, mode, *, interpret):
    out_BD = bag(table_VD, ids_T, offsets, weights_T, mode)
    seen.extend(jax.typeof(x).mat.varying for x in (table_VD, out_BD))
    return out_BD

  bag = bag_hopper.bag
  monkeypatch.setattr(bag_hopper, "bag", kernel)
  call = functools.partial(sharding.embedding_bag, mesh=mesh_of(8), axes="data", implementation="interpret")
  jax.eval_shape(call, *place(mesh_of(8), "data", *draw(8)))
  assert seen == [{"data"}, {"data"}]


TWELL = {
  "gated": (twell.gated_feedforward, sharding.twell_gated_feedforward, 3),
  "plain": (twell.feedforward, sharding.twell_feedforward, 2),
}


class TestTwell:
  """Sixteen tokens, of which 3 and 4 overflow, on different devices."""

  @pytest.fixture(params=TWELL)
  def calls(self, request):
    """The local call, the wrapper, and x and weights."""
    *calls, matrices = TWELL[request.param]
    rng = np.random.default_rng(0)
    x_MD, weights = rng.normal(size=(16, 8)), 0.3 * rng.normal(size=(matrices, 64, 8))
    x_MD[:, 0], weights[0, :, 0] = 1, -1.2  # as if neurons had a bias: few fire for a token
    x_MD[3:5, 0] = -1  # and for these nearly all
    weights[0, :5] = 0
    return *calls, jnp.asarray(x_MD, jnp.float32), jnp.asarray(weights, jnp.float32)

  def everything(self, call, x_MD, *weights):
    """y, statistics, and what x and all weights get from y and from l1."""

    def outputs(*arrays):
      y_MD, stats = call(*arrays, spec=twell.Spec(tile=32, compression=4), with_active=True)
      return (y_MD, stats.l1), stats

    (y_MD, l1), back, stats = jax.vjp(outputs, x_MD, *weights, has_aux=True)
    return y_MD, stats, back((y_MD, jnp.zeros_like(l1))), back((jnp.zeros_like(y_MD), jnp.ones_like(l1)))

  @pytest.mark.parametrize(
    ("sizes", "axes", "kind"),
    [
      ((8,), "data", AxisType.Auto),
      ((4, 2), "data", AxisType.Explicit),
      ((4, 2), ("data", "replica"), AxisType.Explicit),
    ],
    ids=["one", "of_two", "both"],
  )
  def test_eight_devices_equal_the_local_call_on_all_tokens(self, calls, sizes, axes, kind):
    local, wrapper, x_MD, weights = calls
    mesh = mesh_of(*sizes, kind=kind)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
      call = functools.partial(self.everything, functools.partial(wrapper, axes=axes))
      result = jax.jit(call)(put(x_MD, axes), *map(put, weights))
    wanted = jax.jit(functools.partial(self.everything, local))(x_MD, *weights)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), result, wanted)
    y_MD, stats, _, (d_x_MD, *d_weights) = result
    assert (stats.overflow_rows, stats.active[:5].any(), stats.active.any()) == (2, False, True)
    shards = 4 if (sizes, axes) == ((4, 2), "data") else 8
    assert {a.sharding.shard_shape(a.shape) for a in (y_MD, d_x_MD)} == {(16 // shards, 8)}
    assert all(x.sharding.is_fully_replicated for x in (*stats, *d_weights))

  def test_weights_and_results_vary_over_the_axes_of_the_tokens(self, calls, monkeypatch):
    """The kernels' part of a call; the reference stands in for it, since eight devices cannot be interpreted."""
    _, wrapper, x_MD, weights = calls
    feedforward, seen = reference.feedforward, []

    def spy(*arrays, **options):
      results = feedforward(*arrays, **options)
      seen.extend(jax.typeof(a).mat.varying for a in jax.tree.leaves((arrays, results[0])))
      return results

    monkeypatch.setattr(reference, "feedforward", spy)
    mesh = mesh_of(8)
    wrapper(jax.device_put(x_MD, NamedSharding(mesh, P("data"))), *weights, mesh=mesh, axes="data")
    assert seen == [{"data"}] * (2 + len(weights))

  # the kernels for a few tokens, and those for many
  @pytest.mark.parametrize("tokens", [5, pytest.param(70, marks=pytest.mark.slow)])
  def test_the_kernels_run_inside_the_wrapper(self, run, tokens):
    mesh, rng = mesh_of(1), np.random.default_rng(0)
    x_MD, weights = rng.normal(size=(tokens, 128)), rng.normal(size=(3, 128, 128)) / 8
    x_MD[:, 0], weights[0, :, 0] = 1, -3
    x_MD[2, 0] = -1  # overflows
    put = lambda a, *spec: jax.device_put(jnp.asarray(a, jnp.bfloat16), NamedSharding(mesh, P(*spec)))
    arrays = put(x_MD, "data"), *map(put, weights)
    call = functools.partial(sharding.twell_gated_feedforward, mesh=mesh, axes="data", route="sparse", with_active=True)
    kernel, reference = (jax.jit(functools.partial(call, implementation=i)) for i in ("interpret", "reference"))
    (y_MD, stats), (expected_MD, expected) = run(kernel, *arrays), run(reference, *arrays)
    difference = np.linalg.norm(y_MD.astype(np.float32) - expected_MD.astype(np.float32))
    assert difference <= 5e-3 * np.linalg.norm(expected_MD.astype(np.float32))  # roundings of bfloat16
    np.testing.assert_allclose(stats.l1, expected.l1, rtol=5e-3)
    np.testing.assert_allclose(stats.l0, expected.l0, rtol=1e-6)
    np.testing.assert_array_equal(stats.active, expected.active)
    assert (stats.route, stats.overflow_rows) == (twell.SPARSE, tokens > 64)

  @pytest.mark.parametrize("route", ["auto", "sparse"])
  @pytest.mark.parametrize("tokens", [8 * 32, 8 * 1024])
  def test_results_of_kernels_vary_over_the_axes_of_the_tokens(self, tokens, route):
    """Traced only: JAX refuses a condition whose branches disagree, and an unvarying result that is then reduced."""
    mesh = mesh_of(8)
    x_MD = jax.ShapeDtypeStruct((tokens, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    w_FD = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)
    options = dict(mesh=mesh, axes="data", implementation="interpret", route=route, with_active=True)
    y_MD, stats = jax.eval_shape(functools.partial(sharding.twell_gated_feedforward, **options), x_MD, w_FD, w_FD, w_FD)
    assert (y_MD.shape, stats.active.shape) == (x_MD.shape, (1024,))

    def outputs(*arrays):
      y_MD, stats = sharding.twell_gated_feedforward(*arrays, **options)
      return jnp.sum(y_MD, dtype=jnp.float32) + stats.l1, stats

    # Statistics are integers, too: a sum over devices has a derivative for them, which is zero, a maximum has none.
    gradients, stats = jax.eval_shape(jax.grad(outputs, argnums=(0, 3), has_aux=True), x_MD, w_FD, w_FD, w_FD)
    assert [d.shape for d in gradients] == [x_MD.shape, w_FD.shape]
    assert (stats.route.shape, stats.route.dtype) == ((), jnp.int32)

  def test_a_direct_call_names_the_wrapper(self, calls):
    local, wrapper, x_MD, weights = calls
    sharded_MD = jax.device_put(x_MD, NamedSharding(mesh_of(8), P("data")))
    for call in (local, jax.jit(local)):
      with pytest.raises(ValueError, match=rf"x_MD is sharded .*call pallas_kernels\.sharding\.{wrapper.__name__}, or"):
        call(sharded_MD, *weights)

  def test_what_does_not_fit_the_mesh_is_refused(self, calls):
    _, wrapper, x_MD, weights = calls
    mesh = mesh_of(8)
    sharded_FD = jax.device_put(weights[1], NamedSharding(mesh, P(None, "data")))
    with pytest.raises(ValueError, match=rf"{wrapper.__name__}: w_\w+_FD is sharded as .*; replicate it"):
      wrapper(x_MD, weights[0], sharded_FD, *weights[2:], mesh=mesh, axes="data")
    with pytest.raises(ValueError, match=r"M=15 tokens do not divide over the 8 shards of \('data',\); pad x_MD"):
      wrapper(x_MD[1:], *weights, mesh=mesh, axes="data")
    with pytest.raises(ValueError, match=r"axes \['model'\] are not among the axes \('data',\)"):
      wrapper(x_MD, *weights, mesh=mesh, axes="model")
