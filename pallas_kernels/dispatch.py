"""Which back end serves a call, and what no back end serves: arguments that are spread over devices.

An explicit `implementation` is honoured or refused with the reason. Only None chooses: the kernel where it can run,
plain jnp otherwise, and then the log says why, once for each reason.
"""

import functools
import logging
from collections.abc import Callable
from typing import Literal, get_args

import jax

from pallas_kernels import device

Implementation = Literal["reference", "interpret", "hopper"]


def choose(op: str, implementation: Implementation | None, unsupported: Callable[[], str | None]) -> Implementation:
  """Returns the back end of one call.

  Args:
    op: public name of the operation.
    implementation: what the caller asks for.
    unsupported: says why the kernel cannot take these arguments, if it cannot; asked only where it could run.

  Raises:
    NotImplementedError: what the caller asks for cannot serve the call.
  """
  if implementation is None:
    no_gpu = device.missing_hopper()
    reason = no_gpu or unsupported()
    if reason is None:
      return "hopper"
    _log_fallback(op, reason, logging.WARNING if no_gpu is None else logging.INFO)
    return "reference"
  if implementation not in get_args(Implementation):
    raise ValueError(f"{op}: implementation={implementation!r} must be None or one of {get_args(Implementation)}")
  if implementation == "reference":
    return implementation
  reason = unsupported()
  if reason is None and implementation == "hopper":
    reason = device.missing_hopper()
  if reason is not None:
    raise NotImplementedError(f'{op}: implementation="{implementation}" cannot serve this call: {reason}')
  return implementation


@functools.cache
def _log_fallback(op: str, reason: str, level: int) -> None:
  logging.getLogger("pallas_kernels").log(level, "%s runs its plain jnp reference: %s", op, reason)


def refuse_sharded(op: str, **arrays: jax.Array | None) -> None:
  """A kernel sees one device's arrays; a call on spread ones would gather them behind the caller's back."""
  for name, x in arrays.items():
    if x is not None and (spec := partition(x)) is not None:
      raise ValueError(
        f"{op}: {name} is sharded over devices as {spec}, but kernels work on local arrays; call "
        f"pallas_kernels.sharding.{op.replace('.', '_')}, or this function inside jax.shard_map"
      )


def partition(x: jax.Array) -> object | None:
  """How x is split over devices, or None. Under jit only axes of an explicit mesh are visible."""
  if not isinstance(x, jax.Array):
    return None  # of the host
  if not isinstance(x, jax.core.Tracer):
    return None if x.is_fully_replicated else getattr(x.sharding, "spec", x.sharding)
  sharding = jax.typeof(x).sharding
  split = any(sharding.mesh.shape[axis] > 1 for axis in jax.tree.leaves(tuple(sharding.spec)))
  return sharding.spec if split else None
