"""LoRA beside the weights it adapts, in the form the kernels read: see Adapter in kernels/model.h."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopipe.core.backends.packed_arena import Arena
from autopipe.core.kernels.native import LANES
from autopipe.core.kernels.packing import pack_matrix, pack_pair, packed_shape
from autopipe.core.kernels.structs import AdapterAddresses
from autopipe.core.models.adapters import LowRank


@dataclass(frozen=True)
class Adapted:
    """The matrices that one product of a layer is made of, and what LoRA adds to them.

    Attributes:
        modules: their names within the layer.
        outputs: of each.
        by_turns: the product has their blocks by turns, else one matrix after another.
    """

    modules: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    by_turns: bool = False

    def put(self, arena: Arena, adapters: Mapping[str, LowRank], layer: str, dtype: torch.dtype) -> AdapterAddresses:
        """Pack what `adapters` has for the modules of `layer` (`model.layers.3.`)."""
        parts = [adapters.get(layer + module) for module in self.modules]
        ranks = [len(part.down) for part in parts if part is not None]
        if not ranks:
            return AdapterAddresses()
        width = max(ranks) + max(ranks) % 2
        down = torch.cat([_padded(None if part is None else part.down, width, self.inputs) for part in parts])
        ups = [
            _padded(None if part is None else (part.scale * part.up.float()).T, width, outputs).T
            for part, outputs in zip(parts, self.outputs, strict=True)
        ]
        rank = len(down)
        if self.by_turns:
            first = [index * width for _ in range(-(-self.outputs[0] // LANES)) for index in range(len(parts))]
            shape = packed_shape(2 * -(-self.outputs[0] // LANES) * LANES, width, dtype)
            gate, up = (part.to(dtype) for part in ups)
            up_address = arena.fill(shape, dtype, lambda room: pack_pair(gate, up, room))
        else:
            if any(outputs % LANES for outputs in self.outputs[:-1]):  # blocks that belong to two matrices read all
                whole: torch.Tensor = torch.block_diag(*ups)  # type: ignore[no-untyped-call]  # untyped in torch
                width, first = rank, [0] * -(-sum(self.outputs) // LANES)
            else:
                whole = torch.cat(ups)
                blocks = [-(-outputs // LANES) for outputs in self.outputs]
                first = [index * width for index, count in enumerate(blocks) for _ in range(count)]
            shape = packed_shape(len(whole), width, dtype)
            up_address = arena.fill(shape, dtype, lambda room: pack_matrix(whole.to(dtype), room))
        shape = packed_shape(rank, self.inputs, dtype)
        down_address = arena.fill(shape, dtype, lambda room: pack_matrix(down.to(dtype), room))
        first_address = arena.put((len(first),), torch.int32, lambda: torch.tensor(first, dtype=torch.int32))
        return AdapterAddresses(down_address, up_address, first_address, rank, width)


def _padded(rows: torch.Tensor | None, count: int, columns: int) -> torch.Tensor:
    """fp32 [count, columns]: the rows, then zeros."""
    padded = torch.zeros(count, columns, dtype=torch.float32)
    if rows is not None:
        padded[: len(rows)] = rows
    return padded
