"""Chains of neural drafters that work while the stage after them does, for many requests, and change nobody's text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.core.backends.batch import BatchRunner, Segment
from autopipe.core.backends.emulated_batch import EmulatedBatchRunner
from autopipe.core.ngram import NgramDrafter
from autopipe.core.plan import NgramOptions, Plan, Warmup
from autopipe.core.shared.ahead import Ahead
from autopipe.core.shared.drafting import DraftingConfig
from tests.core.shared.neural_scenes import (
    EMULATED_VOCAB,
    SLOTS,
    ShortOfMemory,
    drafting,
    expected,
    pipeline_of,
    plain_text,
    prompt_of,
    serve,
    spec,
    threads_end,
    until,
)
from tests.core.shared.requests import Collected, request


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    threads_end(before)


def runners(agreements: Sequence[float], **extra: Any) -> list[BatchRunner]:
    return [EmulatedBatchRunner(spec(agreement, **extra), SLOTS) for agreement in agreements]


def ahead_of(drafters: Sequence[BatchRunner], config: DraftingConfig, **options: Any) -> Collected:
    return pipeline_of(drafters, config.replace(ahead=True), **options)


def close(collected: Collected) -> None:
    """Let drafters' threads end."""
    for key in list(collected.pipeline.maker.drafters):
        collected.pipeline.maker.remove(key)


def begin(collected: Collected, count: int, tokens: int = 24) -> None:
    for number in range(count):
        new = request(number, prompt_of(number), vocab=EMULATED_VOCAB, max_new_tokens=tokens)
        collected.pipeline.begin(new)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    agreements=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    windows=st.lists(st.integers(1, 7), min_size=3, max_size=3),
    min_drafts=st.integers(0, 4),
    ngram=st.integers(0, 6),
    gate=st.booleans(),
    warmup=st.sampled_from(["none", "conservative", "progressive"]),
    lengths=st.lists(st.sampled_from([1, 5, 30, 60]), min_size=1, max_size=5),
    system=st.sampled_from([0, 9, 30]),
    tried=st.lists(st.integers(0, 7), max_size=4),
    joins=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    leaves=st.integers(0, 30),
    changes=st.lists(st.tuples(st.integers(1, 20), st.booleans(), st.integers(1, 7)), max_size=3),
    fails=st.one_of(st.none(), st.integers(1, 30)),
    temperature=st.sampled_from([0.0, 1.0]),
    max_batch=st.integers(1, 4),
    prefill_rows_alone=st.integers(1, 40),
)
def test_whatever_the_chain_and_the_company_each_gets_what_the_target_says_to_it_alone(
    agreements: list[float],
    windows: list[int],
    min_drafts: int,
    ngram: int,
    gate: bool,
    warmup: str,
    lengths: list[int],
    system: int,
    tried: list[int],
    joins: list[int],
    leaves: int,
    changes: list[tuple[int, bool, int]],
    fails: int | None,
    temperature: float,
    max_batch: int,
    prefill_rows_alone: int,
) -> None:
    config = drafting(
        windows[: len(agreements)],
        ngram=ngram,
        gate=gate,
        min_drafts=min_drafts,
        warmup=Warmup.parse({"kind": warmup}),
    )
    drafters = runners(agreements[:1], fail_after=fails) + runners(agreements[1:])
    collected = ahead_of(
        drafters, config, tried=tried, max_batch=max_batch, max_rows=40, prefill_rows_alone=prefill_rows_alone
    )
    maker = collected.pipeline.maker
    waiting = [
        (join, request(n, prompt_of(n % 2, length, system), vocab=EMULATED_VOCAB, temperature=temperature, seed=n))
        for n, (length, join) in enumerate(zip(lengths, joins, strict=False))
    ]
    lost = list[str]()
    maker.failed = lambda key, name, error: lost.append(f"{name}: {error}")

    def change(step: int) -> None:
        for _, ahead, window in [each for each in changes if each[0] == step]:
            maker.retune(maker.drafting.replace(ahead=ahead, window=window))

    cancelled = serve(collected, waiting, leaves=leaves, before_step=change)
    close(collected)
    for n, length in enumerate(lengths):
        if n != cancelled:
            params = {"seed": n, "temperature": temperature} if temperature else {}
            assert collected.output[n] == plain_text(prompt_of(n % 2, length, system), params)
    assert all(line.startswith("d0: ") and fails is not None for line in lost)


