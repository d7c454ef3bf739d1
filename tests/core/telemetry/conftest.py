"""A pretend NVIDIA driver, compiled once, that the tests drive through the real pynvml."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from autopipe.core.telemetry import NvmlSource

SOURCE = Path(__file__).with_name("fake_nvml.c")

GPU_FIGURES = {
    "name": "Pretend GPU",
    "memory_total": 1000,
    "memory_used": 250,
    "utilisation": 40,
    "memory_utilisation": 30,
    "power": 150_000,
    "power_limit": 400_000,
    "energy": 5_000,
    "temperature": 55,
    "clock1": 1500,
    "clock2": 2600,
    "throttle": 0,
    "field138": 0,
    "field139": 0,
    "field197": 0,
    "field198": 0,
    "gpm": 1,
    "gpm1": 41,
    "gpm2": 50,
    "gpm3": 25,
    "gpm10": 75,
}
"""Figures of a GPU that has everything; milliwatts, millijoules, per cent."""


class FakeNvml:
    """The pretend driver's settings; see fake_nvml.c for the keys."""

    def __init__(self, config: Path) -> None:
        self.config = config
        self.library: ctypes.CDLL | None = None
        self.settings: dict[str, object] = {"count": 0}
        self._write()

    def set(self, changes: dict[str, object]) -> None:
        """Change keys; None removes one."""
        self.settings.update(changes)
        self.settings = {key: value for key, value in self.settings.items() if value is not None}
        self._write()

    def add_gpu(self, uuid: str, **changes: object) -> None:
        """One more GPU with every figure, save for the changes (None: not supported)."""
        index = self.settings["count"]
        assert isinstance(index, int)
        figures = {"uuid": uuid, **GPU_FIGURES, **changes}
        self.set({f"{index}.{key}": value for key, value in figures.items()} | {"count": index + 1})

    def num_calls(self, function: str, gpu: int) -> int:
        assert self.library is not None
        return int(self.library.fake_calls(function.encode(), gpu))

    def _write(self) -> None:
        lines = [key.encode() + b" " + _bytes(value) + b"\n" for key, value in self.settings.items()]
        fresh = self.config.with_suffix(".new")
        fresh.write_bytes(b"".join(lines))
        fresh.replace(self.config)


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="session")
def build_fake(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles fake_nvml.c with the given flags; gives the folder of libnvidia-ml.so.1."""
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if compiler is None:
        pytest.skip("no C compiler")
    built: dict[tuple[str, ...], Path] = {}

    def build(*flags: str) -> Path:
        if flags not in built:
            folder = tmp_path_factory.mktemp("nvml")
            output = str(folder / "libnvidia-ml.so.1")
            command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", *flags, str(SOURCE), "-o", output]
            subprocess.run(command, check=True)
            built[flags] = folder
        return built[flags]

    return build


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Settings alone, for tests that load the driver in another process."""
    path = tmp_path / "nvml.txt"
    monkeypatch.setenv("FAKE_NVML_CONFIG", str(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeNvml(path)


@pytest.fixture
def load_fake(
    config: FakeNvml,
    build_fake: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., FakeNvml]:
    """Puts a pretend driver, with state of its own, under pynvml."""

    def load(*flags: str) -> FakeNvml:
        # A copy, because a library loaded twice from one path would keep the state of the test before.
        path = shutil.copy(build_fake(*flags) / "libnvidia-ml.so.1", tmp_path / "libnvidia-ml.so.1")
        config.library = ctypes.CDLL(str(path))
        monkeypatch.setattr(pynvml, "nvmlLib", config.library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return config

    return load


@pytest.fixture
def nvml(load_fake: Callable[..., FakeNvml]) -> Iterator[FakeNvml]:
    """A pretend driver of today, loaded, without GPUs; a test must leave no session or sample open."""
    fake = load_fake()
    yield fake
    assert fake.library is not None
    assert fake.library.fake_sessions() == 0
    assert fake.library.fake_samples() == 0


@pytest.fixture
def opened(nvml: FakeNvml) -> Iterator[Callable[..., NvmlSource]]:
    """Opens a source over the pretend driver and closes it after the test."""
    sources: list[NvmlSource] = []

    def make(**options: Any) -> NvmlSource:
        source = NvmlSource(**options)
        source.open()
        sources.append(source)
        return source

    yield make
    for source in sources:
        source.close()
