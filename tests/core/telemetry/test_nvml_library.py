"""The driver's library is found by the system's loader, as on a real machine: in a process of its own."""

import json
import os
import subprocess
import sys

PROGRAM = """
import json
from autopipe.core.telemetry import NvmlSource, TelemetryUnavailableError
source = NvmlSource()
try:
    source.open()
except TelemetryUnavailableError as error:
    print(json.dumps({"problem": str(error), "expected": error.expected}))
else:
    print(json.dumps([snapshot.to_dict() for snapshot in source.read()]))
    source.close()
"""


def run(library_folder):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library_folder)}
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(answer.stdout)


def test_library_is_loaded_by_name(config, build_fake):
    config.add_gpu("GPU-a")
    (snapshot,) = run(build_fake())
    assert (snapshot["device"]["id"], snapshot["power_w"], snapshot["sm_occupancy"]) == ("GPU-a", 150.0, None)


def test_broken_library_is_one_clear_line_and_no_alarm(config, tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    answer = run(tmp_path)
    assert "no NVIDIA driver library" in answer["problem"]
    assert answer["expected"]
