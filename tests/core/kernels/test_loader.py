"""Finding the native library, choosing an instruction set, saying why there is none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from autopipe.core import kernels
from autopipe.core.errors import AutoPipeError
from autopipe.core.kernels import loader, native

needs_kernels = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")


@pytest.fixture
def fresh_loader() -> object:
    loader._load.cache_clear()
    yield loader
    loader._load.cache_clear()


def test_switch_disables_the_library_and_logs_once(fresh_loader, monkeypatch, caplog):
    monkeypatch.setenv(loader.DISABLE_VARIABLE, "1")
    with caplog.at_level(logging.WARNING):
        assert kernels.library() is None
        assert kernels.library() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert loader.DISABLE_VARIABLE in kernels.reason_missing()
    assert not kernels.has_kernels()
    assert kernels.available_instruction_sets() == ()


def test_missing_file_is_a_reason_not_an_error(fresh_loader, monkeypatch, tmp_path: Path):
    monkeypatch.delenv(loader.DISABLE_VARIABLE, raising=False)
    monkeypatch.setattr(loader, "__file__", str(tmp_path / "loader.py"))
    assert kernels.library() is None
    assert "not built" in kernels.reason_missing()


def test_broken_file_is_a_reason_not_an_error(fresh_loader, monkeypatch, tmp_path: Path):
    monkeypatch.delenv(loader.DISABLE_VARIABLE, raising=False)
    monkeypatch.setattr(loader, "__file__", str(tmp_path / "loader.py"))
    (tmp_path / f"_native{loader.EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    assert kernels.library() is None
    assert "cannot be loaded" in kernels.reason_missing()


@needs_kernels
def test_library_of_another_version_is_not_used(fresh_loader, monkeypatch):
    monkeypatch.setattr(loader, "ABI_VERSION", loader.ABI_VERSION + 1)
    assert kernels.library() is None
    assert "another version" in kernels.reason_missing()


@needs_kernels
def test_variable_chooses_the_instruction_set(monkeypatch):
    for name in kernels.available_instruction_sets():
        monkeypatch.setenv(loader.ISA_VARIABLE, name)
        assert kernels.instruction_set() == name


@needs_kernels
def test_unknown_instruction_set_is_named_with_the_allowed_ones(monkeypatch):
    monkeypatch.setenv(loader.ISA_VARIABLE, "mmx")
    assert kernels.instruction_set() is None
    assert "mmx" in kernels.reason_missing()
    assert "avx2" in kernels.reason_missing()
    with pytest.raises(AutoPipeError, match="mmx"):
        native.Team(1)
