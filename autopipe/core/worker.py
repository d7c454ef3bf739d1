"""The process of one stage: `python -m autopipe.core.worker`, started by the engine.

It obeys the engine's messages between steps and otherwise runs its stage's loop, asleep while there is nothing
to do. It dies with its parent, and it says so every 0.1 s that it lives.
"""

from __future__ import annotations

from autopipe.core.board import Board
from autopipe.core.channel import Channel, Doorbell
from autopipe.core.stage_server import StageServer
from autopipe.core.worker_process import run_worker

_HEAVY = (
    "transformers.models.auto.configuration_auto",
    "transformers.activations",  # what any model's config imports, and slow
    "autopipe.core.backends.fused",
    "autopipe.core.stage",
)


def serve(channel: Channel, board: Board, slot: int, bells: list[Doorbell]) -> None:
    StageServer(channel, board, slot, bells).run()


if __name__ == "__main__":
    run_worker(serve, _HEAVY)
