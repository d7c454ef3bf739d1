"""The per-user folder in which running engines announce themselves."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

VARIABLE = "AUTOPIPE_RUNTIME_DIR"
"""Environment variable that names another folder."""


def runtime_folder() -> Path:
    """Where announcements are; it need not exist. The user's runtime folder, else one in the temporary folder."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    for place in (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.getuid()}"):
        if place and os.access(place, os.W_OK):
            return Path(place) / "autopipe"
    return Path(tempfile.gettempdir()) / f"autopipe-{os.getuid()}"


def make_private(folder: Path) -> None:
    """Create the folder for its user's eyes only, or check that it is such a one.

    Raises:
        OSError: it cannot be made, or is not this user's own: another user could read or replace what is in it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    for place in (folder, folder.parent):
        held = place.stat()
        others_may_replace = held.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not held.st_mode & stat.S_ISVTX
        if held.st_uid not in (os.getuid(), 0) or others_may_replace:
            raise PermissionError(f"{place} may be changed by another user")
    if found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)


def write_private(file: Path, text: str) -> None:
    """Put a file in place in one step, mode 0600.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = file.with_name(f".{file.name}.new")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    unfinished.replace(file)
