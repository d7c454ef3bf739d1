"""The stage loop as a protocol: whatever the chain, settings and order of events, the text is plain decoding's."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.core.plan import Mode, NgramOptions, Verification, Warmup, WhenShort
from tests.core.pipeline import chain_configs, emulated, make_pipeline, plain_output

SCHEDULES = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_plain_decoding_emits_exactly_max_new_tokens() -> None:
    assert len(plain_output(17)) == 17


@SCHEDULES
@given(
    agreements=st.lists(st.floats(0, 1), min_size=0, max_size=4),
    mode=st.sampled_from([Mode.LOCKSTEP, Mode.ASYNC]),
    window=st.integers(1, 9),
    min_drafts=st.integers(0, 9),
    verify_cap=st.integers(1, 12),
    when_short=st.sampled_from(list(WhenShort)),
    warmup=st.sampled_from(["none", "conservative", "progressive"]),
    temperature=st.sampled_from([0.0, 1.0]),
    order=st.lists(st.integers(0, 4), max_size=300),
    seed=st.integers(0, 5),
)
def test_any_chain_under_any_schedule_says_what_the_target_says(
    agreements: list[float],
    mode: Mode,
    window: int,
    min_drafts: int,
    verify_cap: int,
    when_short: WhenShort,
    warmup: str,
    temperature: float,
    order: list[int],
    seed: int,
) -> None:
    backends = [emulated(agreement, seed=seed) for agreement in agreements] + [emulated(seed=seed)]
    configs = chain_configs(
        len(backends),
        mode=mode,
        window=window,
        min_drafts=min(min_drafts, window),
        verify_cap=verify_cap,
        when_short=when_short,
        warmup=Warmup.parse({"kind": warmup}),
    )
    pipeline = make_pipeline(backends, configs)
    pipeline.begin(max_new_tokens=40, temperature=temperature, seed=seed)
    assert pipeline.run(order) == plain_output(40, seed=seed, temperature=temperature)


@SCHEDULES
@given(
    agreements=st.lists(st.floats(0.3, 1), min_size=2, max_size=3),
    lost=st.integers(0, 2),
    before=st.lists(st.integers(0, 3), max_size=120),
    mode=st.sampled_from([Mode.LOCKSTEP, Mode.ASYNC]),
)
def test_losing_a_drafter_in_the_middle_changes_nothing(
    agreements: list[float], lost: int, before: list[int], mode: Mode
) -> None:
    backends = [emulated(agreement) for agreement in agreements] + [emulated()]
    pipeline = make_pipeline(backends, chain_configs(len(backends), mode=mode, window=5, min_drafts=2))
    pipeline.begin(max_new_tokens=40)
    for index in before:
        if not pipeline.done:
            pipeline.stages[index % len(backends)].advance()
    gone = lost % len(agreements)
    left = [index for index in range(len(backends)) if index != gone]
    for place, index in enumerate(left):
        config = pipeline.configs[index].replace(
            producer=left[place - 1] if place else None,
            consumer=left[place + 1] if place + 1 < len(left) else None,
        )
        pipeline.stages[index].configure(config)
    del pipeline.stages[gone]
    assert pipeline.run() == plain_output(40)


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.ASYNC])
@pytest.mark.parametrize("num_drafters", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6])
def test_a_drafter_that_always_agrees_is_always_accepted(mode: Mode, num_drafters: int, window: int) -> None:
    backends = [emulated() for _ in range(num_drafters + 1)]
    pipeline = make_pipeline(backends, chain_configs(num_drafters + 1, mode=mode, window=window, min_drafts=1))
    pipeline.begin(max_new_tokens=200)
    assert pipeline.run() == plain_output(200)
    for stage in pipeline.stages:
        assert stage.meter.stats.accepted == stage.meter.stats.verified
        assert stage.meter.stats.rollbacks == 0
    assert pipeline.stages[-1].meter.stats.accepted > 0


@pytest.mark.parametrize("rule", list(Verification))
def test_rejection_and_equality_both_finish_with_the_exact_number_of_tokens(rule: Verification) -> None:
    pipeline = make_pipeline([emulated(0.5), emulated(0.8), emulated()], chain_configs(3, window=4))
    pipeline.begin(max_new_tokens=33, temperature=1.0, rule=rule)
    assert len(pipeline.run()) == 33


def test_the_end_of_text_is_the_last_token_and_nothing_follows() -> None:
    text = plain_output(60)
    eos = text[25]
    cut = text[: text.index(eos) + 1]
    pipeline = make_pipeline([emulated(0.9), emulated()], chain_configs(2, window=8))
    pipeline.begin(max_new_tokens=60, eos=[eos])
    assert pipeline.run() == cut


def test_a_drafter_whose_context_is_too_short_stops_and_the_text_goes_on() -> None:
    pipeline = make_pipeline([emulated(max_length=16), emulated()], chain_configs(2, window=4))
    pipeline.begin(max_new_tokens=60)
    assert pipeline.run() == plain_output(60)
    assert pipeline.stages[0].outgrown


def test_a_request_carries_nothing_over_from_the_last() -> None:
    pipeline = make_pipeline([emulated(0.7), emulated()], chain_configs(2, window=4))
    pipeline.begin(1, max_new_tokens=30)
    pipeline.run()
    for stage in pipeline.stages:
        stage.end()
    pipeline.begin(2, prompt=[9, 8, 7], max_new_tokens=30)
    assert pipeline.run() == plain_output(30, prompt=[9, 8, 7])


def test_the_ngram_drafter_drafts_in_its_consumers_process() -> None:
    configs = chain_configs(1, window=6, ngram=NgramOptions(gate=False))
    pipeline = make_pipeline([emulated(vocab_size=4)], configs)
    prompt = [0, 1, 2, 3] * 4
    pipeline.begin(prompt=prompt, max_new_tokens=80)
    expected = make_pipeline([emulated(vocab_size=4)], chain_configs(1))
    expected.begin(prompt=prompt, max_new_tokens=80)
    assert pipeline.run() == expected.run()
    assert pipeline.stages[0].meter.stats.verified > 0


def test_in_lockstep_only_one_stage_has_work_at_a_time() -> None:
    pipeline = make_pipeline([emulated(0.8), emulated(0.9), emulated()], chain_configs(3, window=4))
    pipeline.begin(max_new_tokens=50)
    for stage in reversed(pipeline.stages):
        stage.advance()
    while not pipeline.done:
        computed = [stage.advance() for stage in reversed(pipeline.stages)]
        assert sum(computed) <= 1 or computed[0], "a drafter ran beside a stage that was not waiting for it"


def test_windows_bound_how_far_a_drafter_runs_ahead() -> None:
    pipeline = make_pipeline([emulated(), emulated()], chain_configs(2, mode=Mode.ASYNC, window=3, min_drafts=3))
    pipeline.begin(max_new_tokens=50)
    target = pipeline.stages[-1]
    target.advance()
    for _ in range(20):
        pipeline.stages[0].advance()
    drafter, ahead_of = pipeline.stages[0].request, target.request
    assert drafter is not None
    assert ahead_of is not None
    assert len(drafter.tokens) - len(ahead_of.tokens) == 3
