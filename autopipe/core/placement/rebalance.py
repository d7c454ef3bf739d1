"""Moving layers of a stage to a neighbour's device, where that is predicted to be faster.

The PipeSpec document's dynamic balance: when a stage is the bottleneck, some of its layers move to the device of the
stage before or after it. One sequence's layers run one after another, so this helps where that device is faster, or
where the stage's own one is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopipe.core.placement.hardware import Device
from autopipe.core.placement.latency import Part
from autopipe.core.placement.place import Placement, StagePlacement

Speed = Callable[[Placement], float]
"""Predicted output tokens a second of a placement."""

MIN_GAIN = 0.02
"""A move must promise at least this much: predictions are a few percent off."""
_MAX_MOVES = 6
_FRACTIONS = (0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class LayerMove:
    """Layers that changed device. `predicted_gain`: of the speed, 0.1 is 10%."""

    stage: str
    num_layers: int
    source: str
    destination: str
    predicted_gain: float

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers of {self.stage} from {self.source} to {self.destination}: "
            f"{self.predicted_gain:.0%} faster by prediction"
        )


def rebalance(placement: Placement, speed: Speed) -> tuple[Placement, list[LayerMove]]:
    """Make the moves that are predicted to pay, best first, until none pays any more.

    Args:
        speed: predicts; called for some ten to a hundred placements.
    """
    moves: list[LayerMove] = []
    current = speed(placement)
    for _ in range(_MAX_MOVES):
        options = [(speed(moved), moved, move) for moved, move in possible_moves(placement)]
        if not options:
            break
        best, moved, move = max(options, key=lambda option: option[0])
        if best < current * (1 + MIN_GAIN):
            break
        moves.append(replace(move, predicted_gain=best / current - 1))
        placement, current = moved, best
    moves = _merged(moves)
    return replace(placement, notes=(*placement.notes, *(f"moved {move}" for move in moves))), moves


def _merged(moves: list[LayerMove]) -> list[LayerMove]:
    """Moves along the same way as one."""
    merged: dict[tuple[str, str, str], LayerMove] = {}
    for move in moves:
        way = (move.stage, move.source, move.destination)
        if (before := merged.get(way)) is not None:
            gain = (1 + before.predicted_gain) * (1 + move.predicted_gain) - 1
            move = replace(move, num_layers=before.num_layers + move.num_layers, predicted_gain=gain)
        merged[way] = move
    return list(merged.values())


def possible_moves(placement: Placement) -> Iterator[tuple[Placement, LayerMove]]:
    """Every way to move some layers of a stage from one of its devices to a neighbour's, or to an empty one."""
    empty = [device for device in placement.hardware.devices if placement.used(device) == 0]
    for index, stage in enumerate(placement.stages):
        near = placement.stages[max(0, index - 1) : index + 2]
        around = [part.device for other in near for part in other.parts] + empty[:1]
        for part in stage.parts:
            for name in dict.fromkeys(device.name for device in around if device.name != part.device.name):
                destination = placement.hardware.device(name)
                for count in sorted({max(1, round(part.num_layers * fraction)) for fraction in _FRACTIONS}):
                    moved = _move(placement, stage, part.device, destination, count)
                    if not moved.overfull():
                        yield moved, LayerMove(stage.name, count, part.device.name, name, 0.0)


def _move(placement: Placement, stage: StagePlacement, source: Device, destination: Device, count: int) -> Placement:
    """`count` layers from one device to another, each device's layers staying consecutive."""
    counts: dict[str, int] = {}
    for part in stage.parts:
        counts[part.device.name] = counts.get(part.device.name, 0) + part.num_layers
    counts[source.name] -= count
    counts[destination.name] = counts.get(destination.name, 0) + count
    devices = [device for device in placement.hardware.devices if counts.get(device.name)]
    parts = tuple(Part(device, counts[device.name]) for device in devices)
    stages = tuple(replace(each, parts=parts) if each is stage else each for each in placement.stages)
    return replace(placement, stages=stages)
