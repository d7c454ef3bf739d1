from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.core.errors import ConfigError
from autopipe.profile.sections import Sections, write_json


def fail() -> object:
    raise AssertionError("measured again")


def test_a_section_is_on_disk_as_soon_as_it_is_done(tmp_path: Path) -> None:
    Sections(tmp_path / "p.json", "h").get("a", lambda: [1, 2])

    assert Sections(tmp_path / "p.json", "h").get("a", fail) == [1, 2]


def test_sections_of_another_hash_are_not_taken(tmp_path: Path) -> None:
    Sections(tmp_path / "p.json", "h").get("a", lambda: 1)

    assert Sections(tmp_path / "p.json", "other").get("a", lambda: 2) == 2


def test_without_resume_everything_is_measured_again(tmp_path: Path) -> None:
    Sections(tmp_path / "p.json", "h").get("a", lambda: 1)

    assert Sections(tmp_path / "p.json", "h", resume=False).get("a", lambda: 2) == 2


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "p.json.partial").write_text('{"content_hash": "h", "sec')

    assert Sections(tmp_path / "p.json", "h").num_resumed == 0


def test_a_measurement_that_fails_leaves_what_was_done(tmp_path: Path) -> None:
    sections = Sections(tmp_path / "p.json", "h")
    sections.get("a", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        sections.get("b", lambda: (_ for _ in ()).throw(KeyboardInterrupt))

    assert Sections(tmp_path / "p.json", "h").num_resumed == 1


def test_finishing_writes_the_profile_and_removes_the_parts(tmp_path: Path) -> None:
    sections = Sections(tmp_path / "p.json", "h")
    sections.get("a", lambda: 1)
    sections.finish({"whole": True})

    assert json.loads((tmp_path / "p.json").read_text()) == {"whole": True}
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_seconds_of_interrupted_calls_count(tmp_path: Path) -> None:
    first = Sections(tmp_path / "p.json", "h")
    first.get("a", lambda: 1)

    assert Sections(tmp_path / "p.json", "h").took_s == first.took_s > 0


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--out"):
        write_json(tmp_path / "none" / "p.json", {})
