"""The process of a shared target: `python -m autopipe.core.shared.worker`, started by the engine, not by hand."""

from __future__ import annotations

from autopipe.core.board import Board
from autopipe.core.channel import Channel, Doorbell
from autopipe.core.shared.server import SharedServer
from autopipe.core.worker_process import run_worker

_HEAVY = (
    "transformers.models.auto.configuration_auto",
    "transformers.activations",  # what any model's config imports, and slow
    "autopipe.core.backends.fused_batch_native",
    "autopipe.core.shared.pipeline",
)


def serve(channel: Channel, board: Board, slot: int, _: list[Doorbell]) -> None:
    SharedServer(channel, board.slot(slot)).run()


if __name__ == "__main__":
    run_worker(serve, _HEAVY)
