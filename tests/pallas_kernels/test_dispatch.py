"""Choice of implementation: explicit ones are honoured or refused, None falls back and says why."""

import logging

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import device, dispatch


@pytest.fixture
def on_hopper(monkeypatch):
  monkeypatch.setattr(device, "missing_hopper", lambda: None)


@pytest.fixture
def elsewhere(monkeypatch):
  monkeypatch.setattr(device, "missing_hopper", lambda: "no GPU")


def test_none_takes_the_kernel_where_it_can_run(on_hopper):
  assert dispatch.choose("op", None, lambda: None) == "hopper"


def test_none_takes_the_reference_for_what_the_kernel_cannot_do_and_warns_once(on_hopper, caplog):
  for _ in range(2):
    assert dispatch.choose("op.a", None, lambda: "D=100 is odd") == "reference"
  assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
    (logging.WARNING, "op.a runs its plain jnp reference: D=100 is odd")
  ]


def test_none_takes_the_reference_without_the_gpu_and_notes_it(elsewhere, caplog):
  caplog.set_level(logging.INFO)
  assert dispatch.choose("op.b", None, lambda: None) == "reference"
  assert [r.levelno for r in caplog.records] == [logging.INFO]


@pytest.mark.parametrize(
  ("implementation", "unsupported", "reason"),
  [("hopper", None, "no GPU"), ("hopper", "D=100 is odd", "D=100"), ("interpret", "D=100 is odd", "D=100")],
)
def test_an_explicit_implementation_that_cannot_serve_is_refused(elsewhere, implementation, unsupported, reason):
  with pytest.raises(NotImplementedError, match=rf'op: implementation="{implementation}" cannot serve .*{reason}'):
    dispatch.choose("op", implementation, lambda: unsupported)


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
def test_an_explicit_implementation_is_honoured(on_hopper, implementation):
  assert dispatch.choose("op", implementation, lambda: None) == implementation


def test_an_unknown_implementation_is_refused():
  with pytest.raises(
    ValueError, match=r"implementation='cuda' must be None or one of \('reference', 'interpret', 'hop"
  ):
    dispatch.choose("op", "cuda", lambda: None)


class TestRefuseSharded:
  refusal = r"embedding\.bag: x is sharded over devices as .*'d'.*; call pallas_kernels\.sharding\.embedding_bag"

  def sharded(self, size, spec):
    mesh = jax.make_mesh((size,), ("d",), devices=jax.devices()[:size])
    return jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, spec))

  def test_sharded_arrays_name_the_wrapper(self):
    with pytest.raises(ValueError, match=self.refusal):
      dispatch.refuse_sharded("embedding.bag", x=self.sharded(8, P(None, "d")))

  def test_sharded_arrays_are_seen_under_jit(self):
    with pytest.raises(ValueError, match=self.refusal):
      jax.jit(lambda x: dispatch.refuse_sharded("embedding.bag", x=x))(self.sharded(8, P("d")))

  @pytest.mark.parametrize(("size", "spec"), [(8, P()), (1, P("d"))], ids=["replicated", "mesh_of_one"])
  def test_whole_arrays_pass(self, size, spec):
    x = self.sharded(size, spec)
    dispatch.refuse_sharded("embedding.bag", x=x, absent=None)
    jax.jit(lambda x: dispatch.refuse_sharded("embedding.bag", x=x))(x)

  def test_local_arrays_inside_shard_map_pass(self):
    x = self.sharded(8, P("d"))

    def local(x):
      dispatch.refuse_sharded("embedding.bag", x=x)
      return x

    jax.shard_map(local, in_specs=P("d"), out_specs=P("d"), mesh=jax.make_mesh((8,), ("d",)))(x)
