"""The GPU's sensors behind a stand-in for the driver's library."""

import ctypes
from typing import Any

import pytest

from bench.records import Clocks
from bench.sensors import Sensors, middle


class Nvml:
    """The functions of the library that are called. ``broken`` is the one that returns an error."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        values = {
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetPowerUsage": 650_500,
            "nvmlDeviceGetTemperature": 61,
        }

        def function(*arguments: Any) -> int:
            self.calls.append(name)
            if name in values:
                arguments[-1]._obj.value = values[name]
            return 999 if name == self.broken else 0

        return function


@pytest.fixture(autouse=True)
def uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sensors, "_uuid", staticmethod(lambda: b"GPU-0"))


def test_sensors_in_units_of_the_records() -> None:
    assert Sensors(Nvml()).read() == Clocks(sm=1980.0, power=650.5, temperature=61.0)


@pytest.mark.parametrize("broken", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetPowerUsage"])
def test_a_library_that_fails_is_not_asked_again(broken: str) -> None:
    library = Nvml(broken)
    sensors = Sensors(library)
    assert sensors.read() is None
    asked = len(library.calls)
    assert sensors.read() is None
    assert len(library.calls) == asked


def test_a_library_without_a_function() -> None:
    class Old:
        nvmlInit_v2 = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)

    assert Sensors(Old()).read() is None


def test_the_middle_of_readings() -> None:
    readings = [Clocks(1000.0, 10.0, 30.0), None, Clocks(3000.0, 20.0, 50.0), Clocks(1100.0, 90.0, 40.0)]
    assert middle(readings) == Clocks(1100.0, 20.0, 40.0)
    assert middle([None, None]) is None