class Meeting:
    """A target, and a drafter whose forwards all happen during three of the target's, `count` in each."""

    def __init__(self, count: int) -> None:
        self.rows: list[int] = []  # of the drafter's forwards
        self.steps = 0
        allowed, done = threading.Semaphore(0), threading.Semaphore(0)

        class Target(EmulatedBatchRunner):
            def _run(target, segments: Sequence[Segment]) -> torch.Tensor:
                if target.length(segments[0].slot):  # else a prompt
                    self.steps += 1
                    for _ in range(count if self.steps <= 3 else 1000):
                        allowed.release()
                        in_time = self.steps > 3 or done.acquire(timeout=60)
                        assert in_time, "the drafter does not work while the target does"
                return super()._run(segments)

        class Drafter(EmulatedBatchRunner):
            def _run(drafter, segments: Sequence[Segment]) -> torch.Tensor:
                assert allowed.acquire(timeout=60)
                self.rows.append(len(segments))
                done.release()
                return super()._run(segments)

        self.collected = ahead_of([Drafter(spec(), SLOTS)], drafting([6], min_drafts=0), target=Target(spec(), SLOTS))


def test_a_drafter_drafts_on_while_the_target_computes() -> None:
    meeting = Meeting(2)
    begin(meeting.collected, 1)
    assert meeting.collected.run() == {0: expected(0)}
    assert meeting.steps > 3
    close(meeting.collected)


def test_one_forward_of_the_drafter_serves_all() -> None:
    meeting = Meeting(1)
    begin(meeting.collected, 8)
    assert meeting.collected.run() == {number: expected(number) for number in range(8)}
    assert meeting.rows[:3] == [8, 8, 8]
    close(meeting.collected)


def test_a_target_waits_for_as_many_drafts_as_the_plan_says() -> None:
    collected = ahead_of(runners([1.0]), drafting([4], min_drafts=4))
    begin(collected, 1, tokens=21)
    collected.run()
    close(collected)
    assert collected.steps == 1 + 20 // 5


def test_a_target_that_does_not_wait_decodes_by_itself() -> None:
    """A drafter that hangs in its first forward holds nobody up."""
    lets_go = threading.Event()

    class Hangs(EmulatedBatchRunner):
        def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
            lets_go.wait(60)
            return super()._run(segments)

    collected = ahead_of([Hangs(spec(), SLOTS)], drafting([4], min_drafts=0))
    begin(collected, 2)
    assert collected.run() == {number: expected(number) for number in range(2)}
    lets_go.set()
    close(collected)


def test_what_drafters_do_is_counted_for_each_request() -> None:
    collected = ahead_of(runners([0.7, 1.0]), drafting([3, 4]))
    begin(collected, 2, tokens=40)
    forwards: dict[tuple[int, str], int] = {}
    while collected.pipeline.has_work:
        for served in collected.pipeline.step().served:
            for stats in served.drafters:
                key = served.request, stats.name
                forwards[key] = forwards.get(key, 0) + stats.forwards
    close(collected)
    assert set(forwards) == {(number, name) for number in range(2) for name in ("d0", "d1")}
    assert all(forwards.values())


def test_short_memory_is_said_by_the_pipelines_thread() -> None:
    said: list[threading.Thread] = []
    collected = pipeline_of([ShortOfMemory(spec(), SLOTS)], drafting([4]))
    collected.pipeline.maker.drafters["d0"].fell_short = lambda: said.append(threading.current_thread())
    collected.pipeline.maker.retune(drafting([4], ahead=True))
    begin(collected, 6, tokens=60)
    assert collected.run() == {number: expected(number, 60) for number in range(6)}
    close(collected)
    assert said
    assert set(said) == {threading.current_thread()}


def test_the_pipeline_says_that_it_waits_and_drafters_that_they_begin_only_while_it_does() -> None:
    """A worker that computes for longer than it should is taken for hung, also while it waits for a drafter."""
    told: list[tuple[str, bool]] = []
    collected = pipeline_of(runners([1.0, 1.0]), drafting([6, 6]))
    waiting = threading.Event()
    for name, drafter in collected.pipeline.maker.drafters.items():
        drafter.about_to_compute = lambda _, name=name: told.append((name, waiting.is_set()))  # type: ignore[misc]
    maker = collected.pipeline.maker
    maker.retune(drafting([6, 6], ahead=True, min_drafts=2))
    draft = maker.draft

    def watched(*args: Any) -> Any:
        waiting.set()
        found = draft(*args)
        waiting.clear()
        return found

    maker.draft = watched  # type: ignore[method-assign]
    begin(collected, 1, tokens=80)
    assert collected.run() == {0: expected(0, 80)}
    close(collected)
    assert {name for name, _ in told} == {"d0", "d1"}
    assert all(while_waiting for _, while_waiting in told)


