"""What a plan must keep to. A plan that does not is left out before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopipe.core.errors import ConfigError
from autopipe.tune.predict import Prediction

MEMORY_SHARE = 0.8
"""Models take at most this share of a device's memory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds; None: no bound.

    Attributes:
        memory_share: of every device's memory. memory_bytes: by device, instead of that share.
        ms_per_token: over all requests. ttft_s: mean seconds to the first token.
        j_per_token: energy of the whole machine.
    """

    memory_share: float = MEMORY_SHARE
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    ms_per_token: float | None = None
    ttft_s: float | None = None
    j_per_token: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.memory_share <= 1:
            raise ConfigError("--memory-share", self.memory_share, "above 0, at most 1")
        for key, value in (
            ("--max-ms-per-token", self.ms_per_token),
            ("--max-ttft-ms", self.ttft_s),
            ("--max-j-per-token", self.j_per_token),
        ):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(key, value, "above 0")

    def memory_limit(self, device: str, capacities: Mapping[str, int]) -> float | None:
        """Bytes that may be used on a device; None: its size is not known."""
        if device in self.memory_bytes:
            return float(self.memory_bytes[device])
        return None if device not in capacities else self.memory_share * capacities[device]

    def excesses(self, found: Prediction, capacities: Mapping[str, int]) -> dict[str, float]:
        """By limit, how far a plan is above it, relative to it; 0 or less where it keeps to it.

        Args:
            capacities: bytes of memory by device.
        """
        excess: dict[str, float] = {}
        for device, used in found.memory_bytes.items():
            limit = self.memory_limit(device, capacities)
            if limit is not None:
                excess[f"memory.{device}"] = used / limit - 1
        for name, limit, value in (
            ("ms_per_token", self.ms_per_token, found.ms_per_token),
            ("ttft_s", self.ttft_s, found.ttft_s),
            ("j_per_token", self.j_per_token, found.j_per_token),
        ):
            if limit is not None and value is not None:
                excess[name] = value / limit - 1
        return excess


def device_memory(devices: set[str]) -> dict[str, int]:
    """Bytes of memory of the CPU and of these devices; one whose size cannot be told is left out."""
    import psutil

    found = {"cpu": int(psutil.virtual_memory().total)}
    for device in sorted(devices - {"", "cpu"}):
        import torch

        if device.startswith("cuda") and torch.cuda.is_available():
            found[device] = int(torch.cuda.get_device_properties(device).total_memory)
    return found
