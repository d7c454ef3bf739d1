from __future__ import annotations

import dataclasses

import pytest

from autopipe.core.errors import ConfigError
from autopipe.tune.limits import Limits
from tests.tune.scenes import predictor, space

FOUND = predictor().predict(space().plan(space().defaults()))


def test_memory_is_held_against_a_share_of_the_device() -> None:
    needed = FOUND.memory_bytes["cpu"]

    assert Limits().excesses(FOUND, {"cpu": int(needed / 0.79)})["memory.cpu"] < 0
    assert Limits().excesses(FOUND, {"cpu": int(needed / 0.81)})["memory.cpu"] > 0


def test_a_limit_in_bytes_counts_instead_of_the_share() -> None:
    excess = Limits(memory_bytes={"cpu": FOUND.memory_bytes["cpu"] // 2}).excesses(FOUND, {"cpu": 1 << 40})

    assert excess["memory.cpu"] == pytest.approx(1.0, abs=0.01)


def test_latency_and_energy_limits_count_where_they_are_set() -> None:
    assert not {"ms_per_token", "ttft_s", "j_per_token"} & Limits().excesses(FOUND, {}).keys()
    tight = Limits(ms_per_token=FOUND.ms_per_token / 2, ttft_s=10.0, j_per_token=1.0)
    excess = tight.excesses(dataclasses.replace(FOUND, j_per_token=3.0), {})

    assert excess["ms_per_token"] > 0 > excess["ttft_s"]
    assert excess["j_per_token"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("key", "value"), [("memory_share", 0.0), ("memory_share", 1.5), ("ttft_s", -1.0), ("ms_per_token", float("nan"))]
)
def test_limits_that_make_no_sense_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError):
        Limits(**{key: value})
