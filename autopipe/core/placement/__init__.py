"""Placement: which stage, and which layers of it, go on which device; how much memory and time that takes."""

from autopipe.core.placement.device_map import apply_placement, device_map
from autopipe.core.placement.hardware import (
    KINDS,
    Curve,
    Device,
    DeviceKind,
    Hardware,
    LinkSpec,
    load_hardware,
    local_hardware,
    parse_hardware,
)
from autopipe.core.placement.latency import Latency, Part, stage_latency
from autopipe.core.placement.memory import MAX_SHARE, MemoryUse, gigabytes, memory_use, weight_bytes
from autopipe.core.placement.place import Candidate, Placement, StagePlacement, place
from autopipe.core.placement.rebalance import LayerMove, rebalance
from autopipe.core.placement.sizes import PUBLISHED, ModelSizes, sizes_from_config, sizes_of

__all__ = [
    "KINDS",
    "MAX_SHARE",
    "PUBLISHED",
    "Candidate",
    "Curve",
    "Device",
    "DeviceKind",
    "Hardware",
    "Latency",
    "LayerMove",
    "LinkSpec",
    "MemoryUse",
    "ModelSizes",
    "Part",
    "Placement",
    "StagePlacement",
    "apply_placement",
    "device_map",
    "gigabytes",
    "load_hardware",
    "local_hardware",
    "memory_use",
    "parse_hardware",
    "place",
    "rebalance",
    "sizes_from_config",
    "sizes_of",
    "stage_latency",
    "weight_bytes",
]
