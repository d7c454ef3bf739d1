"""The simulated engine: limits that can be computed by hand, theory, and properties of every chain."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.errors import ConfigError
from autopipe.core.plan import Mode, Warmup, WarmupKind
from autopipe.envs import theory
from autopipe.envs.simulator import LatencyCurve, SimChain, SimRequest, SimRun, SimStage, draw_picks, simulate

FLAT = LatencyCurve({1: 1.0})
A100 = (
    SimStage(LatencyCurve({1: 0.0114}), 0.86, window=4, name="1B"),
    SimStage(LatencyCurve({1: 0.0225, 2: 0.026}, interpolate=False), 0.94, window=64, min_drafts=0, name="8B"),
    SimStage(LatencyCurve({1: 0.1237, 2: 0.427}, interpolate=False), min_drafts=12, step_alone=True, name="70B"),
)


def _pair(acceptance: float, window: int, drafter_s: float = 0.1, mode: Mode = Mode.LOCKSTEP) -> SimChain:
    drafter = SimStage(LatencyCurve({1: drafter_s}), acceptance, window=window)
    return SimChain((drafter, SimStage(FLAT)), mode)


def test_plain_decoding_takes_one_forward_a_token() -> None:
    result = simulate(SimChain(A100, Mode.PLAIN), 50, skip_prefill=True)
    assert result.total_s == pytest.approx(50 * 0.1237)
    assert len(result.stages) == 1


def test_lockstep_with_full_acceptance_emits_window_plus_one_each_round() -> None:
    result = simulate(_pair(1.0, 4), 500, skip_prefill=True)
    assert result.acceptance_length == 5.0
    assert result.total_s == pytest.approx(100 * (4 * 0.1 + 1.0), rel=0.01)


def test_lockstep_with_no_acceptance_emits_one_token_each_round() -> None:
    result = simulate(_pair(0.0, 4), 100, skip_prefill=True)
    assert result.acceptance_length == pytest.approx(1.0)
    assert result.total_s == pytest.approx(100 * (4 * 0.1 + 1.0), rel=0.05)


@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("window", [1, 4, 8])
def test_lockstep_with_one_drafter_equals_the_closed_formula(acceptance: float, window: int) -> None:
    chain = _pair(acceptance, window)
    result = simulate(chain, 100_000, skip_prefill=True)
    drafter, target = (stage.latency.seconds for stage in chain.stages)
    expected = theory.lockstep_tokens_per_s(acceptance, window, drafter, target)
    assert result.acceptance_length == pytest.approx(theory.expected_tokens(acceptance, window), rel=0.02)
    assert 1e3 / result.ms_per_token == pytest.approx(expected, rel=0.02)


def test_async_with_full_acceptance_runs_at_the_drafters_pace() -> None:
    result = simulate(_pair(1.0, 64, drafter_s=0.1, mode=Mode.ASYNC), 2000, skip_prefill=True)
    assert result.ms_per_token == pytest.approx(100, rel=0.02)


def test_async_with_no_acceptance_and_no_waiting_is_plain_decoding() -> None:
    chain = _pair(0.0, 8, mode=Mode.ASYNC)
    chain = replace(chain, stages=(chain.stages[0], replace(chain.stages[1], min_drafts=0)))
    result = simulate(chain, 200, skip_prefill=True)
    assert result.total_s == pytest.approx(200 * 1.0)


def test_paper_figures_three_async_stages_beat_shorter_chains_and_lockstep() -> None:
    def speed(stages: tuple[SimStage, ...], mode: Mode = Mode.ASYNC) -> float:
        chain = SimChain(stages, mode, wrong_equal=1.0)
        return 123.7 / simulate(chain, 50_000, skip_prefill=True).ms_per_token

    three = speed(A100)
    lockstep = (replace(A100[0], window=4), replace(A100[1], window=20), A100[2])
    assert three >= 2.5
    assert three > speed((replace(A100[0], window=64), A100[2]))
    assert three > speed(A100[1:])
    assert three > speed(lockstep, Mode.LOCKSTEP)


def test_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    chain = SimChain(A100)
    first, again, other = (simulate(chain, 2000, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(first.emitted_s, again.emitted_s)
    assert first.stages == again.stages
    assert first.total_s != other.total_s


def test_advancing_in_pieces_equals_one_run() -> None:
    chain = SimChain(A100)
    request = SimRequest(600, 32)
    picks = draw_picks(chain, 600, np.random.default_rng(1))
    whole, pieces = SimRun(chain, request, picks), SimRun(chain, request, picks)
    whole.advance()
    while not pieces.done:
        assert pieces.advance(32) > 0
    assert np.array_equal(whole.emitted_s, pieces.emitted_s)


def test_tables_decide_agreement_position_by_position() -> None:
    table = np.array([True, True, False, True])
    chain = SimChain((SimStage(FLAT, table=table, window=3), SimStage(FLAT)), Mode.LOCKSTEP)
    picks = draw_picks(chain, 8, np.random.default_rng(0))
    assert (picks[0] == 0).tolist() == [True, True, False, True] * 2


def test_contention_slows_down_stages_that_run_together() -> None:
    free = _pair(1.0, 64, drafter_s=0.1, mode=Mode.ASYNC)
    shared = replace(free, contention=((1.0, 2.0), (1.0, 1.0)))
    slower = simulate(shared, 500).total_s / simulate(free, 500).total_s
    assert slower == pytest.approx(2.0, rel=0.03)


def test_contention_does_not_matter_in_lockstep() -> None:
    free = _pair(0.7, 4)
    shared = replace(free, contention=((1.0, 3.0), (3.0, 1.0)))
    assert simulate(shared, 300, skip_prefill=True).total_s == simulate(free, 300, skip_prefill=True).total_s


def test_rollback_cost_is_paid_once_a_rollback() -> None:
    free = _pair(0.5, 4)
    drafter = replace(free.stages[0], rollback_s=0.25)
    costly = replace(free, stages=(drafter, free.stages[1]))
    base, paid = simulate(free, 400, skip_prefill=True), simulate(costly, 400, skip_prefill=True)
    assert paid.stages[0].rollbacks > 50
    assert paid.total_s - base.total_s == pytest.approx(0.25 * paid.stages[0].rollbacks, rel=0.02)


def test_requests_follow_each_other_and_each_pays_its_prefill() -> None:
    chain = SimChain((SimStage(FLAT, prefill_s=7.0),), Mode.PLAIN)
    result = simulate(chain, [SimRequest(3), SimRequest(2)])
    assert result.emitted_s.tolist() == [7.0, 8.0, 9.0, 16.0, 17.0]
    assert result.ttft_s == 7.0


def test_conservative_warmup_keeps_windows_small_at_first() -> None:
    warmup = Warmup(kind=WarmupKind.CONSERVATIVE, fraction=0.5, start_window=2)
    result = simulate(replace(_pair(1.0, 8), warmup=warmup), 200, skip_prefill=True, max_events=10_000)
    drafts = [row[4] for row in result.timeline if row[0] == 1]
    assert set(drafts[: len(drafts) // 2]) == {2.0}
    assert max(drafts) == 8.0


def test_new_stage_pays_for_its_prefill_and_switch_and_the_text_goes_on() -> None:
    plain = SimChain((SimStage(FLAT),), Mode.PLAIN)
    run = SimRun(plain, SimRequest(40), np.zeros((1, 40), dtype=np.int8), skip_prefill=True)
    run.advance(10)
    drafter = SimStage(LatencyCurve({1: 0.1}), window=4, prefill_s=3.0, switch_s=2.0)
    pair = SimChain((drafter, SimStage(FLAT)), Mode.LOCKSTEP)
    run.switch(pair, draw_picks(pair, 40, np.random.default_rng(0)), kept=(None, 0))
    before = run.now_s
    run.advance(5)
    assert run.tokens == 15
    assert run.now_s - before == pytest.approx(2.0 + 3.0 + 3 * 0.1 + 1.0)


def test_stage_that_sat_out_catches_up_on_what_it_missed() -> None:
    drafter = SimStage(LatencyCurve({1: 0.1, 11: 1.1}), window=4)
    pair = SimChain((drafter, SimStage(FLAT)), Mode.LOCKSTEP)
    picks = draw_picks(pair, 40, np.random.default_rng(0))
    run = SimRun(pair, SimRequest(40), picks, skip_prefill=True, max_events=100)
    run.advance(10)
    run.switch(pair, picks, kept=(0, 1))
    run.length_of[0, 1] -= 5  # five more tokens missing
    run.advance(1)
    assert run.stage_results()[0].caught_up >= 5


_stage = st.builds(
    lambda ms, extra, agreement, window, least, cap, alone: SimStage(
        LatencyCurve({1: ms, 9: ms + extra}),
        agreement,
        window=window,
        min_drafts=least,
        verify_cap=cap,
        step_alone=alone,
        rollback_s=extra / 3,
    ),
    st.floats(0.001, 1.0),
    st.floats(0.0, 3.0),
    st.floats(0.0, 1.0),
    st.integers(1, 40),
    st.integers(0, 50),
    st.integers(1, 40),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(_stage, min_size=1, max_size=5),
    st.sampled_from([Mode.ASYNC, Mode.LOCKSTEP, Mode.PLAIN]),
    st.sampled_from(list(WarmupKind)),
    st.floats(0.0, 1.0),
    st.floats(1.0, 3.0),
    st.integers(0, 1000),
)
def test_every_chain_finishes_with_the_targets_own_text(
    stages: list[SimStage], mode: Mode, warmup: WarmupKind, equal: float, slow: float, seed: int
) -> None:
    stages[-1] = replace(stages[-1], agreement=1.0)
    contention = np.full((len(stages), len(stages)), slow)
    chain = SimChain(tuple(stages), mode, Warmup(kind=warmup), contention.tolist(), equal)
    picks = draw_picks(chain, 60, np.random.default_rng(seed))
    run = SimRun(chain, SimRequest(60), picks)
    run.advance()
    assert run.tokens == 60
    assert not run.sequence[-1].any()
    assert np.isfinite(run.now_s)
    assert (np.diff(run.emitted_s) >= 0).all()
    for result in run.stage_results():
        assert result.accepted <= result.proposed


@pytest.mark.parametrize(
    ("change", "key"),
    [({"agreement": 1.2}, "agreement"), ({"window": 0}, "window"), ({"overhead_s": -1}, "overhead_s")],
)
def test_bad_stage_setting_is_refused_by_name(change: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        replace(A100[0], **change)  # type: ignore[arg-type]


def test_target_that_does_not_agree_with_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"chain\.0\.agreement"):
        SimChain((SimStage(FLAT, 0.5),))
