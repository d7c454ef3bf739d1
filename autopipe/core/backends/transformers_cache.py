"""A KV cache for transformers models that can be rolled back to any length, whatever its layers' attention pattern.

Every attention layer keeps all its keys and values in one preallocated buffer, also where transformers would drop
those past a sliding window: the mask, which goes by position, hides them. So rolling back is forgetting a suffix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

try:
    from transformers.cache_utils import DummyLayer
except ImportError:  # releases without layers that share another's cache
    DummyLayer = ()

GROWTH = 256
"""Memory of a sequence grows by so many positions, and by an eighth at least."""


@dataclass(slots=True)
class Step:
    """What the layers must know of the forward under way; one object shared by all layers.

    Attributes:
        start: position of the forward's first row.
        keep_from, keep_to: positions whose keys and values are stored; rows outside are padding.
        num_keys: keys each row is offered (the mask hides those it may not see).
    """

    start: int = 0
    keep_from: int = 0
    keep_to: int = 0
    num_keys: int = 0


@dataclass(slots=True)
class _Copy:
    """Keys and values left on a device, right up to `length`."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int


def grown(capacity: int, num_positions: int) -> int:
    """Positions for which there is memory once `num_positions` are needed and there was memory for `capacity`."""
    if num_positions <= capacity:
        return capacity
    return -(-max(num_positions, capacity + capacity // 8) // GROWTH) * GROWTH


class RollbackLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one layer, [1, heads, capacity, head_dim] each. Positions not stored hold zeros."""

    def __init__(self, step: Step, sliding_window: int | None = None) -> None:
        super().__init__()
        self.keys: Any = None
        self.values: Any = None
        self.device: Any = None
        self.is_initialized: bool = False
        self.is_sliding: bool = sliding_window is not None
        self.sliding_window = sliding_window
        self._step = step
        self._length = 0
        self._left: dict[torch.device, _Copy] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the rows of this step that are to be kept; return the keys and values of `step.num_keys` positions."""
        return self.update_at(self._step, key_states, value_states)

    def update_at(
        self, step: Step, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `update`, for a step that is not the one under way."""
        self._reserve(step.num_keys, key_states, value_states)
        rows = slice(step.keep_from - step.start, step.keep_to - step.start)
        self.keys[:, :, step.keep_from : step.keep_to] = key_states[:, :, rows]
        self.values[:, :, step.keep_from : step.keep_to] = value_states[:, :, rows]
        self._length = step.keep_to
        return self.keys[:, :, : step.num_keys], self.values[:, :, : step.num_keys]

    def get_seq_length(self) -> int:
        """Models take the position of a forward's first row from here."""
        return self._step.start

    @property
    def num_stored(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._step.num_keys, 0

    def forget_from(self, length: int) -> None:
        """Zero every position from `length` on: what remains depends on the kept tokens only."""
        if self.is_initialized and length < self._length:
            self.keys[:, :, length : self._length] = 0
            self.values[:, :, length : self._length] = 0
        self._length = min(length, self._length)
        for copy in self._left.values():
            copy.length = min(copy.length, length)
        if length == 0:
            self._left.clear()

    def place(self, device: torch.device) -> tuple[int, int]:
        """Be on `device` from now on, with the positions copied that it lacks; what was stored elsewhere stays there.

        Returns:
            Bytes copied, and bytes of all positions stored.
        """
        if not self.is_initialized or self.device == device:
            return 0, 0
        here = self._left.pop(device, None)
        if here is None or here.keys.shape != self.keys.shape:
            here = _Copy(torch.zeros_like(self.keys, device=device), torch.zeros_like(self.values, device=device), 0)
        self._left[self.device] = _Copy(self.keys, self.values, self._length)
        lacking = slice(here.length, self._length)
        per_position = 0
        for to, source in ((here.keys, self.keys), (here.values, self.values)):
            if here.length < self._length:
                to[:, :, lacking] = source[:, :, lacking].to(device)
            to[:, :, self._length :] = 0
            per_position += source[:, :, :1].numel() * source.element_size()
        self.keys, self.values, self.device = here.keys, here.values, device
        return per_position * (self._length - here.length), per_position * self._length

    def _reserve(self, num_positions: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        capacity = self.keys.shape[2] if self.is_initialized else 0
        if num_positions <= capacity:
            return
        capacity = grown(capacity, num_positions)
        old = (self.keys, self.values) if self.is_initialized else None
        if old is None:
            self.device, self.dtype = key_states.device, key_states.dtype
        self.keys = key_states.new_zeros(1, key_states.shape[1], capacity, key_states.shape[3])
        self.values = value_states.new_zeros(1, value_states.shape[1], capacity, value_states.shape[3])
        if old is not None:
            self.keys[:, :, : self._length] = old[0][:, :, : self._length]
            self.values[:, :, : self._length] = old[1][:, :, : self._length]
        self.is_initialized = True


@dataclass(slots=True)
class HeldSequence:
    """A sequence: its tokens, and what is cached of them."""

    ids: list[int]
    cache: Cache

    @property
    def capacity(self) -> int:
        """Positions for which there is memory."""
        layers = (layer for layer in self.cache.layers if isinstance(layer, RollbackLayer) and layer.is_initialized)
        return max((int(layer.keys.shape[2]) for layer in layers), default=0)


def rollback_cache(config: Any, step: Step) -> Cache:
    """A cache of `RollbackLayer`s for a model of this config. Call `unfit_reason` first."""
    layers: list[Any] = []
    for layer in _own_layers(config):
        if type(layer) is DynamicLayer:
            layers.append(RollbackLayer(step))
        elif type(layer) is DynamicSlidingWindowLayer:
            layers.append(RollbackLayer(step, sliding_window=layer.sliding_window))
        else:
            layers.append(layer)
    return Cache(layers=layers)


def unfit_reason(config: Any) -> str | None:
    """Why a model of this config has a cache that cannot be rolled back; None if it can be.

    Judged from the kinds of layers transformers would give its cache, so new architectures are judged too.
    """
    try:
        layers = _own_layers(config)
    except Exception as error:  # configs of unknown layer kinds raise anything
        return f"transformers cannot make a key-value cache for it ({error})"
    unfit = sorted({type(layer).__name__ for layer in layers if not _fits(layer)})
    if unfit:
        return (
            f"{len([layer for layer in layers if not _fits(layer)])} of its {len(layers)} layers keep a running state "
            f"({', '.join(unfit)}), which cannot be rolled back token by token"
        )
    return None if layers else "its cache has no layers"


def _fits(layer: Any) -> bool:
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) or isinstance(layer, DummyLayer)


def _own_layers(config: Any) -> list[Any]:
    cache = DynamicCache(config=config)
    if not cache.layers:
        decoder = config.get_text_config(decoder=True)
        return [DynamicLayer() for _ in range(int(decoder.num_hidden_layers))]
    return list(cache.layers)
