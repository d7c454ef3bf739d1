"""AutoPipe's own cache on disk: where it is, and how an entry is made once."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs
from filelock import FileLock

from autopipe.core.errors import ModelLoadError

Progress = Callable[[str], None]
"""Called with a line of text when something slow begins."""

_SAMPLES = 16
_SAMPLE_BYTES = 256 * 1024


def cache_dir() -> Path:
    """The environment's `AUTOPIPE_CACHE`, or the platform's user cache folder for `autopipe`."""
    override = os.environ.get("AUTOPIPE_CACHE")
    if override:
        return Path(override).expanduser()
    return Path(platformdirs.user_cache_dir("autopipe", appauthor=False))


def file_digest(path: Path, salt: str = "") -> str:
    """Identity of a large file in constant time, 16 hex digits: its size and 16 evenly spaced samples of 256 KiB.

    Files that differ only between the samples are taken as equal; weights of two trainings differ everywhere.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{salt}:{size}".encode())
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def make_once(
    entry: Path, build: Callable[[Path], None], is_damaged: Callable[[Path], bool] = lambda entry: False
) -> Path:
    """Return the folder `entry`; if missing, let `build` fill a temporary folder that is renamed to it.

    An entry that `is_damaged` is made anew; it is asked while no other process can be making one.

    Safe among processes: a file lock lets one build while the others wait, and a reader sees all of the entry
    or nothing. Left-overs of a build that was killed are removed.

    Raises:
        ModelLoadError: the cache cannot be read or written.
    """
    try:
        if entry.is_dir() and not is_damaged(entry):
            return entry
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(entry.parent / f".{entry.name}.lock"):
            if entry.is_dir():
                if not is_damaged(entry):
                    return entry
                shutil.rmtree(entry)
            for left_over in entry.parent.glob(f".{entry.name}.tmp-*"):
                shutil.rmtree(left_over, ignore_errors=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{entry.name}.tmp-", dir=entry.parent))
            try:
                build(temporary)
                temporary.chmod(0o755)
                temporary.rename(entry)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        message = f"the cache {entry.parent} cannot be used ({error}); set AUTOPIPE_CACHE"
        raise ModelLoadError(message) from error
    return entry
