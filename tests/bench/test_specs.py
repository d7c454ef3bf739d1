from __future__ import annotations

import pytest

from autopipe.bench.specs import ARMS, arm_settings, parse_arms
from autopipe.core.errors import ConfigError


def test_every_documented_arm_is_known() -> None:
    assert [spec.kind for spec in parse_arms(",".join(ARMS))] == list(ARMS)


def test_settings_are_read_off_the_name() -> None:
    spec = parse_arms("lockstep:window=4+2:drafter=ngram+REPO:FILE.gguf")[0]

    assert spec.kind == "lockstep"
    assert spec.settings == {"window": "4+2", "drafter": "ngram+REPO:FILE.gguf"}


def test_settings_become_plan_options() -> None:
    (spec,) = parse_arms("async:window=4+2:dtype=fp32")

    assert arm_settings(spec) == {"mode": "async", "windows": (4, 2), "dtype": "fp32"}


@pytest.mark.parametrize("compare", ["", "plain,", "warp", "plain,plain", "lockstep:size=3", "openvino:window=2"])
def test_what_is_not_an_arm_is_refused(compare: str) -> None:
    with pytest.raises(ConfigError, match="--compare"):
        parse_arms(compare)


def test_a_setting_that_is_no_number_is_refused() -> None:
    (spec,) = parse_arms("lockstep:window=wide")

    with pytest.raises(ConfigError, match="lockstep:window=wide"):
        arm_settings(spec)
