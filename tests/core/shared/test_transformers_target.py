"""Requests on a target of the transformers backend, which reads prompts whole, and may compute sequences by turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.core.backends.batch import Segment
from autopipe.core.backends.emulated_batch import EmulatedBatchRunner
from autopipe.core.backends.transformers import TransformersBackend
from autopipe.core.backends.transformers_attention import NAME as ATTENTION
from autopipe.core.backends.transformers_batch import TransformersBatchRunner
from autopipe.core.engine import Engine
from autopipe.core.gating import StepCosts
from autopipe.core.kernels import has_kernels
from autopipe.core.ngram import NgramDrafter
from autopipe.core.picker import Picker
from autopipe.core.plan import NgramOptions, Plan, StagePlan
from autopipe.core.sampling import SamplingParams
from autopipe.core.shared import SharedEngine, SharingOptions
from autopipe.core.shared.draft_maker import DraftMaker
from autopipe.core.shared.drafting import DraftingConfig
from autopipe.core.shared.loading import load_model
from autopipe.core.shared.pipeline import SharedPipeline
from autopipe.core.shared.server import SharedServer
from autopipe.core.shared.slots import SlotKeeper
from tests.core.shared.neural_scenes import EMULATED_VOCAB, SHARING, SLOTS, expected, prompt_of, spec
from tests.core.shared.requests import Collected, ids, request
from tests.core.shared.test_engine import submit, text
from tests.tiny import VOCAB_SIZE, save_tiny, tiny_model


class Turns(EmulatedBatchRunner):
    """Emulated, and keeps what it was given."""

    one_by_one = whole_prompts = True

    def __init__(self) -> None:
        super().__init__(spec(), SLOTS)
        self.given: list[list[Segment]] = []

    def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
        self.given.append(list(segments))
        return super()._run(segments)


def turns(**options: Any) -> tuple[Turns, Collected]:
    runner = Turns()
    return runner, Collected(SharedPipeline(runner, SharingOptions.parse({**SHARING, **options})))


def test_a_prompt_is_read_whole_however_few_rows_a_step_may_have() -> None:
    runner, collected = turns(prefill_rows=3, prefill_rows_alone=4)
    for number, length in enumerate((20, 1, 31)):
        collected.pipeline.begin(request(number, prompt_of(number, length), vocab=EMULATED_VOCAB))
    got = collected.run()
    assert got == {n: expected(n, length=length) for n, length in enumerate((20, 1, 31))}
    first: dict[int, int] = {}
    for segment in (segment for segments in runner.given for segment in segments):
        first.setdefault(segment.slot, len(segment.ids))
    assert sorted(first.values()) == [1, 20, 31]


def test_only_one_prompt_a_step_holds_the_others_up() -> None:
    runner, collected = turns()
    for number in range(4):
        collected.pipeline.begin(request(number, prompt_of(number, 20), vocab=EMULATED_VOCAB))
    collected.run()
    assert max(sum(len(segment.ids) == 20 for segment in segments) for segments in runner.given) == 1
    assert max(collected.longest_gap.values()) == 1


def test_nothing_is_kept_for_others() -> None:
    _, collected = turns()
    for number in range(3):
        collected.pipeline.begin(request(number, prompt_of(0, 40), vocab=EMULATED_VOCAB))
        collected.run()
    assert collected.pipeline.slots.num_cached == 0
    assert collected.pipeline.slots.tokens_reused == 0


def test_what_was_given_before_is_read_after_the_prompt_by_itself() -> None:
    """As when it was made: a prompt rounds in its own way."""
    runner, collected = turns(prefill_rows_alone=8)
    whole = expected(0)
    collected.pipeline.begin(request(0, prompt_of(0), output=whole[:13], vocab=EMULATED_VOCAB))
    assert collected.run()[0] == whole[13:]
    assert [len(segment.ids) for segments in runner.given[:4] for segment in segments] == [5, 8, 5, 1]


def test_whoever_gives_way_finds_its_kv_again_and_is_not_found_by_others() -> None:
    runner, collected = turns(max_active=1, quantum_tokens=8)
    for number in range(3):
        collected.pipeline.begin(request(number, prompt_of(number, 20), vocab=EMULATED_VOCAB))
    assert collected.run() == {number: expected(number, length=20) for number in range(3)}
    read = sum(len(segment.ids) for segments in runner.given for segment in segments)
    assert read == 3 * (20 + 23), "nothing is read twice"
    assert not any(runner._lengths)


def test_whoever_waits_with_its_kv_gives_it_up_when_cancelled_or_when_others_need_the_slot() -> None:
    runner, collected = turns(max_active=1, quantum_tokens=8, prefix_cache=False)
    runner.slots = 2
    collected.pipeline.slots = SlotKeeper(runner, 0)
    for number in range(3):
        collected.pipeline.begin(request(number, prompt_of(number, 20), vocab=EMULATED_VOCAB))
    while len(collected.output.get(1, [])) < 8:
        collected.step()
    collected.pipeline.cancel(1)
    got = collected.run()
    assert {number: got[number] for number in (0, 2)} == {number: expected(number, length=20) for number in (0, 2)}
    assert not any(runner._lengths)


def test_drafts_are_weighed_as_if_each_request_were_alone() -> None:
    """Company makes a row no dearer where every sequence has a forward of its own."""

    def num_drafts(count: int, *, one_by_one: bool) -> set[int]:
        costs = StepCosts({rows: 0.004 + 0.01 * rows for rows in range(1, 65)})
        maker = DraftMaker(512, SharingOptions.parse(SHARING), costs, one_by_one=one_by_one)
        options = NgramOptions()
        maker.use_ngrams(lambda: NgramDrafter(options))
        maker.retune(DraftingConfig(ngram=options, window=6))
        answering = [request(number, [5, 6, 7, 8] * 8, vocab=EMULATED_VOCAB) for number in range(count)]
        return {len(drafted.token_ids) for drafted in maker.draft(answering, count)}

    alone = num_drafts(1, one_by_one=False)
    assert min(alone) > 0
    assert num_drafts(8, one_by_one=True) == alone
    assert max(num_drafts(8, one_by_one=False)) < min(alone)


@lru_cache
def backend_of(dtype: torch.dtype, stacked: bool) -> TransformersBackend:
    """With our attention (and kernels) sequences can be computed together, else they take turns."""
    model = tiny_model("gpt2", dtype=dtype)
    if stacked:
        model.set_attn_implementation(ATTENTION)
    return TransformersBackend(model, threads=1)


def alone(backend: TransformersBackend, prompt: Sequence[int], params: dict[str, Any]) -> list[int]:
    """Plain decoding: the prompt is one prefill, each token one forward."""
    backend.sequence = backend.new_sequence()
    parsed = SamplingParams.parse({"max_new_tokens": 24, **params})
    picker = Picker(parsed, vocab_size=VOCAB_SIZE, prompt_length=len(prompt))
    tokens, logits = list(prompt), backend.prefill(prompt)[None]
    while len(tokens) < len(prompt) + 24:
        tokens += picker.verify(logits, tokens).token_ids
        logits = backend.forward(tokens[-1:])
    return tokens[len(prompt) :]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.sampled_from([1, 2, 9, 60, 200]), min_size=1, max_size=5),
    joins=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    window=st.integers(0, 8),
    gate=st.booleans(),
    bf16=st.booleans(),
    stacked=st.booleans(),
    sampled=st.booleans(),
    kv_tokens=st.sampled_from([None, 600, 1200]),
    given_before=st.integers(0, 12),
)
def test_whatever_the_company_each_gets_what_plain_decoding_gives(
    lengths: list[int],
    joins: list[int],
    window: int,
    gate: bool,
    bf16: bool,
    stacked: bool,
    sampled: bool,
    kv_tokens: int | None,
    given_before: int,
) -> None:
    backend = backend_of(torch.bfloat16 if bf16 else torch.float32, stacked)
    prompts = [ids(length, seed) for seed, length in enumerate(lengths)]
    params = [{"temperature": 1.0, "seed": n} if sampled else {} for n in range(len(lengths))]
    wanted = [alone(backend, prompt, params[n]) for n, prompt in enumerate(prompts)]

    per_token = backend.cost_notes().kv_bytes_per_token or 0
    runner = TransformersBatchRunner(backend, SLOTS, 512, None if kv_tokens is None else kv_tokens * per_token)
    pipeline = SharedPipeline(runner, SharingOptions.parse(SHARING))
    options = NgramOptions(gate=gate)
    if window:
        pipeline.configure(DraftingConfig(ngram=options, window=window), lambda: NgramDrafter(options))
    collected = Collected(pipeline)
    waiting = list(range(len(lengths)))
    while waiting or pipeline.has_work:
        for number in [number for number in waiting if joins[number] <= collected.steps]:
            before = wanted[number][:given_before] if number == 0 else []
            new = request(number, prompts[number], output=before, vocab=VOCAB_SIZE, **params[number])
            pipeline.begin(new)
            waiting.remove(number)
        if pipeline.has_work:
            collected.step()
        else:
            collected.steps += 1
        assert collected.steps < 2000
    for number, tokens in enumerate(wanted):
        assert collected.output[number] == (tokens[given_before:] if number == 0 else tokens)
    assert runner.kv_bytes_in_use() == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("gpt2"), "gpt2")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SharedEngine]:
    drafters = [{"model": "ngram", "window": 4}, {"model": str(folder), "name": "small", "window": 3}]
    plan = Plan.parse({"chain": [*drafters, {"model": str(folder)}]})
    with SharedEngine(plan, SharingOptions(max_active=8)) as engine:
        yield engine


def test_an_engine_serves_many_at_once_with_the_text_of_one_alone(engine: SharedEngine, folder: Path) -> None:
    prompts = [ids(length, length) for length in (3, 120, 40, 1)]
    with Engine(Plan.parse({"chain": [{"model": str(folder)}]})) as plain:
        wanted = [text(plain.submit(prompt, SamplingParams(max_new_tokens=40))) for prompt in prompts]
    handles = [submit(engine, 40, prompt=prompt) for prompt in prompts]
    assert [text(handle) for handle in handles] == wanted
    stats = handles[0].outcome().stats
    assert not stats.fallbacks
    assert {stage.name for stage in stats.stages} >= {"small", engine.plan.names()[-1]}


def test_who_asks_for_little_does_not_wait_for_who_asks_for_much(engine: SharedEngine) -> None:
    long = submit(engine, 400, prompt=ids(5, 1))
    next(iter(long))
    short = submit(engine, 8, prompt=ids(5, 2))
    text(short)
    assert not long.ended
    long.cancel()


def test_where_requests_take_turns_one_more_takes_one_more_forward(
    engine: SharedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = engine.facts(engine.plan.names()[-1])
    assert facts["exact"]
    assert facts["one_by_one"] == (not has_kernels())
    monkeypatch.setattr(engine._conductor, "target_facts", {**facts, "one_by_one": True})
    one, four = engine.step_s(1), engine.step_s(4)
    assert one is not None
    assert four == pytest.approx(4 * one)


def test_a_drafter_that_is_loaded_meanwhile_changes_nobodys_text(tmp_path: Path, folder: Path) -> None:
    """While transformers loads a model, numbers that are made anywhere in the process have its dtype."""
    small = save_tiny(tmp_path / "bf16", "gpt2", dtype=torch.bfloat16, n_layer=16)
    options = {"temperature": 1.0, "seed": 5}
    target = {"model": str(folder), "name": "target", "dtype": "fp32"}
    drafters = [{"model": str(small), "name": name, "dtype": "bf16", "window": 2} for name in ("one", "two")]
    with SharedEngine(Plan.parse({"chain": [target]})) as engine:
        wanted = [text(submit(engine, 150, prompt=ids(4, n), **options)) for n in range(2)]
        handles = [submit(engine, 150, prompt=ids(4, n), **options) for n in range(2)]
        next(iter(handles[0]))
        engine.apply(Plan.parse({"chain": [*drafters, target]}))  # two of them, which must not load at the same time
        assert set(engine.worker_ids) == {"one", "two", "target"}
        assert [text(handle) for handle in handles[1:]] == wanted[1:]
        assert text(submit(engine, 150, prompt=ids(4, 0), **options)) == wanted[0]


@pytest.mark.parametrize("width", [256, 250])
def test_a_plan_may_give_up_exactness_where_it_costs_something(tmp_path: Path, width: int) -> None:
    model = str(save_tiny(tmp_path / "gpt2", "gpt2", n_inner=width))
    stage, options = StagePlan(model=model), SharingOptions(max_active=4)
    exact, fast = (load_model(stage, options, 1, exact=exact).runner for exact in (True, False))
    assert exact.exact
    assert exact.one_by_one == (width == 250 or not has_kernels())
    assert fast.exact == (width == 256 and has_kernels()), "together they are exact anyway"
    assert fast.one_by_one == exact.one_by_one


def test_a_first_prompt_may_take_as_long_as_its_length_says() -> None:
    slot = SimpleNamespace(deadline_ns=0)
    server = SharedServer(None, slot)  # type: ignore[arg-type]
    pipeline = SimpleNamespace(costs=StepCosts({1: 0.1, 8: 0.5}), runner=SimpleNamespace(one_by_one=True))
    server._pipeline = pipeline  # type: ignore[assignment]
    server._set_deadline(4000)
    assert slot.deadline_ns - time.monotonic_ns() > 2 * 400e9


def test_kv_that_is_parked_is_kept_where_there_is_room_for_it() -> None:
    backend = backend_of(torch.float32, stacked=True)
    per_token = backend.cost_notes().kv_bytes_per_token or 0
    runner = TransformersBatchRunner(backend, SLOTS, 512, 2600 * per_token)
    pipeline = SharedPipeline(runner, SharingOptions.parse({**SHARING, "max_active": 2, "quantum_tokens": 4}))
    collected = Collected(pipeline)
    for number in range(3):
        pipeline.begin(request(number, ids(300, number), vocab=VOCAB_SIZE, max_new_tokens=60))
    collected.run()
    assert pipeline.slots.evictions == 0


def test_memory_that_is_short_is_not_filled_and_emptied_by_turns() -> None:
    """Whoever had to give up its KV comes in again when there is room for it to go on."""
    backend = backend_of(torch.float32, stacked=True)
    per_token = backend.cost_notes().kv_bytes_per_token or 0
    for bound, lengths in ((1000, (260, 300)), (800, (250, 140)), (600, (10, 10, 10))):
        runner = TransformersBatchRunner(backend, SLOTS, 512, bound * per_token)
        pipeline = SharedPipeline(runner, SharingOptions.parse(SHARING))
        collected = Collected(pipeline)
        for number, length in enumerate(lengths):
            pipeline.begin(request(number, ids(length, number), vocab=VOCAB_SIZE, max_new_tokens=60))
        most = 0
        while pipeline.has_work:
            collected.step()
            most = max(most, runner.kv_bytes_in_use())
        assert pipeline.preemptions <= 2
        assert most <= bound * per_token
