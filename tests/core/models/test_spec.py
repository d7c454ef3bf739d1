"""Model specs: what is understood, what is refused, without touching a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.core.errors import ConfigError
from autopipe.core.models.spec import SourceKind, resolve


def test_a_registry_name_is_the_default_model() -> None:
    source = resolve("smollm2-135m")
    assert (source.kind, source.name) == (SourceKind.DEFAULT, "smollm2-135m")


def test_a_folder_is_made_absolute(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_folder.parent)
    source = resolve(tiny_folder.name)
    assert (source.kind, source.location, source.name) == (
        SourceKind.FOLDER,
        str(tiny_folder),
        tiny_folder.name,
    )


@pytest.mark.parametrize("spec", ["Qwen/Qwen2-0.5B", "gpt2", "a.b-c/d_e.f"])
def test_a_hub_id_is_kept(spec: str) -> None:
    source = resolve(spec)
    assert (source.kind, source.location, source.name) == (SourceKind.HUB, spec, spec.split("/")[-1])


def test_a_gguf_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_0.gguf"
    file.touch()
    source = resolve(str(file))
    assert (source.kind, source.location, source.name) == (SourceKind.GGUF_FILE, str(file), "model.Q4_0")


def test_a_gguf_file_in_a_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert resolve(f"{tmp_path}:model.gguf").location == str(tmp_path / "model.gguf")


def test_a_gguf_file_in_a_hub_repository_keeps_both_parts() -> None:
    source = resolve("owner/repo:sub/model.gguf")
    assert (source.kind, source.location, source.gguf_file) == (
        SourceKind.GGUF_HUB,
        "owner/repo",
        "sub/model.gguf",
    )
    assert str(source) == "owner/repo:sub/model.gguf"


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ("missing.gguf", "no such file"),
        ("/no/such/folder", "registry"),
        ("a/b/c", "hub id"),
        ("-x", "hub id"),
        ("a b", "hub id"),
        ("not a repo:model.gguf", "REPO"),
        (":model.gguf", "REPO"),
    ],
)
def test_a_wrong_spec_names_key_value_and_what_is_allowed(spec: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed) as caught:
        resolve(spec, "chain.2.model")
    assert (caught.value.key, caught.value.value) == ("chain.2.model", spec)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(str(tmp_path))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match="file of another kind"):
        resolve(str(tmp_path / "model.bin"))


def test_a_gguf_file_missing_from_its_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no model\.gguf"):
        resolve(f"{tmp_path}:model.gguf")
