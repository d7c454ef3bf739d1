"""What has to travel when layers move to another device: weights, and those KV entries that are not there yet.

A cache entry never changes once its token is accepted, so a copy that stayed behind on a device stays right up to the
position to which the sequence has been the same since. Layers that move back and forth therefore send only what has
been added in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopipe.core.errors import ConfigError


class KvLedger:
    """Up to which position each device holds right KV entries of each layer.

    Args:
        home: the device of each layer at the start.
    """

    def __init__(self, home: Sequence[str]) -> None:
        self._home = list(home)
        self._valid: list[dict[str, int]] = [{device: 0} for device in home]

    @property
    def home(self) -> tuple[str, ...]:
        """The device of each layer now."""
        return tuple(self._home)

    def appended(self, length: int) -> None:
        """The sequence is `length` tokens long now; new entries are where the layers are."""
        for device, valid in zip(self._home, self._valid, strict=True):
            valid[device] = length

    def rolled_back(self, length: int) -> None:
        """Positions from `length` on are no longer right anywhere."""
        for valid in self._valid:
            for device in valid:
                valid[device] = min(valid[device], length)

    def missing(self, layer: int, device: str) -> range:
        """Positions of a layer's entries that `device` lacks."""
        valid = self._valid[layer]
        return range(valid.get(device, 0), valid[self._home[layer]])

    def move(self, layer: int, device: str) -> range:
        """Move a layer; the positions whose entries must be copied to `device` for it."""
        if not 0 <= layer < len(self._home):
            raise ConfigError("layer", layer, f"0 to {len(self._home) - 1}")
        positions = self.missing(layer, device)
        self._valid[layer][device] = positions.stop
        self._home[layer] = device
        return positions


class MovableCache:
    """Keys and values of each layer on its own device, with copies that stay behind when a layer moves.

    Tensors are [heads, positions, head_dim]; devices are torch's (`cuda:0`, `cpu`, `meta`).

    Attributes:
        bytes_moved: what all moves have copied between devices.
        bytes_if_whole: what copying the whole cache of every moved layer would have been.
    """

    def __init__(self, devices: Sequence[str], num_kv_heads: int, head_dim: int, capacity: int, dtype: Any) -> None:
        self._ledger = KvLedger(devices)
        self._shape = (2, num_kv_heads, capacity, head_dim)
        self._dtype = dtype
        self._copies: list[dict[str, Any]] = [{device: self._new(device)} for device in devices]
        self.length = 0
        self.bytes_moved = 0
        self.bytes_if_whole = 0

    @property
    def devices(self) -> tuple[str, ...]:
        return self._ledger.home

    def append(self, layers: Sequence[tuple[Any, Any]]) -> None:
        """Keys and values of the next positions, of every layer; each [heads, n, head_dim]."""
        added = layers[0][0].shape[1]
        end = self.length + added
        if end > self._shape[2]:
            raise ConfigError("length", end, f"at most the cache's {self._shape[2]} positions")
        for layer, (keys, values) in enumerate(layers):
            tensor = self._copies[layer][self.devices[layer]]
            tensor[0, :, self.length : end] = keys
            tensor[1, :, self.length : end] = values
        self.length = end
        self._ledger.appended(end)

    def rollback(self, length: int) -> None:
        """Forget positions from `length` on."""
        self.length = length
        self._ledger.rolled_back(length)

    def layer(self, layer: int) -> tuple[Any, Any]:
        """Keys and values of a layer, where it is; each [heads, length, head_dim]."""
        tensor = self._copies[layer][self.devices[layer]]
        return tensor[0, :, : self.length], tensor[1, :, : self.length]

    def move(self, layer: int, device: str) -> int:
        """Move a layer's cache to `device`; returns the bytes copied: of entries that were not there yet."""
        source = self._copies[layer][self.devices[layer]]
        positions = self._ledger.move(layer, device)
        copies = self._copies[layer]
        if device not in copies:
            copies[device] = self._new(device)
        per_position = 2 * self._shape[1] * self._shape[3] * int(source.element_size())
        if copies[device] is not source:
            if positions:
                new = source[:, :, positions.start : positions.stop]
                copies[device][:, :, positions.start : positions.stop] = new.to(device)
            self.bytes_if_whole += per_position * self.length
        copied = per_position * len(positions)
        self.bytes_moved += copied
        return copied

    def _new(self, device: str) -> Any:
        import torch

        return torch.zeros(self._shape, dtype=self._dtype, device=device)
