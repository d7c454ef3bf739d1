"""The shared pipeline in this process: nobody's text depends on company, and nobody starves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopipe.core import kernels
from autopipe.core.errors import AutoPipeError, KVMemoryError
from autopipe.core.ngram import NgramDrafter
from autopipe.core.plan import NgramOptions
from tests.core.shared.requests import Collected, alone, ids, make_pipeline, request

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "penalised": {"temperature": 0.7, "frequency_penalty": 0.6, "repetition_penalty": 1.2, "seed": 3},
}
native = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")
SYSTEM = ids(70, 99)


@native
@DTYPES
@pytest.mark.parametrize("way", WAYS)
def test_a_request_gives_the_same_tokens_alone_and_among_seven_others(dtype: torch.dtype, way: str) -> None:
    prompts = [SYSTEM + ids(5 + 9 * number, number) for number in range(8)]
    expected = {number: alone(prompt, dtype, **WAYS[way]) for number, prompt in enumerate(prompts)}
    for sharing in ({}, {"prefix_cache": False}, {"max_batch": 3}):
        together = Collected(make_pipeline(dtype, **sharing))
        for number, prompt in enumerate(prompts):
            together.pipeline.begin(request(number, prompt, **WAYS[way]))
        assert together.run() == expected, sharing


@native
@DTYPES
def test_a_request_that_joins_late_and_reuses_a_prefix_gives_the_same_tokens(dtype: torch.dtype) -> None:
    collected = Collected(make_pipeline(dtype))
    collected.pipeline.begin(request(0, SYSTEM + ids(20, 0)))
    collected.run()
    for number in range(1, 4):
        collected.pipeline.begin(request(number, SYSTEM + ids(3, number), temperature=0.8, seed=number))
        for _ in range(number):
            collected.step()
    collected.run()
    assert collected.pipeline.slots.tokens_reused >= 3 * len(SYSTEM)
    for number in range(1, 4):
        assert collected.output[number] == alone(SYSTEM + ids(3, number), dtype, temperature=0.8, seed=number)


@native
def test_the_next_turn_of_a_chat_reads_only_what_is_new() -> None:
    collected = Collected(make_pipeline())
    first = SYSTEM + ids(12, 1)
    collected.pipeline.begin(request(0, first))
    answer = collected.run()[0]
    second = first + answer + ids(6, 2)
    collected.pipeline.begin(request(1, second))
    report = collected.pipeline.step()
    assert report.num_rows <= 7
    collected.output[1] = list(report.served[0].token_ids)
    assert collected.run()[1] == alone(second)


def test_a_burst_with_one_system_prompt_reads_it_once() -> None:
    collected = Collected(make_pipeline(window=None, prefill_rows_alone=32))
    for number in range(6):
        collected.pipeline.begin(request(number, [*SYSTEM, number], max_new_tokens=2))
    rows = 0
    while collected.pipeline.has_work:
        rows += collected.pipeline.step().num_rows
    assert rows < 2 * len(SYSTEM)


@native
def test_drafts_are_verified_and_change_nothing() -> None:
    prompt = ids(10, 0) * 4
    drafted = Collected(make_pipeline(gate=False))
    drafted.pipeline.begin(request(0, prompt, max_new_tokens=60))
    drafts = 0
    while drafted.pipeline.has_work:
        report = drafted.pipeline.step()
        drafts += sum(served.num_drafts for served in report.served)
        drafted.output.setdefault(0, []).extend(report.served[0].token_ids)
    assert drafts > 0
    assert drafted.output[0] == alone(prompt, max_new_tokens=60)


@native
def test_an_eos_inside_accepted_drafts_ends_the_text() -> None:
    prompt = ids(10, 0) * 4
    text = alone(prompt, max_new_tokens=60)
    eos = text[20]
    collected = Collected(make_pipeline(gate=False))
    collected.pipeline.begin(request(0, prompt, eos=[eos], max_new_tokens=60))
    assert collected.run()[0] == text[: text.index(eos) + 1]
    assert collected.reasons[0] == "stop"


def test_a_long_prompt_does_not_hold_up_those_that_answer() -> None:
    collected = Collected(make_pipeline(prefill_rows=16))
    collected.pipeline.begin(request(0, ids(5, 0), max_new_tokens=30))
    collected.step()
    collected.pipeline.begin(request(1, ids(400, 1), max_new_tokens=2))
    before = len(collected.output[0])
    for _ in range(5):
        collected.step()
    assert len(collected.output[0]) >= before + 5


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    collected = Collected(make_pipeline(prefill_rows_alone=16, prefill_rows=16))
    collected.pipeline.begin(request(0, ids(400, 0), max_new_tokens=2))
    collected.pipeline.begin(request(1, ids(8, 1), max_new_tokens=2))
    for _ in range(4):
        collected.step()
    assert collected.output[1]
    assert not collected.output[0]


def test_a_long_prompt_is_read_however_many_short_ones_come() -> None:
    collected = Collected(make_pipeline(prefill_rows=16, prefill_rows_alone=16))
    collected.pipeline.begin(request(0, ids(200, 0), max_new_tokens=1))
    for number in range(1, 60):
        collected.pipeline.begin(request(number, ids(30, number), max_new_tokens=1))
        collected.step()
        if 0 in collected.reasons:
            break
    assert 0 in collected.reasons


def test_with_more_active_requests_than_a_batch_takes_all_get_on() -> None:
    collected = Collected(make_pipeline(window=None, max_batch=3))
    for number in range(9):
        collected.pipeline.begin(request(number, ids(4, number)))
    collected.run()
    assert max(collected.longest_gap.values()) <= 6


@native
def test_a_long_request_gives_way_to_waiting_ones_and_still_gives_its_tokens() -> None:
    collected = Collected(make_pipeline(max_active=2, quantum_tokens=10))
    lengths = {0: 90, 1: 90, 2: 8, 3: 8}
    for number, length in lengths.items():
        collected.pipeline.begin(request(number, ids(9, number), max_new_tokens=length))
    order: list[int] = []
    while collected.pipeline.has_work:
        collected.step()
        order += [number for number in collected.reasons if number not in order]
    assert order[:2] == [2, 3]
    assert collected.output == {n: alone(ids(9, n), max_new_tokens=length) for n, length in lengths.items()}


@native
@pytest.mark.parametrize("cache", [True, False])
def test_when_kv_memory_is_short_requests_take_turns_and_give_the_same_tokens(cache: bool) -> None:
    page = 64 * 2 * 2 * 2 * 32 * 4
    collected = Collected(make_pipeline(kv_bytes=8 * page, prefix_cache=cache))
    for number in range(7):
        collected.pipeline.begin(request(number, ids(60, number), max_new_tokens=80))
    collected.run()
    assert collected.output == {n: alone(ids(60, n), max_new_tokens=80) for n in range(7)}


@native
def test_memory_of_finished_requests_goes_before_a_request_is_sent_back() -> None:
    page = 64 * 2 * 2 * 2 * 32 * 4
    collected = Collected(make_pipeline(kv_bytes=8 * page))
    for number in range(5):
        collected.pipeline.begin(request(number, ids(200, number), max_new_tokens=4))
        collected.run()
    assert collected.pipeline.preemptions == 0
    assert collected.pipeline.slots.evictions > 0
    assert collected.pipeline.runner.kv_bytes_in_use() <= 8 * page


def test_a_cancelled_request_is_gone_at_once_and_the_others_go_on() -> None:
    collected = Collected(make_pipeline(max_active=2))
    for number in range(3):
        collected.pipeline.begin(request(number, ids(6, number)))
    collected.step()
    collected.pipeline.cancel(0)
    collected.pipeline.cancel(2)
    collected.pipeline.cancel(77)
    collected.output.pop(0, None)
    collected.run()
    assert list(collected.output) == [1]


@native
def test_everything_is_given_back_when_all_are_done() -> None:
    pipeline = make_pipeline(cached_sequences=0)
    for number in range(5):
        pipeline.begin(request(number, ids(30, number)))
    pipeline.step()
    pipeline.cancel(3)
    Collected(pipeline).run()
    assert pipeline.runner.kv_bytes_in_use() == 0


def test_a_request_that_can_choose_no_token_fails_alone() -> None:
    def fails(prefix: list[int], row: Any) -> Any:
        return row * float("nan")

    collected = Collected(make_pipeline())
    broken = request(1, ids(6, 1))
    broken.picker._editor._custom = fails
    broken.picker._editor._always = True
    for each in (request(0, ids(6, 0)), broken, request(2, ids(6, 2))):
        collected.pipeline.begin(each)
    collected.run()
    assert isinstance(collected.errors[1], AutoPipeError)
    assert len(collected.output[0]) == len(collected.output[2]) == 24


@native
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", [1, 13, 23])
def test_a_continuation_is_what_the_uninterrupted_request_would_have_said(way: str, kept: int) -> None:
    prompt = ids(30, 5)
    whole = alone(prompt, **WAYS[way])
    collected = Collected(make_pipeline())
    collected.pipeline.begin(request(0, ids(20, 1)))
    collected.pipeline.begin(request(1, prompt, output=whole[:kept], **WAYS[way]))
    assert collected.run()[1] == whole[kept:]


@native
def test_logprobs_do_not_depend_on_company() -> None:
    def run(company: int) -> list[Any]:
        collected = Collected(make_pipeline())
        for number in range(company + 1):
            collected.pipeline.begin(request(number, ids(8, number), num_logprobs=2))
        collected.run()
        return collected.logprobs[0]

    assert run(0) == run(5)


def test_changing_the_drafts_in_the_middle_changes_no_text() -> None:
    fixed, changed = Collected(make_pipeline()), Collected(make_pipeline())
    for collected in (fixed, changed):
        for number in range(3):
            collected.pipeline.begin(request(number, ids(10, number) * 3))
    fixed.run()
    for step in range(100):
        if not changed.pipeline.has_work:
            break
        drafting = changed.pipeline.maker.drafting.replace(window=1 + step % 7)
        changed.pipeline.configure(drafting, (lambda: NgramDrafter(NgramOptions())) if step % 3 else None)
        changed.step()
    assert changed.run() == fixed.output


@native
def test_one_request_too_large_for_all_memory_is_an_error_not_a_hang() -> None:
    page = 64 * 2 * 2 * 2 * 32 * 4
    pipeline = make_pipeline(kv_bytes=8 * page)
    pipeline.runner._pool.max_pages = 2
    pipeline.begin(request(0, ids(200, 0)))
    with pytest.raises(KVMemoryError):
        Collected(pipeline).run()


def test_without_native_kernels_a_request_gives_the_same_tokens_alone_and_in_company(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autopipe.core.backends.fused_batch.has_kernels", lambda: False)

    def run(numbers: list[int]) -> dict[int, list[int]]:
        collected = Collected(make_pipeline())
        for number in numbers:
            collected.pipeline.begin(request(number, ids(20 + 9 * number, number), max_new_tokens=8))
        return collected.run()

    together = run([0, 1, 2])
    assert all(run([number]) == {number: together[number]} for number in range(3))


@native
def test_a_long_request_gives_way_also_where_memory_keeps_others_waiting() -> None:
    page = 64 * 2 * 2 * 2 * 32 * 4
    collected = Collected(make_pipeline(kv_bytes=8 * page, quantum_tokens=20))
    collected.pipeline.begin(request(0, ids(240, 0), max_new_tokens=200))
    collected.step()
    collected.pipeline.begin(request(1, ids(200, 1), max_new_tokens=4))
    order: list[int] = []
    while collected.pipeline.has_work:
        collected.step()
        order += [number for number in collected.reasons if number not in order]
    assert order == [1, 0]
    assert collected.output[0] == alone(ids(240, 0), max_new_tokens=200)
