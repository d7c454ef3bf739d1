"""Draws snapshots and pipeline with rich. What is not known is a dash."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.core.telemetry.snapshot import DeviceKind, DeviceSnapshot, Snapshot
from autopipe.core.telemetry.views import PipelineView

_DASH = "-"
_GIB = 1 << 30
_BAR_WIDTH = 8
_CORES_SHOWN = 32
_SILENT_S = 15.0
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def frame(snapshot: Snapshot, pipelines: Sequence[PipelineView]) -> RenderableType:
    """One frame: devices, what they are doing, problems, then the pipelines."""
    parts: list[RenderableType] = [_devices(snapshot)]
    gpus = [found for found in snapshot if found.device.kind is not DeviceKind.CPU and found.error is None]
    if any(_has_details(device) for device in gpus):
        parts.append(_details(gpus))
    for device in snapshot:
        if device.cores:
            parts.append(_cores(device))
    parts += [Text(problem, style="yellow") for problem in snapshot.problems]
    parts += [_pipeline(pipeline) for pipeline in pipelines]
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=index != 1)
    return table


def _devices(snapshot: Snapshot) -> Table:
    table = _table("Devices", "device", "name", "busy", "memory GiB", "power W", "°C", "MHz", "throttled by")
    for device in snapshot:
        if device.error is not None:
            table.add_row(device.device.label, Text(device.device.name), Text(device.error, style="red"))
            continue
        table.add_row(
            device.device.label,
            Text(device.device.name),
            _bar(device.utilisation),
            _of(_scaled(device.memory_used_bytes, _GIB), _scaled(device.memory_total_bytes, _GIB), 1),
            _of(device.power_w, device.power_limit_w, 0),
            _number(device.temperature_c, 0),
            _number(device.clock_mhz, 0),
            _throttle(device),
        )
    if not snapshot.devices:
        table.add_row(_DASH, "no device could be read")
    return table


def _has_details(device: DeviceSnapshot) -> bool:
    figures = (device.sm_utilisation, device.sm_occupancy, device.dram_bandwidth_utilisation)
    links = (device.nvlink_tx_bytes_per_s, device.pcie_tx_bytes_per_s)
    return any(figure is not None for figure in figures + links)


def _details(gpus: list[DeviceSnapshot]) -> Table:
    table = _table("GPU details (links in MB/s, out / in)", "device", "", "SM", "occupancy", "DRAM", "NVLink", "PCIe")
    for gpu in gpus:
        table.add_row(
            gpu.device.label,
            "",
            _per_cent(gpu.sm_utilisation),
            _per_cent(gpu.sm_occupancy),
            _per_cent(gpu.dram_bandwidth_utilisation),
            _pair(gpu.nvlink_tx_bytes_per_s, gpu.nvlink_rx_bytes_per_s),
            _pair(gpu.pcie_tx_bytes_per_s, gpu.pcie_rx_bytes_per_s),
        )
    return table


def _cores(device: DeviceSnapshot) -> Text:
    """A column a core, as high as its load."""
    cores = device.cores or ()
    bars = "".join(
        "·" if core.utilisation is None else _EIGHTHS[round(core.utilisation * (len(_EIGHTHS) - 1))]
        for core in cores[:_CORES_SHOWN]
    )
    more = f" and {len(cores) - _CORES_SHOWN} more" if len(cores) > _CORES_SHOWN else ""
    return Text(f"{device.device.label} cores [{bars}]{more}")


def _pipeline(pipeline: PipelineView) -> Group:
    title = "Pipeline" if pipeline.pid is None else f"Pipeline of process {pipeline.pid}"
    state = {None: "", True: "busy", False: "idle"}[pipeline.busy]
    if pipeline.silent_s is not None and pipeline.silent_s > _SILENT_S:
        state = f"silent for {_duration(pipeline.silent_s)}"
    about = [pipeline.plan or f"mode {pipeline.mode}", state]
    if pipeline.age_s is not None:
        about.append(f"loaded {_duration(pipeline.age_s)} ago")
    facts = [
        f"{_number(pipeline.tokens_per_s, 1)} tokens/s",
        f"acceptance length {_number(pipeline.acceptance_length, 2)}",
        f"tokens {_number(pipeline.num_tokens, 0)}",
        f"waiting {_number(pipeline.num_waiting, 0)}",
        f"{_number(pipeline.j_per_token, 2)} J/token",
    ]
    table = _table("", "stage", "device", "accepted", "drafts / window", "busy", "step ms", "rollbacks")
    for stage in pipeline.stages:
        table.add_row(
            Text(stage.name),
            Text(stage.device or _DASH),
            _per_cent(stage.acceptance_rate),
            _of(stage.window_fill, stage.window, 1),
            _bar(stage.busy_share),
            _number(stage.step_ms, 1),
            _number(stage.num_rollbacks, 0),
        )
    heading = Text.assemble((title, "italic"), ": ", "; ".join(part for part in about if part))
    return Group(heading, table, Text(", ".join(facts)))


def _throttle(device: DeviceSnapshot) -> Text:
    if device.throttle_reasons is None:
        return Text(_DASH)
    words = ", ".join(reason.value.replace("_", " ") for reason in device.throttle_reasons) or "nothing"
    return Text(words, style="red" if device.throttled else "")


def _bar(share: float | None) -> str:
    if share is None:
        return _DASH
    filled = round(min(1.0, max(0.0, share)) * _BAR_WIDTH)
    return f"{'█' * filled}{'░' * (_BAR_WIDTH - filled)} {share:4.0%}"


def _number(value: float | None, digits: int) -> str:
    return _DASH if value is None else f"{value:,.{digits}f}"


def _per_cent(share: float | None) -> str:
    return _DASH if share is None else f"{share:.0%}"


def _scaled(value: int | None, unit: int) -> float | None:
    return None if value is None else value / unit


def _of(value: float | None, most: float | None, digits: int) -> str:
    if value is None and most is None:
        return _DASH
    most_digits = 0 if isinstance(most, int) else digits
    return _number(value, digits) if most is None else f"{_number(value, digits)} / {_number(most, most_digits)}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _pair(out: float | None, into: float | None) -> str:
    if out is None and into is None:
        return _DASH
    return f"{_number(_mb(out), 1)} / {_number(_mb(into), 1)}"


def _mb(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else bytes_per_s / 1e6
