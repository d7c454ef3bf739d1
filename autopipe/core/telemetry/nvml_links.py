"""PCIe and NVLink throughput: differenced byte counters, else GPM, else NVML's slow meter."""

from __future__ import annotations

from typing import Any

from autopipe.core.telemetry import nvml_gpm
from autopipe.core.telemetry.counters import AskOnce, CounterRate
from autopipe.core.telemetry.nvml_api import Nvml

_ALL_LINKS = 0xFFFFFFFF  # nvml.h: as scopeId, the sum over all NVLinks
_SLOW_METER_EVERY_S = 1.0  # nvmlDeviceGetPcieThroughput blocks for 20 ms a direction

# name: (field id, scope, bytes per count, GPM metric); field ids from nvml.h.
_COUNTERS = {
    "nvlink_tx": (138, _ALL_LINKS, 1024, nvml_gpm.NVLINK_TX),
    "nvlink_rx": (139, _ALL_LINKS, 1024, nvml_gpm.NVLINK_RX),
    "pcie_tx": (197, 0, 1, nvml_gpm.PCIE_TX),
    "pcie_rx": (198, 0, 1, nvml_gpm.PCIE_RX),
}


class Links:
    """Throughput of one GPU."""

    def __init__(self, nvml: Nvml, ask: AskOnce) -> None:
        self._nvml = nvml
        self._ask = ask
        self._rates = {name: CounterRate() for name in _COUNTERS}
        self._metered: tuple[float, float | None, float | None] | None = None

    def forget(self) -> None:
        """There was a gap: the next readings are first ones."""
        for rate in self._rates.values():
            rate.forget()
        self._metered = None

    def read(self, handle: Any, time_s: float, gpm: dict[int, float]) -> dict[str, float | None]:
        """Bytes per second, keyed as the attributes of `DeviceSnapshot`."""
        figures = {name: gpm.get(_COUNTERS[name][3]) for name in _COUNTERS}
        counters = self._counters(handle)
        for name, (value, modulus) in counters.items():
            rate = self._rates[name].update(time_s, value, modulus)
            figures[name] = None if rate is None else rate * _COUNTERS[name][2]
        if "pcie_tx" not in counters and "pcie_rx" not in counters and figures["pcie_tx"] is None:
            figures["pcie_tx"], figures["pcie_rx"] = self._meter(handle, time_s)
        return {f"{name}_bytes_per_s": value for name, value in figures.items()}

    def _counters(self, handle: Any) -> dict[str, tuple[int, int]]:
        """Counter and modulus by name, for those the GPU has; all in one call."""
        names = [name for name in _COUNTERS if self._ask.has(f"{name}_counter")]
        if not names or not self._ask.has("fields"):
            return {}
        ids = [_COUNTERS[name][:2] for name in names]
        values = self._ask("fields", lambda: self._nvml.call("nvmlDeviceGetFieldValues", handle, ids))
        found = {}
        for name, value in zip(names, values or (), strict=False):
            if self._ask(f"{name}_counter", lambda value=value: self._answered(value)):  # type: ignore[misc]  # a default makes the type of a lambda unknown
                found[name] = self._counter(value)
        return found

    def _answered(self, value: Any) -> bool:
        self._nvml.check(value.nvmlReturn)
        return True

    def _counter(self, value: Any) -> tuple[int, int]:
        if value.valueType == self._nvml.bindings.NVML_VALUE_TYPE_UNSIGNED_INT:
            return int(value.value.uiVal), 1 << 32
        return int(value.value.ullVal), 1 << 64

    def _meter(self, handle: Any, time_s: float) -> tuple[float | None, float | None]:
        """NVML's own meter, in KB/s over its last 20 ms; between two askings the last answer stands."""
        if self._metered is None or time_s - self._metered[0] >= _SLOW_METER_EVERY_S:
            tx, rx = (
                self._ask(f"pcie_meter_{which}", lambda which=which: self._metered_rate(handle, which))  # type: ignore[misc]  # a default makes the type of a lambda unknown
                for which in (0, 1)
            )
            self._metered = (time_s, tx, rx)
        return self._metered[1:]

    def _metered_rate(self, handle: Any, which: int) -> float:
        return float(self._nvml.call("nvmlDeviceGetPcieThroughput", handle, which)) * 1000
