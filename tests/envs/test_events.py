"""What events amount to at a given output token."""

from typing import Any

import pytest

from autopipe.core.errors import ConfigError
from autopipe.envs.events import DRIFT_GRAIN, Conditions, conditions_at, next_change
from tests.envs.scenes import scenario

STAGES = ("ngram", "small", "medium", "target")


def at(token: int, *events: dict[str, Any]) -> Conditions:
    return conditions_at(token, scenario(events=events).events, STAGES)


SLOW = {"type": "slow_down", "stage": "small", "factor": 3, "start": 100, "end": 200}


def test_an_event_holds_from_its_start_to_before_its_end() -> None:
    factors = [at(token, SLOW).slow_down["small"] for token in (99, 100, 199, 200)]
    assert factors == [1, 3, 3, 1]


def test_slow_downs_of_one_stage_multiply() -> None:
    assert at(150, SLOW, {**SLOW, "factor": 2}).slow_down == {"ngram": 1, "small": 6, "medium": 1, "target": 1}


def test_throttling_slows_all_stages_and_shows_in_telemetry() -> None:
    found = at(0, {"type": "throttle", "factor": 2, "temperature_c": 95, "start": 0})
    assert set(found.slow_down.values()) == {2}
    assert (found.throttled, found.temperature_c) == (True, 95)


def test_drift_moves_evenly_and_stays() -> None:
    drift = {"type": "drift", "stage": "small", "factor": 0.5, "start": 1000, "end": 2000}
    factors = [at(token, drift).agreement["small"] for token in (0, 1000, 1500, 2000, 9000)]
    assert factors == [1, 1, 0.75, 0.5, 0.5]


def test_a_dead_drafter_is_named_while_it_is_dead() -> None:
    death = {"type": "drafter_dies", "stage": "medium", "start": 10, "end": 20}
    assert at(15, death).dead == {"medium"}
    assert at(20, death).dead == set()


def test_contention_and_memory_add_up() -> None:
    found = at(
        0,
        {"type": "contention", "factor": 2, "start": 0},
        {"type": "memory_taken", "memory_gb": 3, "start": 0},
        {"type": "memory_taken", "memory_gb": 2, "start": 0},
    )
    assert (found.contention, found.memory_taken_gb) == (2, 5)


def test_next_change_sees_starts_and_ends() -> None:
    events = scenario(events=[SLOW]).events
    assert [next_change(token, events) for token in (0, 100, 199, 200)] == [100, 200, 200, None]


def test_a_drift_changes_in_grains() -> None:
    drift = {"type": "drift", "stage": "small", "factor": 0.5, "start": 0, "end": 1000}
    events = scenario(events=[drift]).events
    assert next_change(0, events) == DRIFT_GRAIN
    assert next_change(999, events) == 1000


@pytest.mark.parametrize(
    ("event", "key"),
    [
        ({**SLOW, "stage": "huge"}, "stage"),
        ({**SLOW, "end": 100}, "end"),
        ({**SLOW, "factor": 0}, "factor"),
        ({"type": "drafter_dies", "stage": "target", "start": 0}, "stage"),
        ({"type": "earthquake", "start": 0}, "events"),
        ({**SLOW, "colour": "red"}, "colour"),
    ],
)
def test_bad_events_name_the_key(event: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        scenario(events=[event])