def test_a_drafter_that_fails_is_left_out_and_the_rest_of_the_chain_goes_on() -> None:
    for failing in range(2):
        drafters = [EmulatedBatchRunner(spec(1.0, fail_after=4 if n == failing else None), SLOTS) for n in range(2)]
        collected = ahead_of(drafters, drafting([3, 4]))
        lost: list[str] = []
        collected.pipeline.maker.failed = lambda key, name, error, lost=lost: lost.append(name)  # type: ignore[misc]
        begin(collected, 3)
        assert collected.run() == {number: expected(number) for number in range(3)}
        assert lost == [f"d{failing}"]
        assert collected.pipeline.maker.names == [f"d{1 - failing}"]
        close(collected)


class Counting(EmulatedBatchRunner):
    """Counts rows, and sees whether anybody interferes with a forward."""

    def __init__(self, agreement: float = 1.0) -> None:
        super().__init__(spec(agreement, ms={1: 4}), SLOTS)
        self.rows, self.threads = 0, 0
        self._computing = False

    def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
        self._computing = True
        self.rows += sum(len(segment.ids) for segment in segments)
        found = super()._run(segments)
        self._computing = False
        return found

    def set_threads(self, threads: int) -> None:
        assert not self._computing, "it computes"
        self.threads = threads


def test_windows_and_threads_change_between_forwards_without_reading_texts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_up = Ahead.set_up

    def checked(stage: Ahead, *args: Any, **options: Any) -> None:
        assert not stage._computing
        set_up(stage, *args, **options)

    monkeypatch.setattr(Ahead, "set_up", checked)
    drafters = [Counting(), Counting()]
    collected = ahead_of(drafters, drafting([3, 4]))
    maker = collected.pipeline.maker
    for number in range(2):
        prompt = prompt_of(number, length=60)
        collected.pipeline.begin(request(number, prompt, vocab=EMULATED_VOCAB, max_new_tokens=400))
    for _ in range(10):
        collected.step()
    read = [drafter.rows for drafter in drafters]
    for turn in range(1, 20):
        for place, key in enumerate(maker.drafters):
            maker.set_threads(key, turn + place)
        collected.step()
        maker.retune(drafting([1 + turn % 5, 1 + turn % 7], ahead=True))
        collected.step()
    assert [drafter.threads for drafter in drafters] == [19, 20]
    for before, drafter in zip(read, drafters, strict=True):
        assert drafter.rows - before < 800, "both prompts have been read anew, more than once"
    collected.run()
    assert collected.output == {number: expected(number, 400, 60) for number in range(2)}
    close(collected)


def test_who_leaves_leaves_every_stage() -> None:
    collected = ahead_of(runners([0.8, 1.0]), drafting([3, 4]))
    drafters = list(collected.pipeline.maker.drafters.values())
    begin(collected, 6)
    collected.run()
    until(lambda: not any(drafter._seats for drafter in drafters))
    close(collected)


def test_an_ngram_before_a_drafter_is_not_that_before_the_target_and_changes_with_the_plan() -> None:
    made: list[tuple[str, threading.Thread]] = []

    def maker_of(name: str) -> Callable[[], NgramDrafter]:
        def make() -> NgramDrafter:
            made.append((name, threading.current_thread()))
            return NgramDrafter(NgramOptions(gate=False))

        return make

    config = drafting([4], ngram=3, ahead=True)
    collected = pipeline_of(runners([1.0]), config)
    begin(collected, 1, tokens=120)
    for name in ("old", "new"):
        collected.pipeline.configure(config, maker_of(name), maker_of(f"{name}, apart"))
        for _ in range(5):
            collected.step()
    collected.run()
    close(collected)
    mine = threading.current_thread()
    assert {name for name, thread in made if thread is not mine} == {"old, apart", "new, apart"}
    assert not {name for name, thread in made if thread is mine} & {"old, apart", "new, apart"}


def test_a_plan_in_async_mode_has_its_drafters_work_ahead() -> None:
    chain = [
        {"model": "ngram", "window": 5},
        {"model": "a", "window": 4},
        {"model": "b", "window": 6, "min_drafts": 3},
        {"model": "c", "min_drafts": 2, "when_short": "step"},
    ]
    config = DraftingConfig.of(Plan.parse({"chain": chain, "mode": "async"}))
    assert config.ahead
    assert [(each.fed_window, each.window, each.min_drafts) for each in config.neural] == [(5, 4, 3), (4, 6, 0)]
    assert not DraftingConfig.of(Plan.parse({"chain": chain[:1] + chain[2:], "mode": "lockstep"})).ahead
