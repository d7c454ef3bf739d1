import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from autopipe.core.errors import ConfigError
from autopipe.core.telemetry import (
    CoreSnapshot,
    CpuSource,
    DeviceInfo,
    DeviceKind,
    DeviceSnapshot,
    NvmlSource,
    PipelineView,
    Snapshot,
    StageView,
    ThrottleReason,
    run_top,
)
from autopipe.core.telemetry.top import render_top, top_to_dict

GPU = DeviceInfo("GPU-a", DeviceKind.GPU, "Pretend [GPU]", ordinal=0)
CPU = DeviceInfo("cpu", DeviceKind.CPU, "Pretend CPU")
PIPELINE = PipelineView(
    mode="lockstep",
    stages=(StageView("ngram", "cpu", acceptance_rate=0.62, window=7, window_fill=3.0), StageView("target")),
    tokens_per_s=98.7,
    acceptance_length=2.3,
)


def text(snapshot, *pipelines):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render_top(snapshot, pipelines))
    return console.export_text()


def line_of(found, shown):
    return next(line for line in shown.splitlines() if found in line)


def test_figures_of_a_device_are_shown():
    gpu = DeviceSnapshot(
        GPU,
        0.0,
        utilisation=0.42,
        memory_used_bytes=3 << 30,
        memory_total_bytes=8 << 30,
        power_w=151.0,
        power_limit_w=400.0,
        temperature_c=55,
        throttle_reasons=(ThrottleReason.POWER_CAP,),
    )
    line = line_of("Pretend [GPU]", text(Snapshot(0.0, (gpu,))))
    for figure in ("cuda:0", "42%", "3.0 / 8.0", "151 / 400", "55", "power cap"):
        assert figure in line


def test_missing_figures_are_dashes_and_never_zero():
    line = line_of("Pretend CPU", text(Snapshot(0.0, (DeviceSnapshot(CPU, 0.0),))))
    assert "0" not in line
    assert line.split()[3:] == ["-"] * 6


def test_lost_device_shows_why():
    assert "GPU is lost" in text(Snapshot(0.0, (DeviceSnapshot(GPU, 0.0, error="GPU is lost"),)))


def test_problems_are_shown():
    assert "no driver" in text(Snapshot(0.0, (), ("no driver",)))


def test_each_core_is_shown():
    cores = (CoreSnapshot(0.0), CoreSnapshot(1.0), CoreSnapshot(None))
    assert "cpu cores [ █·]" in text(Snapshot(0.0, (DeviceSnapshot(CPU, 0.0, cores=cores),)))


def test_link_and_gpm_figures_are_shown_where_there_are_any():
    gpu = DeviceSnapshot(GPU, 0.0, sm_utilisation=0.5, pcie_tx_bytes_per_s=2e6, pcie_rx_bytes_per_s=3e6)
    shown = text(Snapshot(0.0, (gpu,)))
    assert "50%" in shown
    assert "2.0 / 3.0" in shown
    assert "GPU details" not in text(Snapshot(0.0, (DeviceSnapshot(GPU, 0.0),)))


def test_stages_and_speed_of_the_pipeline_are_shown():
    shown = text(Snapshot(0.0), PIPELINE)
    for figure in ("ngram", "62%", "3.0 / 7", "98.7 tokens/s", "mode lockstep"):
        assert figure in shown


def test_several_pipelines_are_told_apart_by_their_process():
    second = PipelineView(mode="plain", plan="plain: big", pid=77, age_s=90.0, silent_s=31.0, busy=False)
    shown = text(Snapshot(0.0), PIPELINE, second)
    assert "98.7 tokens/s" in shown
    assert "Pipeline of process 77: plain: big; silent for 31 s; loaded 90 s ago" in shown


def test_json_has_devices_and_pipelines():
    answer = json.loads(json.dumps(top_to_dict(Snapshot(1.0, (DeviceSnapshot(GPU, 0.0),)), [PIPELINE])))
    assert answer["devices"][0]["device"]["id"] == "GPU-a"
    assert answer["devices"][0]["power_w"] is None
    assert answer["pipelines"][0]["stages"][0]["acceptance_rate"] == 0.62


def test_once_shows_one_frame_with_loads():
    console = Console(width=140, record=True, file=io.StringIO())
    run_top([CpuSource()], lambda: [PIPELINE], once=True, console=console)
    shown = console.export_text()
    assert shown.count("Devices") == 1
    assert "%" in line_of("cpu ", shown)
    assert "98.7 tokens/s" in shown


def test_json_is_one_object_a_line():
    output = io.StringIO()
    run_top([CpuSource()], interval_s=0.1, as_json=True, num_frames=2, console=Console(file=output, width=40))
    frames = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [frame["devices"][0]["device"]["id"] for frame in frames] == ["cpu", "cpu"]
    assert frames[0]["pipelines"] == []


def test_gpus_are_shown(nvml):
    nvml.add_gpu("GPU-a", name=b"Odd\xff name")
    nvml.add_gpu("GPU-b", state=15)
    console = Console(width=140, record=True, file=io.StringIO())
    run_top([NvmlSource()], once=True, console=console)
    shown = console.export_text()
    assert "Odd\ufffd name" in shown
    assert "GPU is lost" in line_of("cuda:1", shown)


def test_terminal_view_ends_after_its_frames():
    console = Console(width=140, file=io.StringIO(), force_terminal=True)
    run_top([CpuSource()], interval_s=0.1, num_frames=2, console=console)
    assert "Devices" in console.file.getvalue()


def test_interrupt_ends_the_view_quietly():
    def pipeline():
        raise KeyboardInterrupt

    run_top([CpuSource()], pipeline, interval_s=0.1, console=Console(file=io.StringIO()))


def test_number_of_frames_must_be_positive():
    with pytest.raises(ConfigError, match="num_frames"):
        run_top([CpuSource()], num_frames=0)


def test_telemetry_imports_neither_torch_nor_rich_nor_pynvml():
    program = (
        "import sys, autopipe.core.telemetry; "
        "print([name for name in ('torch', 'rich', 'pynvml') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
