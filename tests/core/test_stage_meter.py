"""What a stage's steps cost, and when one counts as hung."""

from __future__ import annotations

import pytest

from autopipe.core.stage_meter import StageMeter, Step

MS = 1_000_000


def step(name: str, num_missing: int, num_drafts: int = 0, num_accepted: int = 0, emitted: int = 1) -> Step:
    return Step(name, num_missing, num_drafts, num_accepted, emitted, 0, 10 * MS, 12 * MS)


def measured(seconds: float) -> StageMeter:
    meter = StageMeter()
    meter.observe_step(1, seconds)
    return meter


def test_an_unmeasured_stage_is_given_a_minute():
    assert StageMeter().allowed_ns(1, prefill=False) == 60_000 * MS
    assert StageMeter().allowed_ns(1, prefill=True) == 60_000 * MS


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.15, 0.5, 3.0, 20.0])
def test_a_hung_forward_is_noticed_within_a_second_of_its_expected_end(seconds: float):
    late_ns = measured(seconds).allowed_ns(1, prefill=False) - seconds * 1e9
    watch_ns = 100 * MS
    assert 0.4e9 < late_ns <= 1e9 - watch_ns


def test_a_prefill_is_given_three_times_what_it_should_take():
    meter = StageMeter()
    meter.observe_prefill(100, 1.0)
    assert meter.allowed_ns(200, prefill=True) == pytest.approx(6.5e9)


def test_the_first_tokens_of_a_prefill_cost_as_much_as_sixteen():
    meter = StageMeter()
    meter.observe_prefill(16, 0.16)
    assert meter.allowed_ns(1, prefill=True) == meter.allowed_ns(16, prefill=True)


def test_a_verification_counts_drafts_for_their_producer():
    meter = StageMeter()
    meter.begin("target", trace=False)
    progress = meter.count(step("verify", 1, num_drafts=4, num_accepted=2, emitted=3), "drafter")
    assert meter.stats.drafts_from == {"drafter": [4, 2]}
    assert meter.stats.acceptance_lengths == {3: 1}
    assert (progress.forwards, progress.emitted, progress.verified, progress.accepted) == (1, 3, 4, 2)
    assert progress.busy_ns == 12 * MS
    assert progress.catch_up_ns == 0


def test_tokens_a_stage_had_fallen_behind_are_catching_up():
    meter = StageMeter()
    meter.begin("target", trace=False)
    meter.count(step("decode", 5), "")
    assert meter.stats.catch_up_s == pytest.approx(0.010 * 4 / 5)


def test_a_prefill_is_catching_up_and_no_verification():
    meter = StageMeter()
    meter.begin("target", trace=False)
    meter.count(step("prefill", 20), "")
    assert meter.stats.catch_up_s == pytest.approx(0.010)
    assert not meter.stats.acceptance_lengths
    assert not meter.measured


def test_a_trace_has_steps_and_rollbacks():
    meter = StageMeter()
    meter.begin("drafter", trace=True)
    meter.count(step("draft", 1), "")
    meter.count_rollback(20 * MS, 3)
    assert meter.trace is not None
    assert [(event.name, event.tokens) for event in meter.trace] == [("draft", 1), ("roll back", 3)]


def test_costs_outlive_a_request():
    meter = measured(0.02)
    meter.begin("target", trace=False)
    assert meter.costs.seconds(1) == pytest.approx(0.02)
    assert meter.stats.forwards == 0
