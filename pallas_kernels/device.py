"""What the default device is. Apart from mosaic.py, whose import takes a second that only its kernels need."""

import jax


def _device() -> jax.Device:
  """The device on which an unplaced computation runs."""
  default = jax.config.jax_default_device
  return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def missing_hopper() -> str | None:
  """Why kernels for sm_90 cannot run here, or None if they can."""
  device = _device()
  if device.platform not in ("gpu", "cuda"):
    return f"it needs a GPU of compute capability 9.0, the default device is {device.device_kind!r} ({device.platform})"
  capability = getattr(device, "compute_capability", "unknown")
  if capability != "9.0":
    return f"it needs a GPU of compute capability 9.0, {device.device_kind!r} has {capability}"
  return None


def num_sms() -> int:
  """Streaming multiprocessors of the default device."""
  if (reason := missing_hopper()) is not None:
    raise RuntimeError(f"device.num_sms: {reason}")
  return _device().core_count  # type: ignore[attr-defined]  # exists on GPU devices only
