"""What `autopipe tune` tells of its progress where stderr is no terminal."""

from __future__ import annotations

import pytest

from autopipe.cli import tune_show


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds; changed by the test."""
    now = [100.0]
    monkeypatch.setattr(tune_show.time, "monotonic", lambda: now[0])
    return now


def test_what_begins_is_told_at_once_and_once(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with tune_show.progress() as tell:
        tell("profile", "target", 0.0)
        tell("profile", "target", 0.1)
        tell("profile", "drafter", 0.5)
        tell("search", "trial 1", 0.0)
        tell("search", "trial 2", 0.1)

    assert capsys.readouterr().err.splitlines() == ["profile: target", "profile: drafter", "search"]


def test_every_ten_seconds_it_says_how_far_it_is(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with tune_show.progress() as tell:
        tell("live", "plan 1", 0.0)
        for second in range(1, 25):
            clock[0] = 100.0 + second
            tell("live", f"plan {second}", second / 40)

    lines = capsys.readouterr().err.splitlines()
    assert lines == ["live", "live: 25%, about 30 s left", "live: 50%, about 20 s left"]
