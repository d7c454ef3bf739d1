from __future__ import annotations

import logging

import pytest
import yaml

from autopipe.core.errors import ConfigError
from autopipe.core.plan import Plan
from autopipe.core.tuned import Machine
from autopipe.profile.identity import describe_machine
from autopipe.tuned import differences, warn_if_elsewhere

HERE = describe_machine()


def plan_from(machine: Machine) -> Plan:
    tuned = {
        "created_at": "2026-01-01T00:00:00+00:00",
        "version": "0.1.0",
        "objective": "throughput",
        "workload": ["chat"],
        "machine": machine.model_dump(),
        "predicted": {"ms_per_token": 3.0},
    }
    return Plan.parse({"chain": [{"model": "big"}], "tuned": tuned})


def test_where_a_plan_was_tuned_survives_its_file() -> None:
    plan = plan_from(HERE)

    assert Plan.parse(yaml.safe_load(plan.to_yaml())) == plan


def test_a_plan_tuned_here_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_elsewhere(plan_from(HERE))
        warn_if_elsewhere(Plan.parse({"chain": [{"model": "big"}]}))

    assert not caplog.records


def test_a_plan_tuned_elsewhere_warns_with_the_difference(caplog: pytest.LogCaptureFixture) -> None:
    there = HERE.replace(
        fingerprint="other", cores=HERE.cores + 6, gpus=("H200",), libraries={**HERE.libraries, "torch": "1.0"}
    )
    with caplog.at_level(logging.WARNING):
        warn_if_elsewhere(plan_from(there))

    (record,) = caplog.records
    for part in (f"cores: {HERE.cores + 6} there, {HERE.cores} here", "GPUs: H200 there", "torch: 1.0 there"):
        assert part in record.getMessage()


def test_memory_counts_only_when_it_really_differs() -> None:
    assert differences(HERE.replace(fingerprint="x", memory_bytes=int(1.01 * HERE.memory_bytes)), HERE) == []
    assert len(differences(HERE.replace(fingerprint="x", memory_bytes=2 * HERE.memory_bytes), HERE)) == 1


def test_an_unknown_key_in_the_section_is_named() -> None:
    data = plan_from(HERE).model_dump(mode="json")
    data["tuned"]["speed"] = 3

    with pytest.raises(ConfigError, match=r"tuned\.speed"):
        Plan.parse(data)
