"""The watch sees every token of a request, however seldom it looks; requests that ran side by side count once."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from autopipe.core.request import RequestHandle, TokenBlock
from autopipe.core.sampling import SamplingParams
from autopipe.envs.stream import Block
from autopipe.policies.engine_watch import EngineWatch


@dataclass
class Scripted:
    """An engine in which things happen when a test says so."""

    running: RequestHandle | None = None
    recent: list[RequestHandle] = field(default_factory=list)
    factor: float = 1.0

    def load_factor(self) -> float:
        return self.factor

    def begin(self, at_s: float) -> RequestHandle:
        handle = RequestHandle(
            len(self.recent) + 1,
            [1, 2, 3],
            SamplingParams(max_new_tokens=64),
            (),
            None,
            False,
            lambda _: None,
        )
        handle.submitted_s = handle.begun_s = at_s
        self.recent.append(handle)
        self.running = self.running or handle
        return handle

    def emit(self, handle: RequestHandle, num_tokens: int, at_s: float) -> None:
        handle.put_tokens(TokenBlock([7] * num_tokens))
        handle.last_token_s = at_s
        if handle.num_tokens == num_tokens:
            handle.first_token_s = at_s

    def end(self, handle: RequestHandle) -> None:
        handle.ended = True
        self.running = None if handle is self.running else self.running


def figures(blocks: list[Block]) -> list[tuple[int, float]]:
    return [(block.num_tokens, round(block.since_s, 6)) for block in blocks]


def test_a_request_is_told_token_by_token_and_its_tail_after_it_ended() -> None:
    engine = Scripted()
    watch = EngineWatch(engine)  # type: ignore[arg-type]  # has what a watch looks at
    handle = engine.begin(1.0)
    assert watch.poll() == []
    engine.emit(handle, 1, 1.5)
    assert figures(watch.poll()) == [(1, 0.5)]
    engine.emit(handle, 4, 1.9)
    assert figures(watch.poll()) == [(4, 0.4)]
    engine.emit(handle, 2, 2.0)
    engine.end(handle)
    assert figures(watch.poll()) == [(2, 0.1)]
    assert watch.poll() == []


def test_requests_that_began_and_ended_between_two_looks_are_not_missed() -> None:
    engine = Scripted()
    watch = EngineWatch(engine)  # type: ignore[arg-type]  # has what a watch looks at
    for begun_s in (1.0, 2.0):
        handle = engine.begin(begun_s)
        engine.emit(handle, 1, begun_s + 0.2)
        handle.put_tokens(TokenBlock([7] * 9))
        handle.last_token_s = begun_s + 0.5
        engine.end(handle)
    later = engine.begin(3.0)
    engine.emit(later, 1, 3.1)

    assert figures(watch.poll()) == [(1, 0.2), (9, 0.3), (1, 0.2), (9, 0.3), (1, 0.1)]
    assert watch.poll() == []


def test_what_came_before_is_not_told() -> None:
    engine = Scripted()
    handle = engine.begin(1.0)
    engine.emit(handle, 1, 1.5)
    engine.end(handle)
    watch = EngineWatch(engine)  # type: ignore[arg-type]  # has what a watch looks at
    assert watch.poll() == []
    later = engine.begin(2.0)
    engine.emit(later, 1, 2.5)
    engine.end(later)
    assert figures(watch.poll()) == [(1, 0.5)]
    assert watch.poll() == []


def test_the_request_that_runs_is_followed_though_many_have_begun_since() -> None:
    engine = Scripted()
    watch = EngineWatch(engine)  # type: ignore[arg-type]  # has what a watch looks at
    running = engine.begin(1.0)
    engine.recent.clear()
    engine.emit(running, 1, 1.5)
    assert figures(watch.poll()) == [(1, 0.5)]
    engine.emit(running, 3, 1.8)
    assert figures(watch.poll()) == [(3, 0.3)]


def test_of_requests_side_by_side_one_stands_for_all() -> None:
    engine = Scripted(factor=2.0)
    watch = EngineWatch(engine)  # type: ignore[arg-type]  # has what a watch looks at
    first, beside = engine.begin(1.0), engine.begin(1.1)
    engine.emit(first, 1, 1.2)
    engine.emit(beside, 1, 1.2)
    watch.poll()
    for handle in (first, beside):
        handle.put_tokens(TokenBlock([7] * 4))
        handle.last_token_s = 2.0
        engine.end(handle)

    assert figures(watch.poll()) == [(4, 0.4)]


@pytest.mark.parametrize("ended", [True, False])
def test_a_request_that_gave_no_token_tells_nothing(ended: bool) -> None:
    engine = Scripted()
    watch = EngineWatch(engine)  # type: ignore[arg-type]  # has what a watch looks at
    handle = engine.begin(1.0)
    if ended:
        engine.end(handle)

    assert watch.poll() == []
