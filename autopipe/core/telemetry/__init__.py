"""What the machine does while it generates: utilisation, memory, power, energy, clocks, links.

    with Sampler() as sampler:                      # threads of its own; nothing here waits for hardware
        meter = sampler.measure_use()
        ...                                         # generate
        print(sampler.snapshot().get("cuda:0"), meter.stop(num_tokens=128).energy.total_j_per_token)

`SamplerLease` shares one sampler in a process; `announce` shows a running engine to `autopipe top`.

Third parties implement `TelemetrySource` and test it with `conformance.TelemetrySourceSuite`.
"""

from __future__ import annotations

from autopipe.core.telemetry.conformance import ConformanceError, TelemetrySourceSuite
from autopipe.core.telemetry.cpu import CpuSource
from autopipe.core.telemetry.energy import DeviceEnergy, EnergyMeter, EnergyUse
from autopipe.core.telemetry.nvml import NvmlSource
from autopipe.core.telemetry.sampler import Sampler
from autopipe.core.telemetry.shared import SamplerLease
from autopipe.core.telemetry.snapshot import (
    CoreSnapshot,
    DeviceInfo,
    DeviceKind,
    DeviceSnapshot,
    EnergyCounter,
    Snapshot,
    ThrottleReason,
)
from autopipe.core.telemetry.source import TelemetrySource, TelemetryUnavailableError
from autopipe.core.telemetry.top import run_top
from autopipe.core.telemetry.use import DeviceUse, TelemetryUse, UseMeter
from autopipe.core.telemetry.views import PipelineView, StageView

__all__ = [
    "ConformanceError",
    "CoreSnapshot",
    "CpuSource",
    "DeviceEnergy",
    "DeviceInfo",
    "DeviceKind",
    "DeviceSnapshot",
    "DeviceUse",
    "EnergyCounter",
    "EnergyMeter",
    "EnergyUse",
    "NvmlSource",
    "PipelineView",
    "Sampler",
    "SamplerLease",
    "Snapshot",
    "StageView",
    "TelemetrySource",
    "TelemetrySourceSuite",
    "TelemetryUnavailableError",
    "TelemetryUse",
    "ThrottleReason",
    "UseMeter",
    "default_sources",
    "run_top",
]


def default_sources() -> list[TelemetrySource]:
    """The CPU, and the NVIDIA GPUs CUDA may use."""
    return [CpuSource(), NvmlSource()]
