"""Measured stages become the pipeline of a scenario."""

import numpy as np
import pytest

from autopipe.core.errors import ConfigError
from autopipe.envs.measured import StageFacts, pipeline_from_stages
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.simulator import LatencyCurve, LocalDrafts, SimStage

NAMES = ("ngram", "small", "target")


def stages(share: float) -> dict[str, SimStage]:
    table = np.arange(100) < 100 * share
    drafts = LocalDrafts(np.array([4, 4]), np.array([4, 1]), np.full((2, 4), 0.5))
    return {
        "ngram": SimStage(LatencyCurve({1: 1e-6}), drafts=drafts, overhead_s=2e-5),
        "small": SimStage(LatencyCurve({1: 0.001, 8: 0.002}), table=table, prefill=LatencyCurve({1: 0.01, 101: 0.11})),
        "target": SimStage(LatencyCurve({1: 0.010, 8: 0.020}, interpolate=False), overhead_s=0.0005),
    }


MEASURED = {PromptKind.CODE: stages(0.8), PromptKind.CHAT: stages(0.4)}


def test_latencies_overheads_and_prefill_are_kept() -> None:
    found = pipeline_from_stages(NAMES, MEASURED)
    assert found.drafters[1].ms == pytest.approx({1: 1.0, 8: 2.0})
    assert found.drafters[1].prefill_ms_per_token == pytest.approx(1.0)
    assert found.target.overhead_ms == pytest.approx(0.5)


def test_a_curve_with_steps_keeps_them() -> None:
    assert pipeline_from_stages(NAMES, MEASURED).target.ms == pytest.approx({1: 10, 7: 10, 8: 20})


def test_agreement_is_the_mean_by_kind_and_over_all_kinds_for_the_rest() -> None:
    small = pipeline_from_stages(NAMES, MEASURED).drafters[1]
    assert small.agreement_on(PromptKind.CODE) == pytest.approx(0.8)
    assert small.agreement_on(PromptKind.MATH) == pytest.approx(0.6)


def test_an_ngram_drafter_is_judged_up_to_its_first_wrong_draft() -> None:
    ngram = pipeline_from_stages(NAMES, MEASURED).drafters[0]
    assert ngram.ngram
    assert ngram.agreement_on(PromptKind.CODE) == pytest.approx(5 / 6)
    assert ngram.ms == pytest.approx({1: 0.02})


def test_facts_reach_the_stages() -> None:
    facts = {"small": StageFacts(memory_bytes=2 * 10**9, power_w=7, load_s=3)}
    small = pipeline_from_stages(NAMES, MEASURED, facts=facts, device_memory_bytes=8 * 10**9).drafters[1]
    assert (small.memory_gb, small.power_w, small.load_ms) == (2, 7, 3000)


def test_missing_stages_are_named() -> None:
    with pytest.raises(ConfigError, match=r"measured\.code.*huge"):
        pipeline_from_stages(("huge", "target"), MEASURED)
    with pytest.raises(ConfigError, match="names"):
        pipeline_from_stages(("target",), MEASURED)
    with pytest.raises(ConfigError, match="measured"):
        pipeline_from_stages(NAMES, {})
