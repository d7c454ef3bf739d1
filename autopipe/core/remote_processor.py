"""A user's logits processor lives in the engine's process, the logits in a worker's: the two ends of a row's trip.

The row travels through the worker's slot on the board; messages only say that it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from autopipe.core.board import Slot
from autopipe.core.channel import Channel, Message
from autopipe.core.errors import ConfigError, RequestCancelledError

if TYPE_CHECKING:
    from autopipe.core.noise import Float32Array
    from autopipe.core.processors import CustomProcessor


def remote_processor(
    channel: Channel, slot: Slot, request: int, postpone: Callable[[Message], None]
) -> CustomProcessor:
    """The worker's end: a processor that sends each row to the engine and waits for what comes back.

    Args:
        postpone: told what else arrives while it waits, to be obeyed afterwards.

    Raises (when called):
        RequestCancelledError: the request, or the worker, was ended meanwhile.
    """

    def process(prefix: list[int], row: Float32Array) -> Float32Array:
        shared = slot.logits(row.size)
        shared[:] = row
        slot.deadline_ns = 0  # the user's own code may take its time
        channel.send({"type": "process", "request": request, "prefix": prefix, "vocab": row.size})
        while True:
            channel.wait()
            message = channel.receive()
            if message is None:
                continue
            if message["type"] == "processed" and message["request"] == request:
                return shared.copy()
            postpone(message)
            if message["type"] == "shutdown" or (message["type"] == "end" and message["request"] == request):
                raise RequestCancelledError("ended while its logits were being processed")

    return process


def process_row(slot: Slot, processor: CustomProcessor, message: Message) -> Message:
    """The engine's end: run the user's processor on the row in `slot`; the answer for the worker.

    Raises:
        ConfigError: it returned scores of another shape. And whatever the user's own code raises.
    """
    row = slot.logits(message["vocab"])
    processed = np.asarray(processor(message["prefix"], row.copy()))
    if processed.shape != row.shape:
        raise ConfigError("logits_processor", processed.shape, f"scores of shape {row.shape}")
    row[:] = processed
    return {"type": "processed", "request": message["request"]}
