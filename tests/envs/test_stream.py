"""The background stream of requests."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from autopipe.core.engine import Engine
from autopipe.core.errors import AutoPipeError
from autopipe.core.sampling import SamplingParams
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.stream import Block, GenerationStream, LiveRequest, RequestEnd
from tests.envs.scenes import emulated_plan


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(emulated_plan()) as engine:
        yield engine


def requests(count: int, tokens: int = 20, token_id: int = 1) -> Iterator[LiveRequest]:
    for _ in range(count):
        yield LiveRequest((token_id,), PromptKind.CHAT, SamplingParams(max_new_tokens=tokens))


def stream(engine: Engine, items: Iterator[LiveRequest], most_ahead: int = 1000) -> GenerationStream:
    return GenerationStream(engine, items, (), most_ahead)


def wait_until_ahead(running: GenerationStream, num_tokens: int) -> None:
    deadline = time.monotonic() + 20
    while running.num_ahead < num_tokens and time.monotonic() < deadline:
        time.sleep(0.01)


def test_blocks_come_in_order_and_each_request_ends(engine: Engine) -> None:
    running = stream(engine, requests(2))
    items = running.take(1000, 10)
    assert running.finished
    blocks = [item for item in items if isinstance(item, Block)]
    assert sum(block.num_tokens for block in blocks) == 40
    assert [block.number for block in blocks] == sorted(block.number for block in blocks)
    assert [item.number for item in items if isinstance(item, RequestEnd)] == [0, 1]
    assert [block.position for block in blocks if block.is_first] == [1, 1]


def test_taking_returns_what_has_come_since_the_last_time(engine: Engine) -> None:
    running = stream(engine, requests(1, 60))
    counts = []
    while not running.finished and len(counts) < 60:
        counts.append(sum(item.num_tokens for item in running.take(10, 10) if isinstance(item, Block)))
    assert sum(counts) == 60
    assert all(count >= 10 for count in counts[:-1])


def test_from_now_does_not_count_what_is_there(engine: Engine) -> None:
    running = stream(engine, requests(1, 1000))
    wait_until_ahead(running, 20)
    ahead = running.num_ahead
    taken = running.take(10, 10, from_now=True)
    running.stop()
    assert sum(item.num_tokens for item in taken if isinstance(item, Block)) >= ahead + 10


def test_it_does_not_run_away_from_its_reader(engine: Engine) -> None:
    running = stream(engine, requests(50), most_ahead=30)
    wait_until_ahead(running, 30)
    time.sleep(0.3)  # as long as it takes to run away
    assert 30 <= running.num_ahead < 30 + 20
    running.stop()


def test_a_reader_that_wants_more_than_that_gets_it(engine: Engine) -> None:
    running = stream(engine, requests(50), most_ahead=10)
    taken = running.take(100, 10)
    running.stop()
    assert sum(item.num_tokens for item in taken if isinstance(item, Block)) >= 100


def test_stopping_frees_the_engine(engine: Engine) -> None:
    running = stream(engine, requests(1, 100_000))
    running.take(5, 10)
    running.stop()
    outcome = engine.submit([1], SamplingParams(max_new_tokens=4)).outcome()
    assert outcome.finish_reason == "length"


def test_an_error_ends_the_stream_and_is_kept(engine: Engine) -> None:
    running = stream(engine, requests(1, token_id=10**6))
    assert running.take(10, 10) == []
    assert running.error is not None
    assert "prompt" in str(running.error)


def test_waiting_for_a_token_that_does_not_come_is_an_error(engine: Engine) -> None:
    def slow() -> Iterator[LiveRequest]:
        time.sleep(1)
        yield from requests(1)

    running = stream(engine, slow())
    with pytest.raises(AutoPipeError, match=r"0\.1 s"):
        running.take(10, 0.1)
    running.stop()
