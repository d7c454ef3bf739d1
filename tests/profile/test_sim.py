"""From a profile to simulated stages; and the simulator against the engine's own stage loop."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from autopipe.core.errors import ConfigError
from autopipe.core.plan import NgramOptions, Plan, StagePlan
from autopipe.envs.simulator import SimRequest, simulate
from autopipe.profile import sim_chain, sim_contention, sim_requests, sim_stages, simulate_plan
from autopipe.profile.sim import find_stage
from tests.core.pipeline import chain_configs, make_pipeline
from tests.profile.samples import BIG, LOOP, PROMPT, SMALL, ScriptedBackend, sample_profile

PROFILE = sample_profile()
MEAN_CONTEXT = (4 + 12 + 4 + 4) / 2


def plan(*chain: dict, **fields: object) -> Plan:
    return Plan.parse({"chain": list(chain), **fields})


def target(threads: int = 2, **fields: object) -> dict:
    return {**BIG, "threads": threads, **fields}


def test_latency_is_that_of_the_stages_threads() -> None:
    one, two = (sim_stages(PROFILE, plan(target(threads)))["big"].latency.seconds(1) for threads in (1, 2))

    assert (one, two) == (pytest.approx(0.01), pytest.approx(0.005))  # the requests are shorter than 64 tokens


def test_a_thread_count_that_was_not_measured_takes_the_nearest_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        seconds = sim_stages(PROFILE, plan(target(16)))["big"].latency.seconds(1)

    assert seconds == pytest.approx(0.005)
    assert "16 threads" in caplog.text


def test_prefill_goes_by_the_prompt() -> None:
    assert sim_stages(PROFILE, plan(target()))["big"].prompt_s(4) == pytest.approx(0.02)


def test_agreement_tables_follow_the_requests() -> None:
    table = sim_stages(PROFILE, plan(SMALL, target()))["small"].table

    assert table is not None
    assert table.tolist() == [True, True, False] * 8 + [True] * 8
    assert [request.output_tokens for request in sim_requests(PROFILE)] == [24, 8]


def test_a_kind_takes_its_prompts_only() -> None:
    table = sim_stages(PROFILE, plan(SMALL, target()), ["chat"])["small"].table

    assert table is not None
    assert table.tolist() == [True] * 8
    assert sim_requests(PROFILE, ["chat"]) == [SimRequest(8, 4)]


def test_an_unknown_kind_is_refused_with_the_known() -> None:
    with pytest.raises(ConfigError, match="code, chat"):
        sim_requests(PROFILE, ["poems"])


def test_a_stage_that_was_not_profiled_is_refused_with_the_known() -> None:
    with pytest.raises(ConfigError, match="small, big"):
        sim_stages(PROFILE, plan({"model": "acme/medium"}, target()))


@pytest.mark.parametrize(("drafter", "owner"), [({"dtype": "int4"}, {"dtype": "auto"}), ({"backend": "fused"}, {})])
def test_a_target_that_drafts_for_itself_is_not_taken_for_its_drafter(
    drafter: dict[str, str], owner: dict[str, str]
) -> None:
    own = StagePlan.parse({**BIG, "name": "own", **drafter})
    stages = tuple(each.model_copy(update={"name": "own", "stage": own}) if each.name == "small" else each
                   for each in PROFILE.stages)  # fmt: skip
    profile = PROFILE.model_copy(update={"stages": stages})
    big = StagePlan.parse({**BIG, **owner})

    assert find_stage(profile, big, "chain").name == "big"
    assert find_stage(profile, own, "chain").name == "own"


def test_quantised_weights_are_never_what_auto_stands_for() -> None:
    with pytest.raises(ConfigError, match="small, big"):
        find_stage(PROFILE, StagePlan.parse({**SMALL, "dtype": "int8"}), "chain")


def test_another_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="acme/big"):
        sim_stages(PROFILE, plan(SMALL))


def test_a_target_cannot_draft_unless_it_was_profiled_as_a_drafter() -> None:
    with pytest.raises(ConfigError, match="as a drafter"):
        sim_stages(PROFILE, plan(target(), target()))


def test_auto_matches_what_it_stands_for() -> None:
    assert "big" in sim_stages(PROFILE, plan({"model": "acme/big"}))


def test_another_dtype_is_another_stage() -> None:
    with pytest.raises(ConfigError, match="acme/big"):
        sim_stages(PROFILE, plan({"model": "acme/big", "dtype": "fp32"}))


def test_contention_goes_by_the_plans_names() -> None:
    found = sim_contention(PROFILE, plan({**SMALL, "name": "d"}, {**target(), "name": "t"}, mode="async"))

    assert found == {("d", "t"): 1.5, ("t", "d"): 1.2}


def test_taking_turns_costs_a_handover_and_being_alone_does_not() -> None:
    alone, both = (sim_stages(PROFILE, plan(*chain))["big"].overhead_s for chain in ([target()], [SMALL, target()]))

    assert (alone, both) == (0.0, 0.0002)


def test_a_drafter_joins_in_the_time_that_was_measured() -> None:
    assert sim_stages(PROFILE, plan(SMALL, target()))["small"].switch_s == 3.5


def test_ngram_of_other_orders_is_replayed() -> None:
    short, whole = (
        sim_stages(PROFILE, plan({"model": "ngram", "ngram": options}, target()))["ngram"].drafts
        for options in ({"min_order": 3}, {})
    )

    assert short is not None
    assert whole is not None
    assert short.length.sum() < whole.length.sum()


def test_simulate_plan_reports_the_plan_and_plain_decoding() -> None:
    result = simulate_plan(PROFILE, plan({"model": "ngram", "window": 7}, target()))

    assert result["plan"]["tokens"] == result["plain"]["tokens"] == 32
    assert result["speedup"] == pytest.approx(result["plain"]["total_s"] / result["plan"]["total_s"])
    assert result["plain"]["decode_ms_per_token"] == pytest.approx(5.0)


@pytest.mark.parametrize("window", [1, 3, 7, 16])
@pytest.mark.parametrize("cap", [2, 128])
def test_the_simulated_ngram_takes_the_very_forwards_of_the_engines_stage(window: int, cap: int) -> None:
    backend = ScriptedBackend([*PROMPT, *LOOP])
    options = NgramOptions(gate=False)
    pipeline = make_pipeline([backend], chain_configs(1, ngram=options, window=window, verify_cap=cap))
    pipeline.begin(prompt=PROMPT, max_new_tokens=len(LOOP))
    assert pipeline.run() == list(LOOP)

    ngram = {"model": "ngram", "window": window, "ngram": {"gate": False}}
    chain = sim_chain(PROFILE, plan(ngram, target(verify_cap=cap)), ["code"])
    result = simulate(chain, sim_requests(PROFILE, ["code"]), max_events=100)

    assert result.timeline[1:, 3].astype(int).tolist() == backend.forwards  # rows of each forward after the prefill
    assert int(np.sum(result.timeline[:, 5])) == len(LOOP)
