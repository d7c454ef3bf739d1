"""Runs the choices of one request side by side, for a stream or for one answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from autopipe.service import sse
from autopipe.service.answers import Answer, FinishedChoice, Shape, Usage
from autopipe.service.errors import from_engine
from autopipe.service.generation import Choice, Delta

Item = tuple[int, Delta | BaseException | None]


async def merged(choices: Sequence[Choice], idle_s: float) -> AsyncGenerator[Item, None]:
    """Deltas of all choices as they come, with their choice's number; `(-1, None)` after `idle_s` without any.

    Closing the iterator cancels what is not finished. An error of a choice comes as an item and is the last.
    """
    items: asyncio.Queue[Item] = asyncio.Queue()

    async def pump(index: int, choice: Choice) -> None:
        try:
            async for delta in choice.deltas():
                items.put_nowait((index, delta))
        except Exception as error:
            items.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, choice)) for index, choice in enumerate(choices)]
    num_open = len(choices)
    try:
        while num_open:
            try:
                item = items.get_nowait() if not items.empty() else await asyncio.wait_for(items.get(), idle_s)
            except TimeoutError:
                yield -1, None
                continue
            yield item
            if isinstance(item[1], BaseException):
                return
            num_open -= item[1] is not None and item[1].finish_reason is not None
    finally:
        for task in tasks:
            task.cancel()
        for choice in choices:
            choice.discard()


async def collect(choices: Sequence[Choice], answer: Answer, prompt_tokens: int) -> dict[str, object]:
    """The whole answer.

    Raises:
        ApiError: the engine failed.
    """
    finished = [FinishedChoice() for _ in choices]
    async with contextlib.aclosing(merged(choices, 3600.0)) as items:
        async for index, item in items:
            if isinstance(item, BaseException):
                raise from_engine(item)
            if item is not None:
                finished[index].add(item)
    return answer.whole(finished, Usage(prompt_tokens, sum(len(choice.token_ids) for choice in finished)))


async def stream(
    choices: Sequence[Choice], answer: Answer, shape: Shape, prompt_tokens: int, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events: text as it comes, one finish chunk a choice, perhaps the usage, `[DONE]`.

    A failure comes as an event with an `error`, and ends the stream.
    """
    for index in range(len(choices)):
        opening = shape.opening(index)
        if opening is not None:
            yield sse.event(answer.chunk([opening]))
    num_tokens = 0
    async with contextlib.aclosing(merged(choices, sse.KEEP_ALIVE_S)) as items:
        async for index, item in items:
            if isinstance(item, BaseException):
                yield sse.event(from_engine(item).body())
                return
            if item is None:
                yield sse.KEEP_ALIVE
                continue
            num_tokens += len(item.token_ids)
            if item.text or item.logprobs:
                yield sse.event(answer.chunk([shape.piece(index, item)]))
            if item.finish_reason is not None:
                yield sse.event(answer.chunk([shape.ending(index, item.finish_reason)]))
    if include_usage:
        yield sse.event(answer.chunk([], Usage(prompt_tokens, num_tokens)))
    yield sse.DONE
