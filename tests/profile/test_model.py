from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.core.errors import ConfigError
from autopipe.profile import Profile
from tests.profile.samples import profile_data, sample_profile


def write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**sample_profile().model_dump(mode="json"), **changes}))
    return path


def test_a_written_profile_is_read_back_the_same(tmp_path: Path) -> None:
    assert Profile.load(write(tmp_path / "p.json")) == sample_profile()


def test_another_version_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="autopipe profile"):
        Profile.load(write(tmp_path / "p.json", schema_version=2))


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="colour"):
        Profile.load(write(tmp_path / "p.json", colour="red"))


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match="--profile"):
        Profile.load(tmp_path / "p.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        Profile.load(tmp_path / "nowhere.json")


def test_kinds_come_in_order_of_appearance() -> None:
    assert sample_profile().kinds == ("code", "chat")


def test_agreement_rate_is_over_all_positions() -> None:
    assert sample_profile().agreement[0].rate == (16 + 8) / 32


def test_agreement_holds_only_bits() -> None:
    data = profile_data()
    data["agreement"][0]["agrees"][0] = "12"
    with pytest.raises(ConfigError, match="agreement"):
        Profile.parse(data)


def test_points_that_vary_by_more_than_a_fifth_are_unsteady() -> None:
    data = sample_profile().model_dump(mode="json")
    assert Profile.parse(data).unsteady_share == 0.0
    points = [point for stage in data["stages"] for curves in stage["curves"] for point in curves["verify"]]
    points[0]["p90_s"] = 1.3 * points[0]["seconds"]
    assert Profile.parse(data).unsteady_share == 1 / len(points)
