"""The GPU's clocks, power and temperature while it measures."""

import ctypes
from collections.abc import Iterable
from functools import cache
from statistics import median
from typing import Any

import torch

from bench.records import Clocks

# Of NVML's interface: the SM clock, and the sensor on the die.
SM_CLOCK, DIE = 1, 0


class Sensors:
    """Reads the clocks of the current GPU by the driver's library, in microseconds; None where there is neither.

    Args:
        library: NVML, as ctypes loads it; default: the driver's.
    """

    def __init__(self, library: Any = None) -> None:
        self._library, self._gpu = library, ctypes.c_void_p()
        if not torch.cuda.is_available() and library is None:
            return
        try:
            self._library = library or ctypes.CDLL("libnvidia-ml.so.1")
            self._must(self._library.nvmlInit_v2())
            self._must(self._library.nvmlDeviceGetHandleByUUID(self._uuid(), ctypes.byref(self._gpu)))
        except (OSError, AttributeError):
            self._library = None

    def read(self) -> Clocks | None:
        if self._library is None:
            return None
        sm, milliwatts, celsius = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        try:
            self._must(self._library.nvmlDeviceGetClockInfo(self._gpu, SM_CLOCK, ctypes.byref(sm)))
            self._must(self._library.nvmlDeviceGetPowerUsage(self._gpu, ctypes.byref(milliwatts)))
            self._must(self._library.nvmlDeviceGetTemperature(self._gpu, DIE, ctypes.byref(celsius)))
        except OSError:
            self._library = None  # it will not know the next time either
            return None
        return Clocks(sm=float(sm.value), power=milliwatts.value / 1e3, temperature=float(celsius.value))

    @staticmethod
    def _uuid() -> bytes:
        return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()

    @staticmethod
    def _must(status: int) -> None:
        if status != 0:
            raise OSError(f"NVML: status {status}")


@cache
def sensors() -> Sensors:
    """Those of a run: the driver's library is loaded once."""
    return Sensors()


def middle(clocks: Iterable[Clocks | None]) -> Clocks | None:
    """The median of each reading; None if nothing was read."""
    read = [clock for clock in clocks if clock is not None]
    if not read:
        return None
    return Clocks(*(median(getattr(clock, name) for clock in read) for name in ("sm", "power", "temperature")))
