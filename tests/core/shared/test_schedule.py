"""Who is served in a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.core.errors import ConfigError
from autopipe.core.gating import StepCosts, best_length
from autopipe.core.shared.drafts import share_rows
from autopipe.core.shared.options import SharingOptions
from autopipe.core.shared.schedule import choose_answering, choose_chunks, who_gives_way
from autopipe.core.shared.sequence import SharedRequest
from tests.core.shared.requests import request

COSTS = StepCosts({1: 0.010, 2: 0.0105, 4: 0.0115, 8: 0.0135, 16: 0.021, 32: 0.035})


def waiting(number: int, missing: int, served: int = -1) -> SharedRequest:
    made = request(number, [1] * missing)
    made.served_step = served
    return made


def test_those_served_longest_ago_come_first() -> None:
    active = [waiting(0, 1, served=5), waiting(1, 1, served=3), waiting(2, 9), waiting(3, 1, served=4)]
    assert [chosen.id for chosen in choose_answering(active, 2)] == [1, 3]


def test_half_of_the_rows_go_to_the_oldest_prompt_and_the_rest_to_the_shortest() -> None:
    chunks = choose_chunks([waiting(0, 900), waiting(1, 500), waiting(2, 10)], 1, SharingOptions(prefill_rows=32))
    assert {chunk.request.id: chunk.num_tokens for chunk in chunks} == {0: 16, 2: 10, 1: 6}


def test_alone_a_prompt_gets_all_rows() -> None:
    chunks = choose_chunks([waiting(0, 900)], 0, SharingOptions(prefill_rows=32, prefill_rows_alone=128))
    assert [chunk.num_tokens for chunk in chunks] == [128]


@given(st.lists(st.integers(1, 300), max_size=12), st.integers(0, 8))
def test_rows_are_never_more_than_allowed_and_never_left_idle(missing: list[int], answering: int) -> None:
    options = SharingOptions(max_batch=8, max_rows=40, prefill_rows=24, prefill_rows_alone=36)
    active = [waiting(number, count) for number, count in enumerate(missing)]
    chunks = choose_chunks(active, answering, options)
    rows = sum(chunk.num_tokens for chunk in chunks)
    budget = 24 if answering else 36
    assert rows == min(budget, sum(count for count in missing if count > 1))
    assert all(0 < chunk.num_tokens <= chunk.request.missing for chunk in chunks)
    assert len({chunk.request.id for chunk in chunks}) == len(chunks)


def test_nobody_gives_way_before_its_share() -> None:
    first, second = waiting(0, 1), waiting(1, 1)
    first.since_active, second.since_active = 9, 4
    assert who_gives_way([first, second], 10) is None
    assert who_gives_way([first, second], 9) is first
    assert who_gives_way([], 1) is None


def test_options_that_leave_no_row_for_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_rows"):
        SharingOptions.parse({"max_batch": 32, "max_rows": 32})


@given(st.lists(st.floats(0.01, 0.99), max_size=7))
def test_for_one_request_it_is_the_rule_of_the_single_engine(confidence: list[float]) -> None:
    assert share_rows([confidence], COSTS, 1, 1.0, 100) == [best_length(confidence, COSTS)]


def test_with_more_requests_only_likelier_drafts_pay() -> None:
    confidence = [0.55, 0.5]
    alone = share_rows([confidence], COSTS, 1, 1.0, 100)[0]
    crowded = share_rows([confidence] * 16, COSTS, 16, 16.0, 100)
    assert alone > 0
    assert sum(crowded) == 0


def test_the_likeliest_drafts_get_the_rows() -> None:
    counts = share_rows([[0.3], [0.99, 0.98, 0.97], []], COSTS, 3, 3.0, 6)
    assert counts == [0, 3, 0]


@given(st.lists(st.lists(st.floats(0.01, 0.99), max_size=4), min_size=1, max_size=3), st.integers(1, 20))
def test_no_other_choice_is_better(confidences: list[list[float]], base: int) -> None:
    from itertools import product

    def rate(counts: tuple[int, ...]) -> float:
        expected = float(base)
        for confidence, count in zip(confidences, counts, strict=True):
            chain = 1.0
            for chance in confidence[:count]:
                chain *= chance
                expected += chain
        return expected / COSTS.seconds(base + sum(counts))

    chosen = tuple(share_rows(confidences, COSTS, base, float(base), 1000))
    best = max(rate(counts) for counts in product(*(range(len(c) + 1) for c in confidences)))
    assert rate(chosen) >= best * (1 - 1e-9)
