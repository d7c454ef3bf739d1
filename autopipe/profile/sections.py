"""What has been measured so far, on disk after every section, so that an interrupted profile goes on where it was."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopipe.core.errors import ConfigError

PARTIAL_SUFFIX = ".partial"


class Sections:
    """Results by section name, kept in `<output>.partial` until the profile is whole.

    A partial file of another content hash (other settings, other machine, other models) is ignored and overwritten.

    Args:
        output: where the profile will be.
        content_hash: of what is being measured.
        resume: false: ignore any partial file.
    """

    def __init__(self, output: Path, content_hash: str, *, resume: bool = True) -> None:
        self._output = output
        self._path = output.with_name(output.name + PARTIAL_SUFFIX)
        self._hash = content_hash
        self._done: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}
        if resume:
            self._read()
        self.num_resumed = len(self._done)

    @property
    def took_s(self) -> float:
        """Seconds all sections took, those of interrupted calls included."""
        return sum(self._seconds.values())

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The section's result: from disk, or from `measure`, then put on disk."""
        if name not in self._done:
            started = time.monotonic()
            self._done[name] = measure()
            self._seconds[name] = time.monotonic() - started
            parts = {"content_hash": self._hash, "sections": self._done, "seconds": self._seconds}
            write_json(self._path, parts)
        return self._done[name]

    def finish(self, profile: dict[str, Any]) -> None:
        """Write the whole profile, and forget the parts."""
        write_json(self._output, profile)
        self._path.unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError):
            return  # none yet, or cut short by a crash: measured again
        if not isinstance(data, dict) or data.get("content_hash") != self._hash:
            return
        if isinstance(data.get("sections"), dict) and isinstance(data.get("seconds"), dict):
            self._done, self._seconds = data["sections"], data["seconds"]


def write_json(path: Path, data: Any) -> None:
    """Write JSON so that a reader, or a crash, never meets half a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(data, separators=(",", ":")), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError("--out", str(path), f"a file that can be written ({error})") from None
