"""NVIDIA GPUs through NVML: which there are, which CUDA sees, which were lost and came back."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopipe.core.telemetry.counters import Unreadable, Unsupported
from autopipe.core.telemetry.nvml_api import DeviceLost, Nvml
from autopipe.core.telemetry.nvml_device import NvmlDevice
from autopipe.core.telemetry.snapshot import DeviceInfo, DeviceKind, DeviceSnapshot
from autopipe.core.telemetry.source import TelemetrySource, TelemetryUnavailableError
from autopipe.core.telemetry.visible import (
    PhysicalGpu,
    Visible,
    match_uuids,
    order_is_ambiguous,
    uuids_from_torch,
    visible_devices,
)

logger = logging.getLogger(__name__)
_FAILURES = (Unsupported, Unreadable, DeviceLost)


@dataclass(slots=True)
class _Slot:
    """A device this source reports: `device` is None while it cannot be read, for the reason in `error`."""

    info: DeviceInfo
    place: Visible
    known: bool
    device: NvmlDevice | None = None
    error: str | None = None


class NvmlSource(TelemetrySource):
    """All GPUs CUDA may use here, in CUDA's order, matched by UUID.

    The set is chosen when first opened: by PyTorch's UUIDs if it has already started CUDA in this process,
    else by CUDA_VISIBLE_DEVICES. A GPU that was already lost then has the id `gpu-INDEX` until it says its
    UUID.

    Args:
        all_devices: report every GPU and MIG device of the machine, visible to CUDA or not.
        retry_s: wait before a lost device is tried again, first and longest (it doubles in between).
        environment: for CUDA_VISIBLE_DEVICES; default: the process's.
    """

    def __init__(
        self,
        all_devices: bool = False,
        retry_s: tuple[float, float] = (1.0, 60.0),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._all_devices = all_devices
        self._retry_s = retry_s
        self._environment = os.environ if environment is None else environment
        self._nvml: Nvml | None = None
        self._slots: list[_Slot] | None = None
        self._next_wait_s = retry_s[0]
        self._retry_at_s = 0.0

    @property
    def name(self) -> str:
        return "nvml"

    def open(self) -> None:
        if self._nvml is not None:
            return
        nvml = Nvml()
        nvml.start()
        self._nvml = nvml
        try:
            if self._slots is None:
                self._slots = self._choose(nvml)
            for slot in self._slots:
                self._attach(slot, nvml, after_gap=True)
        except _FAILURES as error:  # not one device's fault: the GPUs cannot even be counted
            self.close()
            raise TelemetryUnavailableError(f"GPU telemetry is off: GPUs cannot be listed: {error}") from None

    def close(self) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is None:
            return
        for slot in self._slots or ():
            if slot.device is not None:
                slot.device.close()
        nvml.stop()

    def read(self) -> tuple[DeviceSnapshot, ...]:
        if self._nvml is None or self._slots is None:
            raise TelemetryUnavailableError("nvml: the source is not open")
        if any(slot.error for slot in self._slots) and time.monotonic() >= self._retry_at_s:
            self._retry(self._slots, self._nvml)
        return tuple(self._read(slot) for slot in self._slots)

    def _read(self, slot: _Slot) -> DeviceSnapshot:
        if slot.error is None and slot.device is not None:
            try:
                return slot.device.read()
            except Unreadable as error:
                return DeviceSnapshot(slot.info, time.monotonic(), error=str(error))
            except DeviceLost as error:
                self._lost(slot, str(error))
        return DeviceSnapshot(slot.info, time.monotonic(), error=slot.error)

    def _lost(self, slot: _Slot, why: str) -> None:
        logger.warning("%s (%s) cannot be read: %s; the other devices go on", slot.info.label, slot.info.id, why)
        slot.error = why
        self._next_wait_s = self._retry_s[0]
        self._retry_at_s = time.monotonic() + self._next_wait_s

    def _retry(self, slots: Sequence[_Slot], nvml: Nvml) -> None:
        """Try lost devices again: first as we are, then in a new NVML session (needed after a reset)."""
        lost = [slot for slot in slots if slot.error]
        for slot in lost:
            self._attach(slot, nvml, after_gap=True)
        if any(slot.error for slot in lost):
            self._restart(slots, nvml)
        for slot in lost:
            if slot.error is None:
                logger.warning("%s (%s) can be read again", slot.info.label, slot.info.id)
        self._next_wait_s = min(2 * self._next_wait_s, self._retry_s[1])
        self._retry_at_s = time.monotonic() + self._next_wait_s

    def _restart(self, slots: Sequence[_Slot], nvml: Nvml) -> None:
        for slot in slots:
            if slot.device is not None:
                slot.device.close()
        nvml.stop()
        try:
            nvml.start()
        except TelemetryUnavailableError as error:
            for slot in slots:
                slot.error = str(error)
            return
        for slot in slots:
            self._attach(slot, nvml, after_gap=slot.error is not None)

    def _attach(self, slot: _Slot, nvml: Nvml, after_gap: bool) -> None:
        """(Re)open the slot's device by UUID; sets `slot.error`."""
        try:
            if not slot.known:
                self._identify(slot, nvml)
            handle = nvml.call("nvmlDeviceGetHandleByUUID", slot.info.id)
            parent = gpu_instance = None
            if slot.info.parent_id is not None:
                parent = nvml.call("nvmlDeviceGetHandleByUUID", slot.info.parent_id)
                gpu_instance = _optional_number(nvml, "nvmlDeviceGetGpuInstanceId", handle)
            nvml.text("nvmlDeviceGetUUID", handle)  # some drivers hand out handles of lost GPUs
            if slot.device is None:
                slot.device = NvmlDevice(nvml, slot.info, handle, parent, gpu_instance)
            else:
                slot.device.reopen(handle, parent, gpu_instance, after_gap)
            slot.error = None
        except _FAILURES as error:
            if slot.error is None:
                self._lost(slot, str(error))
            slot.error = str(error)

    @staticmethod
    def _identify(slot: _Slot, nvml: Nvml) -> None:
        """A GPU lost from the start: see whether it says its name by now."""
        handle = nvml.call("nvmlDeviceGetHandleByIndex", slot.place.gpu)
        uuid, name = nvml.text("nvmlDeviceGetUUID", handle), nvml.text("nvmlDeviceGetName", handle)
        slot.info = replace(slot.info, id=uuid, name=name)
        slot.known = True

    def _choose(self, nvml: Nvml) -> list[_Slot]:
        """The devices to report, as CUDA numbers them."""
        gpus = _list_gpus(nvml)
        seen = self._visible(gpus)
        slots = [_slot(place, ordinal, gpus) for ordinal, place in enumerate(seen)]
        if self._all_devices:
            every = [place for gpu in range(len(gpus)) for place in _parts(gpu, gpus[gpu])]
            slots += [_slot(place, None, gpus) for place in every if place not in seen]
        for slot in slots:
            if slot.place.mig is not None:
                mig = gpus[slot.place.gpu].mig[slot.place.mig][0]
                slot.info = replace(slot.info, name=_optional_name(nvml, mig) or slot.info.name)
        return slots

    def _visible(self, gpus: Sequence[PhysicalGpu]) -> list[Visible]:
        uuids = uuids_from_torch()
        matched = None if uuids is None else match_uuids(uuids, gpus)
        if matched is not None:
            return matched
        value = self._environment.get("CUDA_VISIBLE_DEVICES")
        if order_is_ambiguous(value, self._environment, gpus):
            logger.warning(
                "GPUs of several models: CUDA may number them otherwise than this telemetry; "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )
        return visible_devices(value, gpus)


