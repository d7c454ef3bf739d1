"""The page on what has run on a GPU, against the sources."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "autopipe"
NAMED = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/gpu-status.md").read_text(encoding="utf-8")))
FOR_GPUS = re.compile(r"torch\.cuda|nvml|cudart")


def test_every_file_with_code_for_gpus_is_on_the_page() -> None:
    files = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if FOR_GPUS.search(path.read_text(encoding="utf-8"))
    }
    assert "core/backends/fused_cuda.py" in files
    assert sorted(files - NAMED) == []


def test_every_file_on_the_page_exists() -> None:
    assert [name for name in sorted(NAMED - {"tests/test_gpu_status.py"}) if not (SOURCES / name).is_file()] == []
