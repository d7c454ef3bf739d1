"""Neural drafters in the shared pipeline: they draft for many at once, and change nobody's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.core import kernels
from autopipe.core.backends.batch import BatchRunner
from autopipe.core.backends.emulated_batch import EmulatedBatchRunner
from autopipe.core.backends.fused_batch import batch_runner
from autopipe.core.errors import KVMemoryError
from autopipe.core.plan import Warmup
from autopipe.core.shared.neural import SharedDrafter
from tests.core.shared.neural_scenes import (
    EMULATED_VOCAB,
    SLOTS,
    ShortOfMemory,
    configure,
    drafting,
    emulated_pipeline,
    expected,
    pipeline_of,
    plain_text,
    prompt_of,
    serve,
    spec,
)
from tests.core.shared.requests import Collected, alone, ids, make_pipeline, request
from tests.tiny import tiny_model, tiny_state

native = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    agreements=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    windows=st.lists(st.integers(1, 7), min_size=3, max_size=3),
    ngram=st.integers(0, 6),
    gate=st.booleans(),
    warmup=st.sampled_from(["none", "conservative", "progressive"]),
    lengths=st.lists(st.sampled_from([1, 5, 30, 60]), min_size=1, max_size=5),
    system=st.sampled_from([0, 9, 30]),
    tried=st.lists(st.integers(0, 7), max_size=4),
    joins=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    leaves=st.integers(0, 30),
    temperature=st.sampled_from([0.0, 1.0]),
    max_batch=st.integers(1, 4),
    prefill_rows_alone=st.integers(1, 40),
)
def test_whatever_the_chain_and_the_company_each_gets_what_the_target_says_to_it_alone(
    agreements: list[float],
    windows: list[int],
    ngram: int,
    gate: bool,
    warmup: str,
    lengths: list[int],
    system: int,
    tried: list[int],
    joins: list[int],
    leaves: int,
    temperature: float,
    max_batch: int,
    prefill_rows_alone: int,
) -> None:
    config = drafting(windows[: len(agreements)], ngram=ngram, gate=gate, warmup=Warmup.parse({"kind": warmup}))
    collected = emulated_pipeline(
        agreements, config, tried=tried, max_batch=max_batch, max_rows=40, prefill_rows_alone=prefill_rows_alone
    )
    waiting = [
        (join, request(n, prompt_of(n % 2, length, system), vocab=EMULATED_VOCAB, temperature=temperature, seed=n))
        for n, (length, join) in enumerate(zip(lengths, joins, strict=False))
    ]
    lost = list[str]()
    collected.pipeline.maker.failed = lambda key, name, error: lost.append(f"{name}: {error}")
    cancelled = serve(collected, waiting, leaves=leaves)
    for n, length in enumerate(lengths):
        if n != cancelled:
            params = {"seed": n, "temperature": temperature} if temperature else {}
            assert collected.output[n] == plain_text(prompt_of(n % 2, length, system), params)
    assert not lost


def test_eight_requests_share_each_forward_of_the_drafter() -> None:
    collected = emulated_pipeline([1.0], drafting([4]))
    drafter = collected.pipeline.maker.drafters["d0"]
    rows: list[int] = []
    drafter.about_to_compute = rows.append
    for number in range(8):
        collected.pipeline.begin(request(number, prompt_of(number), vocab=EMULATED_VOCAB, max_new_tokens=21))
    assert collected.run() == {number: expected(number, 21) for number in range(8)}
    assert max(rows) >= 8
    assert len(rows) < 30, "one forward for each draft of all, not for each request"


def test_a_perfect_drafter_fills_its_window() -> None:
    collected = emulated_pipeline([1.0], drafting([4]))
    collected.pipeline.begin(request(0, prompt_of(0), vocab=EMULATED_VOCAB, max_new_tokens=21))
    collected.run()
    assert collected.steps == 1 + 20 // 5


def test_what_drafters_do_is_counted_for_each_request() -> None:
    collected = emulated_pipeline([0.7, 1.0], drafting([3, 4]))
    for number in range(2):
        collected.pipeline.begin(request(number, prompt_of(number), vocab=EMULATED_VOCAB, max_new_tokens=40))
    emitted = {"d0": 0, "d1": 0}
    verified = {"d0": 0, "d1": 0}
    target_drafts = 0
    while collected.pipeline.has_work:
        for served in collected.pipeline.step().served:
            target_drafts += served.num_drafts
            for counts in served.drafters:
                emitted[counts.name] += counts.emitted
                verified[counts.name] += counts.verified
                assert counts.busy_s > 0
    assert verified["d0"] == 0
    assert verified["d1"] <= emitted["d0"]
    assert 0 < target_drafts <= emitted["d1"]


def test_a_long_prompt_is_read_in_pieces_and_nobody_drafts_before_it_is() -> None:
    collected = emulated_pipeline([1.0], drafting([4]), prefill_rows_alone=16, prefill_rows=16)
    rows: list[int] = []
    collected.pipeline.maker.drafters["d0"].about_to_compute = rows.append
    collected.pipeline.begin(request(0, prompt_of(0, 200), vocab=EMULATED_VOCAB))
    collected.pipeline.begin(request(1, prompt_of(1), vocab=EMULATED_VOCAB))
    collected.run()
    assert collected.output == {0: expected(0, length=200), 1: expected(1)}
    assert max(rows) <= 16 + 8


def test_a_common_beginning_is_read_once_by_the_drafter_too() -> None:
    collected = emulated_pipeline([1.0], drafting([4]))
    read: list[int] = []
    collected.pipeline.maker.drafters["d0"].about_to_compute = read.append
    system = prompt_of(3, 60)
    for number in range(4):
        collected.pipeline.begin(request(number, [*system, number], vocab=EMULATED_VOCAB, max_new_tokens=3))
        collected.run()
    assert sum(read) < 2 * len(system)


def test_a_drafter_that_fails_is_left_out_and_the_text_stays_the_same() -> None:
    collected = emulated_pipeline([0.9], drafting([4]))
    lost: list[tuple[str, str]] = []
    collected.pipeline.maker.failed = lambda key, name, error: lost.append((key, str(error)))
    runner = EmulatedBatchRunner(spec(0.9, fail_after=6), SLOTS)
    collected.pipeline.maker.add("d0", SharedDrafter("d0", runner, collected.pipeline.options))
    for number in range(3):
        collected.pipeline.begin(request(number, prompt_of(number), vocab=EMULATED_VOCAB))
    assert collected.run() == {number: expected(number) for number in range(3)}
    assert [key for key, _ in lost] == ["d0"]
    assert "failed after 6" in lost[0][1]
    assert not collected.pipeline.maker.drafters


def test_a_drafter_that_joins_and_leaves_in_the_middle_changes_no_text() -> None:
    collected = emulated_pipeline([0.8], drafting([4], ngram=3))
    pipeline = collected.pipeline
    for number in range(3):
        pipeline.begin(request(number, prompt_of(number), vocab=EMULATED_VOCAB, max_new_tokens=60))
    step = 0
    while pipeline.has_work:
        if step % 4 == 1:
            pipeline.maker.remove("d0")
        elif step % 4 == 3:
            pipeline.maker.add("d0", SharedDrafter("d0", EmulatedBatchRunner(spec(0.8), SLOTS), pipeline.options))
        pipeline.maker.retune(pipeline.maker.drafting.replace(window=1 + step % 5))
        collected.step()
        step += 1
    assert collected.output == {number: expected(number, 60) for number in range(3)}


def test_a_drafter_with_a_shorter_context_stops_drafting_there() -> None:
    collected = pipeline_of([EmulatedBatchRunner(spec(1.0, max_length=20), SLOTS)], drafting([4]))
    collected.pipeline.begin(request(0, prompt_of(0), vocab=EMULATED_VOCAB, max_new_tokens=40))
    assert collected.run() == {0: expected(0, 40)}


def short_of_memory() -> tuple[Collected, list[str]]:
    """A pipeline whose drafter has hardly any room, and what it says of that."""
    collected, said = pipeline_of([ShortOfMemory(spec(), SLOTS)], drafting([4])), list[str]()
    collected.pipeline.maker.drafters["d0"].fell_short = lambda: said.append("short")
    return collected, said


def test_without_memory_for_its_cache_a_drafter_goes_without_drafts() -> None:
    collected, short = short_of_memory()
    for number in range(6):
        collected.pipeline.begin(request(number, prompt_of(number, 12), vocab=EMULATED_VOCAB))
    assert collected.run() == {number: expected(number, length=12) for number in range(6)}
    assert short


def test_what_is_not_needed_any_more_makes_room_before_anybody_goes_without() -> None:
    collected, short = short_of_memory()
    for number in range(5):  # one after another: what those before have left is more than there is room for
        collected.pipeline.begin(request(number, prompt_of(number, 12), vocab=EMULATED_VOCAB, max_new_tokens=10))
        collected.run()
    assert collected.output == {number: expected(number, 10, length=12) for number in range(5)}
    assert not short
    assert collected.steps < 5 * 6


def test_a_text_with_tokens_that_a_drafter_lacks_is_not_drafted_for_and_harms_nobody() -> None:
    small = EmulatedBatchRunner(spec().replace(vocab_size=60), SLOTS)
    collected = pipeline_of([small], drafting([4], ngram=3))
    pipeline, lost = collected.pipeline, list[str]()
    pipeline.maker.failed = lambda key, name, error: lost.append(str(error))
    strange, common = [1, 2, 63, 4], [1, 2, 3, 4]
    for number, prompt in enumerate((strange, common, strange * 2)):
        pipeline.begin(request(number, prompt, vocab=EMULATED_VOCAB))
    assert collected.run() == {
        0: plain_text(strange, {}), 1: plain_text(common, {}), 2: plain_text(strange * 2, {})
    }  # fmt: skip
    assert not lost
    assert "d0" in pipeline.maker.drafters


def test_a_request_that_tries_the_whole_window_is_read_first_and_the_others_copy_meanwhile() -> None:
    """With nothing drafted neurally, one request after another tries it, whatever its drafter has to read for that."""
    collected = emulated_pipeline([1.0], drafting([4], ngram=3), tried=[0], prefill_rows_alone=16)
    for number in range(6):
        text = prompt_of(number, 10) * 6
        collected.pipeline.begin(request(number, text, vocab=EMULATED_VOCAB, max_new_tokens=150))
    tried: set[int] = set()
    copied = neural = 0
    while collected.pipeline.has_work:
        for served in collected.pipeline.step().served:
            if served.num_drafts and served.drafter == "d0":
                tried.add(served.request)
                neural += 1
            elif served.num_drafts:
                assert served.drafter == "ngram"
                copied += 1
    assert len(tried) >= 4
    assert copied > 5 * neural


def test_after_every_step_a_drafter_has_read_what_was_decided_and_nothing_else() -> None:
    runners = [EmulatedBatchRunner(spec(agreement), SLOTS) for agreement in (0.5, 0.7)]
    collected = pipeline_of(runners, drafting([3, 4], ngram=3), tried=[4, 0, 2])
    requests = [request(number, prompt_of(number), vocab=EMULATED_VOCAB, max_new_tokens=60) for number in range(3)]
    for each in requests:
        collected.pipeline.begin(each)
    checked = 0
    while collected.pipeline.has_work:
        collected.step()
        for runner in runners:
            for _, held in runner._sequences.values():
                beginnings = [each.tokens[: len(held)] for each in requests]
                assert held in beginnings, "a draft that was rejected is still there"
                checked += 1
    assert checked > 100


class RefusesSome(EmulatedBatchRunner):
    """A target whose KV memory is short every third time, at first."""

    calls = 0

    def _run(self, segments: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls % 3 == 0 and self.calls < 12:
            raise KVMemoryError("full")
        return super()._run(segments)


def test_a_step_that_must_be_chosen_again_drafts_again() -> None:
    collected = pipeline_of([EmulatedBatchRunner(spec(0.8), SLOTS)], drafting([4]), target=RefusesSome(spec(), SLOTS))
    lost: list[str] = []
    collected.pipeline.maker.failed = lambda key, name, error: lost.append(str(error))
    for number in range(4):
        collected.pipeline.begin(request(number, prompt_of(number), vocab=EMULATED_VOCAB))
    assert collected.run() == {number: expected(number) for number in range(4)}
    assert not lost


def test_what_an_ngram_has_drafted_teaches_nothing_of_the_neural_drafter() -> None:
    collected = emulated_pipeline([1.0], drafting([4], ngram=3), tried=[0])
    verdicts: list[int] = []
    collected.pipeline.maker.gate.observe_verdict = lambda drafts, accepted: verdicts.append(drafts)  # type: ignore[method-assign]
    collected.pipeline.maker.gate.trial_is_due = lambda: False  # type: ignore[method-assign]
    for number in range(3):
        collected.pipeline.begin(request(number, prompt_of(number) * 5, vocab=EMULATED_VOCAB, max_new_tokens=60))
    drafts = 0
    while collected.pipeline.has_work:
        drafts += sum(served.num_drafts for served in collected.pipeline.step().served)
    assert drafts > 10
    assert not verdicts


@pytest.fixture(scope="module")
def similar() -> Callable[[float, torch.dtype], BatchRunner]:
    """A drafter that is the target with some noise on its weights."""

    def make(noise: float, dtype: torch.dtype) -> BatchRunner:
        model = tiny_model("qwen3", dtype=dtype)
        draw = torch.Generator().manual_seed(3)
        state = {
            name: (tensor.float() + noise * torch.randn(tensor.shape, generator=draw)).to(dtype)
            for name, tensor in tiny_state(model).items()
        }
        return batch_runner(model.config, state, dtype=dtype, threads=1, slots=SLOTS)

    return make


@native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.3}], ids=str)
def test_with_real_models_a_request_gets_the_tokens_of_plain_decoding(
    dtype: torch.dtype, params: dict[str, Any], similar: Callable[[float, torch.dtype], BatchRunner]
) -> None:
    collected = Collected(make_pipeline(dtype, window=None))
    configure(collected.pipeline, [similar(0.004, dtype), similar(0.002, dtype)], drafting([3, 4], ngram=4))
    prompts = [ids(4 + 11 * number, number) * 2 for number in range(5)]
    accepted = 0
    for number, prompt in enumerate(prompts):
        collected.pipeline.begin(request(number, prompt, **params))
    while collected.pipeline.has_work:
        report = collected.pipeline.step()
        for served in report.served:
            collected.output.setdefault(served.request, []).extend(served.token_ids)
            accepted += served.num_accepted
    assert collected.output == {number: alone(prompt, dtype, **params) for number, prompt in enumerate(prompts)}
    assert accepted > 10, "nothing was accepted: this test says nothing"
