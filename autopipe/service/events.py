"""What happens to the pipeline, for whoever listens: plan changes, acceptance, faults."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from autopipe.service import sse
from autopipe.service.errors import ApiError

_KEPT = 64
_BUFFERED = 256


@dataclass(frozen=True, slots=True)
class Event:
    """`kind` is plan, acceptance, worker, drafters or service; `data` is a JSON object with `time` in seconds."""

    number: int
    kind: str
    data: dict[str, Any]


class EventHub:
    """Hands events to any number of streams; publishing never waits. A stream that cannot keep up loses the oldest.

    Args:
        max_streams: open streams at a time.
    """

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._numbers = itertools.count(1)
        self._gate = threading.Lock()
        self._kept: deque[Event] = deque(maxlen=_KEPT)  # without the acceptance of every interval
        self._streams: dict[asyncio.Queue[Event | None], asyncio.AbstractEventLoop] = {}
        self._closed = False

    def publish(self, kind: str, data: dict[str, Any]) -> None:
        """Tell everybody; from any thread."""
        with self._gate:
            event = Event(next(self._numbers), kind, {"time": round(time.time(), 3), **data})
            if kind != "acceptance":
                self._kept.append(event)
            for queue, loop in list(self._streams.items()):
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    loop.call_soon_threadsafe(_put, queue, event)

    def recent(self) -> list[Event]:
        """The last events, acceptance left out."""
        with self._gate:
            return list(self._kept)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def close(self) -> None:
        """End all streams."""
        with self._gate:
            self._closed = True
            for queue, loop in list(self._streams.items()):
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_put, queue, None)

    def subscribe(self, after: int | None = None) -> EventStream:
        """A stream that begins with those kept that came later than number `after`; `close` it in the end.

        Raises:
            ApiError: too many streams are open.
        """
        queue: asyncio.Queue[Event | None] = asyncio.Queue(_BUFFERED)
        with self._gate:
            if len(self._streams) >= self._max_streams:
                raise ApiError(
                    429,
                    f"{self._max_streams} event streams are open already",
                    kind="rate_limit_error",
                    code="too_many_streams",
                    headers={"Retry-After": "10"},
                )
            for event in self._kept:
                if after is not None and event.number > after:
                    queue.put_nowait(event)
            if self._closed:
                queue.put_nowait(None)
            self._streams[queue] = asyncio.get_running_loop()
        return EventStream(self, queue)

    def unsubscribe(self, queue: asyncio.Queue[Event | None]) -> None:
        """Forget a stream."""
        with self._gate:
            self._streams.pop(queue, None)


class EventStream:
    """The bytes of one listener's server-sent events."""

    def __init__(self, hub: EventHub, queue: asyncio.Queue[Event | None]) -> None:
        self._hub = hub
        self._queue = queue

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b": autopipe events\n\n"
        while True:
            try:
                event = await asyncio.wait_for(self._queue.get(), sse.KEEP_ALIVE_S)
            except TimeoutError:
                yield sse.KEEP_ALIVE
                continue
            if event is None:
                return
            yield sse.event(event.data, name=event.kind, number=event.number)

    def close(self) -> None:
        self._hub.unsubscribe(self._queue)


def _put(queue: asyncio.Queue[Event | None], event: Event | None) -> None:
    """Runs in the stream's own loop. One that does not take its events loses the oldest, and its end is not lost."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)
