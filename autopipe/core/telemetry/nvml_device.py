"""Reads one GPU or MIG device through NVML."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from autopipe.core.telemetry import nvml_gpm
from autopipe.core.telemetry.counters import AskOnce, CounterTotal, Unreadable, Unsupported
from autopipe.core.telemetry.nvml_api import NOT_AVAILABLE_32, NOT_AVAILABLE_64, DeviceLost, Nvml
from autopipe.core.telemetry.nvml_links import Links
from autopipe.core.telemetry.snapshot import DeviceInfo, DeviceSnapshot, ThrottleReason

# nvml.h, nvmlClocksEventReasons
_REASONS = (
    ThrottleReason.IDLE,
    ThrottleReason.CLOCKS_SETTING,
    ThrottleReason.POWER_CAP,
    ThrottleReason.HARDWARE_SLOWDOWN,
    ThrottleReason.SYNC_BOOST,
    ThrottleReason.SOFTWARE_THERMAL,
    ThrottleReason.HARDWARE_THERMAL,
    ThrottleReason.POWER_BRAKE,
    ThrottleReason.DISPLAY_CLOCK,
    ThrottleReason.BOARD_LIMIT,
    ThrottleReason.RELIABILITY,
)
_GRAPHICS_CLOCK, _SM_CLOCK, _MEMORY_CLOCK = 0, 1, 2


def throttle_reasons(mask: int) -> tuple[ThrottleReason, ...]:
    """The reasons in an NVML bit mask."""
    reasons = [reason for bit, reason in enumerate(_REASONS) if mask >> bit & 1]
    return tuple(reasons + [ThrottleReason.OTHER] * (mask >> len(_REASONS) > 0))


class NvmlDevice:
    """One device; keeps what it learned (unsupported figures, energy so far) when the device is opened again.

    A MIG device has memory (and GPM) of its own; temperature, clocks and throttling are those of its GPU;
    power, energy and links are not counted by slice, so they are None.

    Args:
        info: who it is.
        handle: NVML's handle.
        parent: of a MIG device, its GPU's handle.
        gpu_instance: of a MIG device.
    """

    def __init__(
        self, nvml: Nvml, info: DeviceInfo, handle: Any, parent: Any = None, gpu_instance: int | None = None
    ) -> None:
        self.info = info
        self._nvml = nvml
        self._ask = AskOnce(info.label)
        self._energy = CounterTotal(joules_per_unit=1e-3)
        self._links = Links(nvml, self._ask)
        self._attach(handle, parent, gpu_instance)

    def _attach(self, handle: Any, parent: Any, gpu_instance: int | None) -> None:
        self._handle = handle
        self._parent = parent
        self._chip = handle if parent is None else parent
        self._gpm = nvml_gpm.Gpm(self._nvml, self._chip, gpu_instance)

    def reopen(self, handle: Any, parent: Any, gpu_instance: int | None, after_gap: bool) -> None:
        """Go on with new handles; `after_gap`: the device was not read for a while."""
        self._attach(handle, parent, gpu_instance)
        if after_gap:
            self._links.forget()

    def close(self) -> None:
        """Free what NVML holds for this device."""
        with contextlib.suppress(Unsupported, Unreadable, DeviceLost):  # its session may be gone
            self._gpm.close()

    def read(self) -> DeviceSnapshot:
        """One reading.

        Raises:
            DeviceLost: the device does not answer.
            Unreadable: not one figure could be read, though the device has some.
        """
        time_s = time.monotonic()
        # Ask who it is first: a stale handle answers "invalid argument", which elsewhere means "never".
        try:
            uuid = self._nvml.text("nvmlDeviceGetUUID", self._handle)
        except Unsupported as error:
            raise DeviceLost(str(error)) from None
        if uuid != self.info.id:
            raise DeviceLost(f"another device ({uuid}) has taken its place")
        figures: dict[str, Any] = {}
        if self._parent is None:
            figures |= self._whole_gpu()
        figures |= self._memory() | self._state()
        gpm = self._ask("gpm", self._gpm.read) or {}
        figures["sm_utilisation"] = gpm.get(nvml_gpm.SM_UTIL)
        figures["sm_occupancy"] = gpm.get(nvml_gpm.SM_OCCUPANCY)
        figures["dram_bandwidth_utilisation"] = gpm.get(nvml_gpm.DRAM_BW_UTIL)
        if figures.get("utilisation") is None:
            figures["utilisation"] = gpm.get(nvml_gpm.GRAPHICS_UTIL)
        if self._parent is None:
            figures |= self._links.read(self._handle, time_s, gpm)
        problem = self._ask.take_problem()
        if problem is not None and all(value is None for value in figures.values()):
            raise Unreadable(problem)
        return DeviceSnapshot(self.info, time_s, **figures)

    def _whole_gpu(self) -> dict[str, Any]:
        """Power, energy and utilisation, which NVML counts by GPU only."""
        energy = self._ask("energy", self._number("nvmlDeviceGetTotalEnergyConsumption", NOT_AVAILABLE_64))
        power_mw = self._ask("power", self._number("nvmlDeviceGetPowerUsage"))
        limit_mw = self._ask(
            "power_limit",
            self._number("nvmlDeviceGetEnforcedPowerLimit"),
            self._number("nvmlDeviceGetPowerManagementLimit"),
        )
        rates = "nvmlDeviceGetUtilizationRates"
        busy = self._ask("utilisation", lambda: self._nvml.call(rates, self._handle))
        return {
            "energy": None if energy is None else self._energy.update(energy, 1 << 64),
            "power_w": None if power_mw is None else power_mw / 1000,
            "power_limit_w": None if limit_mw is None else limit_mw / 1000,
            "utilisation": None if busy is None else busy.gpu / 100,
            "memory_utilisation": None if busy is None else busy.memory / 100,
        }

    def _memory(self) -> dict[str, Any]:
        """Used and total. Version 2 does not count what the driver keeps for itself as used."""
        memory = self._ask(
            "memory",
            lambda: self._nvml.call("nvmlDeviceGetMemoryInfo", self._handle, version=self._nvml.bindings.nvmlMemory_v2),
            lambda: self._nvml.call("nvmlDeviceGetMemoryInfo", self._handle),
        )
        if memory is None or memory.total in (0, NOT_AVAILABLE_64):
            return {}
        return {"memory_used_bytes": int(memory.used), "memory_total_bytes": int(memory.total)}

    def _state(self) -> dict[str, Any]:
        """Temperature, clocks, throttling: of the chip."""
        mask = self._ask(
            "throttle_reasons",
            self._number("nvmlDeviceGetCurrentClocksEventReasons", NOT_AVAILABLE_64),
            self._number("nvmlDeviceGetCurrentClocksThrottleReasons", NOT_AVAILABLE_64),
        )
        return {
            "temperature_c": self._ask(
                "temperature",
                self._number("nvmlDeviceGetTemperatureV", NOT_AVAILABLE_32, 0),
                self._number("nvmlDeviceGetTemperature", NOT_AVAILABLE_32, 0),
            ),
            "clock_mhz": self._ask(
                "clock",
                self._number("nvmlDeviceGetClockInfo", NOT_AVAILABLE_32, _SM_CLOCK),
                self._number("nvmlDeviceGetClockInfo", NOT_AVAILABLE_32, _GRAPHICS_CLOCK),
            ),
            "memory_clock_mhz": self._ask(
                "memory_clock", self._number("nvmlDeviceGetClockInfo", NOT_AVAILABLE_32, _MEMORY_CLOCK)
            ),
            "throttle_reasons": None if mask is None else throttle_reasons(mask),
        }

    def _number(self, function: str, not_available: int = NOT_AVAILABLE_32, *arguments: int) -> Callable[[], int]:
        def ask() -> int:
            value = int(self._nvml.call(function, self._chip, *arguments))
            if value == not_available:
                raise Unreadable(f"{function} says not available")
            return value

        return ask
