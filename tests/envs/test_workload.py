"""The work of an episode: drawn from the seed alone."""

import numpy as np
import pytest

from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.workload import Arrivals, Request, draw_requests, persistent_uniform
from tests.envs.scenes import scenario


def test_the_work_has_exactly_the_tokens_of_its_phases() -> None:
    work = scenario(cycles=3)
    requests = draw_requests(work, seed=4)
    assert sum(request.output_tokens for request in requests) == work.total_tokens == 6000
    starts = np.cumsum([0, *(request.output_tokens for request in requests[:-1])])
    assert [request.start_token for request in requests] == starts.tolist()


def test_the_same_seed_draws_the_same_work() -> None:
    one, other = draw_requests(scenario(), 4), draw_requests(scenario(), 4)
    assert all(np.array_equal(a.uniform, b.uniform) for a, b in zip(one, other, strict=True))
    assert not np.array_equal(one[0].uniform, draw_requests(scenario(), 5)[0].uniform[: len(one[0].uniform)])


def test_phases_follow_each_other_and_repeat() -> None:
    phases = [{"tokens": 1000, "kinds": {kind: 1}} for kind in ("code", "summary")]
    requests = draw_requests(scenario(phases=phases, cycles=2), 0)
    for request in requests:
        expected = PromptKind.CODE if request.start_token % 2000 < 1000 else PromptKind.SUMMARY
        assert request.kind is expected


def test_lengths_stay_in_their_range() -> None:
    requests = draw_requests(scenario(), 1)
    assert all(100 <= request.output_tokens <= 200 for request in requests[:-1])
    assert all(64 <= request.prompt_tokens <= 512 for request in requests)


def test_persistence_repeats_positions_and_keeps_them_uniform() -> None:
    values = persistent_uniform(np.random.default_rng(0), 20_000, 0.6)
    assert (values[1:] == values[:-1]).mean() == pytest.approx(0.6, abs=0.02)
    assert values.mean() == pytest.approx(0.5, abs=0.02)


def request(gap_s: float | None) -> Request:
    return Request(0, PromptKind.CHAT, 1, 1, gap_s, np.zeros(1), np.zeros(1))


def test_a_closed_loop_has_no_queue() -> None:
    arrivals = Arrivals([request(None)] * 3)
    assert [arrivals.next(7.0), arrivals.waiting(100.0)] == [7.0, 0]


def test_open_arrivals_do_not_wait_for_service() -> None:
    arrivals = Arrivals([request(1.0), request(2.0), request(3.0)])
    assert arrivals.next(0.0) == 1.0
    assert [arrivals.waiting(time_s) for time_s in (2.9, 3.0, 6.0)] == [0, 1, 2]
    assert arrivals.next(50.0) == 3.0
