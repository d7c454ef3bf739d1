"""One neural drafter that works ahead of its consumer, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from autopipe.core.backends.batch import BatchRunner, Segment
from autopipe.core.backends.emulated_batch import EmulatedBatchRunner
from autopipe.core.plan import Warmup
from autopipe.core.shared.ahead import Ahead, Watch
from autopipe.core.shared.neural import SharedDrafter, Want
from autopipe.core.shared.options import SharingOptions
from autopipe.core.shared.sequence import SharedRequest
from tests.core.shared.neural_scenes import (
    EMULATED_VOCAB,
    SLOTS,
    drafting,
    expected,
    prompt_of,
    spec,
    threads_end,
    until,
)
from tests.core.shared.requests import request


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    threads_end(before)


def one_stage(runner: BatchRunner, *, max_lanes: int = 8, window: int = 4, warmup: Warmup | None = None) -> Ahead:
    drafter = SharedDrafter("d0", runner, SharingOptions())
    stage = Ahead(drafter, max_lanes, Watch())
    stage.set_up(None, drafting([window]).neural[0], warmup or Warmup(), is_last=True)
    return stage


def held(number: int) -> SharedRequest:
    return request(number, prompt_of(number), vocab=EMULATED_VOCAB, max_new_tokens=200)


def test_what_was_decided_is_drafted_on_from_before_anybody_asks() -> None:
    stage = one_stage(EmulatedBatchRunner(spec(), SLOTS))
    one, text = held(0), expected(0, 60)
    assert stage.draft([Want(one, [], 4)])[0][:1] == text[:1]
    one.tokens += text[:20]
    stage.settle(one, len(one.tokens))
    until(lambda: stage._lanes[0].drafts == text[20:24])
    stage.stop()


def test_the_window_opens_as_the_plans_warmup_says() -> None:
    warmup = Warmup.parse({"kind": "progressive", "start_window": 1, "double_every": 10})
    stage = one_stage(EmulatedBatchRunner(spec(), SLOTS), window=4, warmup=warmup)
    one, text = held(0), expected(0, 60)
    for done, window in ((0, 1), (10, 2), (20, 4)):
        one.tokens[5:] = text[:done]
        stage.draft([Want(one, [], 4)])
        until(lambda done=done, window=window: stage._lanes[0].drafts == text[done : done + window])  # type: ignore[misc]
        time.sleep(0.02)
        assert len(stage._lanes[0].drafts) == window
    stage.stop()


def test_whoever_has_fewest_drafts_is_served_first_and_no_more_at_once_than_may_be() -> None:
    served: list[list[int]] = []
    go = threading.Semaphore(0)

    class Noted(EmulatedBatchRunner):
        def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
            assert go.acquire(timeout=60)
            served.append([segment.slot for segment in segments])
            return super()._run(segments)

    stage = one_stage(Noted(spec(), SLOTS), max_lanes=1, window=3)
    stage._min_drafts = 0
    requests = [held(0), held(1)]
    stage.draft([Want(each, [], 3) for each in requests])
    for _ in range(6):
        go.release()
    until(lambda: all(len(stage._lanes[number].drafts) == 3 for number in range(2)))
    assert served == [[0], [1]] * 3
    stage.stop()
