"""GPM, the performance counters of Hopper and newer GPUs: figures over the time between two samples.

nvml.h: at least 100 ms should lie between the samples.
"""

from __future__ import annotations

import math
from typing import Any

from autopipe.core.telemetry.counters import Unsupported
from autopipe.core.telemetry.nvml_api import Nvml

# nvml.h, nvmlGpmMetricId_t; 1 to 10 in per cent, the others in MiB/s.
GRAPHICS_UTIL, SM_UTIL, SM_OCCUPANCY, DRAM_BW_UTIL = 1, 2, 3, 10
PCIE_TX, PCIE_RX, NVLINK_RX, NVLINK_TX = 20, 21, 60, 61
_ALL = (GRAPHICS_UTIL, SM_UTIL, SM_OCCUPANCY, DRAM_BW_UTIL, PCIE_TX, PCIE_RX, NVLINK_RX, NVLINK_TX)
_PER_CENT = {GRAPHICS_UTIL, SM_UTIL, SM_OCCUPANCY, DRAM_BW_UTIL}
_MIB = 1 << 20


class Gpm:
    """Samples of one device.

    Args:
        handle: of the GPU; for a MIG device, of its GPU.
        gpu_instance: for a MIG device, its GPU instance.
    """

    def __init__(self, nvml: Nvml, handle: Any, gpu_instance: int | None = None) -> None:
        self._nvml = nvml
        self._handle = handle
        self._gpu_instance = gpu_instance
        self._samples: list[Any] = []
        self._num_taken = 0

    def read(self) -> dict[int, float]:
        """Figures since the last call (shares 0 to 1, bytes per second); empty the first time.

        Raises:
            Unsupported: the GPU has no GPM.
            Unreadable, DeviceLost: as `Nvml.call`.
        """
        if not self._samples:
            if not self._nvml.call("nvmlGpmQueryDeviceSupport", self._handle).isSupportedDevice:
                raise Unsupported("no GPM")
            self._samples = [self._nvml.call("nvmlGpmSampleAlloc")]
            self._samples.append(self._nvml.call("nvmlGpmSampleAlloc"))
        older, newer = self._samples
        if self._gpu_instance is None:
            self._nvml.call("nvmlGpmSampleGet", self._handle, newer)
        else:
            self._nvml.call("nvmlGpmMigSampleGet", self._handle, self._gpu_instance, newer)
        self._samples = [newer, older]
        self._num_taken += 1
        return self._between(older, newer) if self._num_taken > 1 else {}

    def close(self) -> None:
        """Free the samples (before the NVML session ends)."""
        samples, self._samples, self._num_taken = self._samples, [], 0
        for sample in samples:
            self._nvml.call("nvmlGpmSampleFree", sample)

    def _between(self, older: Any, newer: Any) -> dict[int, float]:
        request = self._nvml.bindings.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.bindings.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_ALL)
        request.sample1, request.sample2 = older, newer
        for index, metric in enumerate(_ALL):
            request.metrics[index].metricId = metric
        self._nvml.call("nvmlGpmMetricsGet", request)
        figures = {}
        for index, metric in enumerate(_ALL):
            answer = request.metrics[index]
            if answer.nvmlReturn == 0 and math.isfinite(answer.value):
                figures[metric] = answer.value / 100 if metric in _PER_CENT else answer.value * _MIB
        return figures
