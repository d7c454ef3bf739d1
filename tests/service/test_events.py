"""The stream of events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from autopipe.service.errors import ApiError
from autopipe.service.events import EventHub


def parsed(chunk: bytes) -> dict[str, Any]:
    fields = dict(line.split(": ", 1) for line in chunk.decode().strip().splitlines())
    return {"name": fields["event"], "id": int(fields["id"]), **json.loads(fields["data"])}


def test_a_listener_hears_what_happens_after_it_came_until_the_end() -> None:
    async def listen() -> list[dict[str, Any]]:
        hub = EventHub(2)
        hub.publish("plan", {"n": 1})
        stream = hub.subscribe()
        hub.publish("plan", {"n": 2})
        hub.publish("acceptance", {"n": 3})
        hub.close()
        return [parsed(chunk) async for chunk in stream if chunk.startswith(b"event")]

    heard = asyncio.run(listen())
    assert [(event["name"], event["n"]) for event in heard] == [("plan", 2), ("acceptance", 3)]
    assert heard[1]["id"] > heard[0]["id"]


def test_one_that_comes_back_hears_what_it_missed() -> None:
    async def listen() -> list[int]:
        hub = EventHub(2)
        for number in (1, 2, 3):
            hub.publish("plan", {"n": number})
        hub.close()
        return [parsed(chunk)["n"] async for chunk in hub.subscribe(after=1) if chunk.startswith(b"event")]

    assert asyncio.run(listen()) == [2, 3]


def test_a_slow_listener_loses_the_oldest_and_still_ends() -> None:
    async def listen() -> list[int]:
        hub = EventHub(2)
        stream = hub.subscribe()
        for number in range(1000):
            hub.publish("acceptance", {"n": number})
        hub.close()
        await asyncio.sleep(0)
        return [parsed(chunk)["n"] async for chunk in stream if chunk.startswith(b"event")]

    heard = asyncio.run(listen())
    assert 0 < len(heard) < 1000
    assert heard[-1] == 999


def test_streams_are_bounded_and_freed() -> None:
    async def listen() -> None:
        hub = EventHub(1)
        stream = hub.subscribe()
        with pytest.raises(ApiError) as caught:
            hub.subscribe()
        assert caught.value.status == 429
        stream.close()
        assert hub.num_streams == 0
        hub.subscribe()

    asyncio.run(listen())