def _parts(index: int, gpu: PhysicalGpu) -> list[Visible]:
    """The GPU itself (of one in MIG mode, it shows the chip's power), then its MIG devices."""
    return [Visible(index), *(Visible(index, position) for position in range(len(gpu.mig)))]


def _slot(place: Visible, ordinal: int | None, gpus: Sequence[PhysicalGpu]) -> _Slot:
    gpu = gpus[place.gpu]
    if place.mig is not None:
        info = DeviceInfo(gpu.mig[place.mig][0], DeviceKind.MIG, f"{gpu.name} MIG", ordinal, gpu.uuid)
        return _Slot(info, place, known=True)
    info = DeviceInfo(gpu.uuid or f"gpu-{place.gpu}", DeviceKind.GPU, gpu.name or "unknown GPU", ordinal)
    return _Slot(info, place, known=gpu.uuid is not None)


def _list_gpus(nvml: Nvml) -> list[PhysicalGpu]:
    """Every GPU; one that cannot be asked is there, without a UUID.

    Raises:
        Unsupported, Unreadable, DeviceLost: the GPUs cannot even be counted.
    """
    gpus = []
    for index in range(nvml.call("nvmlDeviceGetCount")):
        try:
            handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
            uuid = nvml.text("nvmlDeviceGetUUID", handle)
        except _FAILURES:
            gpus.append(PhysicalGpu(uuid=None))
            continue
        try:
            name = nvml.text("nvmlDeviceGetName", handle)
        except _FAILURES:
            name = "unknown GPU"
        enabled, mig = _list_mig(nvml, handle)
        gpus.append(PhysicalGpu(uuid, name, mig, enabled))
    return gpus


def _list_mig(nvml: Nvml, handle: Any) -> tuple[bool, tuple[tuple[str, int | None, int | None], ...]]:
    """Whether MIG mode is on, and the MIG devices."""
    try:
        if not nvml.call("nvmlDeviceGetMigMode", handle)[0]:
            return False, ()
        most = nvml.call("nvmlDeviceGetMaxMigDeviceCount", handle)
    except _FAILURES:
        return False, ()
    found = []
    for index in range(most):
        try:
            device = nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            uuid = nvml.text("nvmlDeviceGetUUID", device)
        except _FAILURES:
            continue  # no such instance: the numbers need not be dense
        gpu_instance = _optional_number(nvml, "nvmlDeviceGetGpuInstanceId", device)
        compute_instance = _optional_number(nvml, "nvmlDeviceGetComputeInstanceId", device)
        found.append((uuid, gpu_instance, compute_instance))
    return True, tuple(found)


def _optional_number(nvml: Nvml, function: str, handle: Any) -> int | None:
    try:
        return int(nvml.call(function, handle))
    except _FAILURES:
        return None


def _optional_name(nvml: Nvml, uuid: str) -> str | None:
    try:
        return nvml.text("nvmlDeviceGetName", nvml.call("nvmlDeviceGetHandleByUUID", uuid))
    except _FAILURES:
        return None
