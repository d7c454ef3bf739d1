"""The cache on disk: entries are made once, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autopipe.core.errors import ModelLoadError
from autopipe.core.models.cache import cache_dir, file_digest, make_once

_BUILD_IN_A_PROCESS = """
import sys, time
from pathlib import Path
from autopipe.core.models.cache import make_once

def build(folder):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    time.sleep(0.3)
    (folder / "file").write_text("whole")

print((make_once(Path(sys.argv[1]), build) / "file").read_text())
"""


def test_the_environment_chooses_the_folder(empty_cache: Path) -> None:
    assert cache_dir() == empty_cache


def test_without_it_the_platform_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPIPE_CACHE", raising=False)
    assert cache_dir().name == "autopipe"


def test_an_entry_is_built_once(tmp_path: Path) -> None:
    built: list[Path] = []
    for _ in range(2):
        assert make_once(tmp_path / "models" / "entry", built.append) == tmp_path / "models" / "entry"
    assert len(built) == 1


def test_processes_at_the_same_time_build_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _BUILD_IN_A_PROCESS, str(tmp_path / "entry"), str(tmp_path / "log")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == ["whole\n"] * 3
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_damaged_entry_is_made_anew_once(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    entry.mkdir()
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        time.sleep(0.2)
        (folder / "file").write_text("whole")

    def is_damaged(found: Path) -> bool:
        return not (found / "file").is_file()

    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: make_once(entry, build, is_damaged), range(3)))
    assert made == [entry] * 3
    assert len(built) == 1
    assert (entry / "file").read_text() == "whole"


def test_a_cache_that_may_not_be_read_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_dir", forbidden)
    with pytest.raises(ModelLoadError, match="AUTOPIPE_CACHE"):
        make_once(tmp_path / "entry", lambda folder: None)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        make_once(tmp_path / "entry", build)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_leftovers_of_a_killed_build_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".entry.tmp-dead").mkdir()
    make_once(tmp_path / "entry", lambda folder: None)
    assert not (tmp_path / ".entry.tmp-dead").exists()


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match="AUTOPIPE_CACHE"):
        make_once(tmp_path / "file" / "entry", lambda folder: None)


def test_the_digest_sees_size_contents_and_salt(tmp_path: Path) -> None:
    file = tmp_path / "file"
    digests = set()
    for contents, salt in ((b"a" * 100, ""), (b"a" * 101, ""), (b"b" * 100, ""), (b"a" * 100, "2")):
        file.write_bytes(contents)
        digests.add(file_digest(file, salt))
    assert len(digests) == 4


def test_the_digest_is_of_the_contents_not_the_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 10_000)
    assert file_digest(tmp_path / "a") == file_digest(tmp_path / "b")
