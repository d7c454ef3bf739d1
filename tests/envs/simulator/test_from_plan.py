"""Plans become simulated chains; emulated stages agree exactly where the emulated backend does."""

from typing import Any

import pytest

from autopipe.core.backends.emulated import EmulatedBackend
from autopipe.core.errors import ConfigError
from autopipe.core.plan import EmulatedStage, Plan
from autopipe.envs.simulator import (
    LatencyCurve,
    SimStage,
    chain_from_plan,
    emulated_agreement,
    simulate_command,
)


def _emulated_plan(**target: Any) -> Plan:
    return Plan.parse(
        {
            "mode": "async",
            "chain": [
                {"model": "emulated", "name": "small", "window": 8, "emulated": {"ms": {1: 2}, "agreement": 0.8}},
                {"model": "emulated", "name": "big", "emulated": {"ms": {1: 20, 2: 30}}, **target},
            ],
        }
    )


@pytest.mark.parametrize(
    "spec",
    [
        EmulatedStage(ms={1: 0}, agreement=0.7, seed=5),
        EmulatedStage(ms={1: 0}, agreement=1.0),
        EmulatedStage(ms={1: 0}, trace=(True, False, True)),
    ],
)
def test_emulated_agreement_is_that_of_the_emulated_backend(spec: EmulatedStage) -> None:
    ids = [1] * 101
    truth = EmulatedBackend(spec.replace(agreement=1.0, trace=None)).forward(ids).argmax(-1)
    picks = EmulatedBackend(spec).forward(ids).argmax(-1)
    assert emulated_agreement(spec, 1, 101).tolist() == (picks == truth).tolist()


def test_plan_settings_reach_the_chain() -> None:
    chain = chain_from_plan(_emulated_plan(min_drafts=5, when_short="step", verify_cap=6))
    assert chain.stages[0].window == 8
    assert (chain.stages[1].min_drafts, chain.stages[1].verify_cap) == (5, 6)
    assert chain.stages[1].step_alone


def test_measured_stages_are_taken_by_name() -> None:
    plan = Plan.parse({"chain": [{"model": "ngram", "window": 3}, {"model": "some-model"}]})
    measured = {
        "ngram": SimStage(LatencyCurve({1: 0.0}), 0.6),
        "some-model": SimStage(LatencyCurve({1: 0.01, 4: 0.012})),
    }
    report = simulate_command(plan, measured, output_tokens=2000)
    assert report["speedup"] > 1.3
    assert [stage["name"] for stage in report["plan"]["stages"]] == ["ngram", "some-model"]


def test_overhead_of_emulated_stages_is_paid_each_step() -> None:
    free = simulate_command(_emulated_plan(), output_tokens=200)["plain"]
    paid = simulate_command(_emulated_plan(), output_tokens=200, overhead_s=0.001)["plain"]
    assert paid["total_s"] - free["total_s"] == pytest.approx(0.2)


def test_stage_without_measurements_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"chain\.0: 'some-model'"):
        chain_from_plan(Plan.parse({"chain": [{"model": "some-model"}]}))


def test_command_reports_plan_and_plain_decoding() -> None:
    report = simulate_command(_emulated_plan(), output_tokens=200, num_requests=2)
    assert report["plan"]["tokens"] == report["plain"]["tokens"] == 400
    assert report["speedup"] == pytest.approx(report["plain"]["total_s"] / report["plan"]["total_s"])
