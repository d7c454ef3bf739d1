"""What a shared target gets of its device's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from autopipe.core.backends import fused_batch
from autopipe.core.backends import load as backends_load
from autopipe.core.models.loading import load_state
from autopipe.core.models.spec import resolve
from autopipe.core.plan import StagePlan
from autopipe.core.shared.loading import available_memory, load_model
from autopipe.core.shared.options import SharingOptions

HOST_BYTES, GPU_BYTES = 64 << 30, 8 << 30


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 64 GiB free, and a GPU with 8."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=HOST_BYTES))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ({"cuda:1": GPU_BYTES}[device], 80 << 30))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a batch runner is asked for, instead of making one."""
    asked: dict[str, Any] = {}

    def batch_runner(*_: Any, **options: Any) -> Any:
        asked.update(options)
        return SimpleNamespace(description="a stand-in")

    monkeypatch.setattr(fused_batch, "batch_runner", batch_runner)
    return asked


def on_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    check_stage = backends_load.check_stage
    monkeypatch.setattr(backends_load, "check_stage", lambda stage: replace(check_stage(stage), device=device))


def test_memory_is_asked_of_the_device_itself() -> None:
    assert available_memory("cpu") == HOST_BYTES
    assert available_memory("cuda:1") == GPU_BYTES


def test_on_a_cpu_caches_get_a_quarter_of_the_hosts_free_memory(tiny_folder: Path, asked: dict[str, Any]) -> None:
    load_model(StagePlan(model=str(tiny_folder), device="cpu"), SharingOptions(), 1)
    assert asked["kv_bytes"] == HOST_BYTES // 4


def test_on_a_gpu_caches_get_a_quarter_of_what_its_weights_leave_free(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, asked: dict[str, Any]
) -> None:
    on_device(monkeypatch, "cuda:1")
    weights = sum(tensor.nbytes for tensor in load_state(resolve(str(tiny_folder)), asked_dtype(tiny_folder)).values())
    load_model(StagePlan(model=str(tiny_folder)), SharingOptions(), 1)
    assert asked["device"] == "cuda:1"
    assert asked["kv_bytes"] == (GPU_BYTES - weights) // 4


def test_kv_bytes_that_are_given_are_kept(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, asked: dict[str, Any]
) -> None:
    on_device(monkeypatch, "cuda:1")
    load_model(StagePlan(model=str(tiny_folder)), SharingOptions(kv_bytes=1 << 20), 1)
    assert asked["kv_bytes"] == 1 << 20


def asked_dtype(folder: Path) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, backends_load.check_stage(StagePlan(model=str(folder))).dtype.split(".")[1])
    return dtype


def test_a_drafter_has_room_for_as_many_tokens_as_its_target(tiny_folder: Path, asked: dict[str, Any]) -> None:
    target = SimpleNamespace(max_length=100, capacity_tokens=1000)
    load_model(StagePlan(model=str(tiny_folder)), SharingOptions(), 1, target)  # type: ignore[arg-type]
    small, asked["kv_bytes"] = asked["kv_bytes"], 0
    assert asked["max_length"] == 100
    target.capacity_tokens = 100_000
    load_model(StagePlan(model=str(tiny_folder)), SharingOptions(), 1, target)  # type: ignore[arg-type]
    assert asked["kv_bytes"] > 50 * small
    target.capacity_tokens = None
    load_model(StagePlan(model=str(tiny_folder)), SharingOptions(), 1, target)  # type: ignore[arg-type]
    assert asked["kv_bytes"] is None
