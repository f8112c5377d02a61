"""Energy that the GPUs of this host have used, from NVML's counter; None where there is no GPU or no NVML."""

from collections.abc import Callable

import jax


def energy_counter() -> Callable[[], float] | None:
  """Returns a function that reads joules used so far by the local GPUs, or None."""
  if jax.default_backend() != "gpu":
    return None
  try:
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(device.local_hardware_id) for device in jax.local_devices()]
    read = lambda: sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1000
    read()
  except (ImportError, OSError, pynvml.NVMLError):
    return None
  return read
