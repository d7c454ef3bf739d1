"""Several stretches of time taken together, such as the requests of a bench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopipe.core.telemetry.use import MEANS, DeviceUse, TelemetryUse


def combine_devices(uses: Sequence[TelemetryUse]) -> tuple[DeviceUse, ...]:
    """Each device over all stretches: means weighted by their length, the most, the highest, and sums of energy.

    Energy is None where one of the stretches lacks it.
    """
    found: dict[str, list[tuple[DeviceUse, TelemetryUse]]] = {}
    for use in uses:
        for device in use.devices:
            found.setdefault(device.device.id, []).append((device, use))
    return tuple(_combined(parts) for parts in found.values())


def total_j_per_token(devices: Sequence[DeviceUse]) -> float | None:
    """Joules per token of all devices that have a counter; None where none has."""
    known = [device.j_per_token for device in devices if device.j_per_token is not None]
    return sum(known) if known else None


def _combined(parts: Sequence[tuple[DeviceUse, TelemetryUse]]) -> DeviceUse:
    devices = [device for device, _ in parts]
    joules = [device.energy_j for device in devices]
    energy_j = None if None in joules else sum(j for j in joules if j is not None)
    num_tokens = sum(use.energy.num_tokens for _, use in parts)
    used = [device.memory_used_bytes for device in devices if device.memory_used_bytes is not None]
    hot = [device.temperature_c for device in devices if device.temperature_c is not None]
    reasons = [device.throttle_reasons for device in devices if device.throttle_reasons is not None]
    means: dict[str, Any] = {figure: _weighted_mean(parts, figure) for figure in MEANS}
    return replace(
        devices[-1],
        num_samples=sum(device.num_samples for device in devices),
        memory_used_bytes=max(used, default=None),
        temperature_c=max(hot, default=None),
        throttle_reasons=tuple(dict.fromkeys(reason for met in reasons for reason in met)) if reasons else None,
        energy_j=energy_j,
        j_per_token=energy_j / num_tokens if energy_j is not None and num_tokens else None,
        **means,
    )


def _weighted_mean(parts: Sequence[tuple[DeviceUse, TelemetryUse]], figure: str) -> float | None:
    known = [(getattr(device, figure), use.energy.duration_s) for device, use in parts]
    known = [(value, seconds) for value, seconds in known if value is not None]
    total_s = sum(seconds for _, seconds in known)
    return sum(value * seconds for value, seconds in known) / total_s if total_s > 0 else None
