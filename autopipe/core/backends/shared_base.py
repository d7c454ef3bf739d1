"""Drafters made of the target's own layers and an adapter, on the native kernels: several at a time, one in use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopipe.core.backends.base import CostNotes
from autopipe.core.backends.fused import FusedBackend, check_threads
from autopipe.core.backends.fused_config import DecoderShape, reason_unfit, shape_of
from autopipe.core.backends.fused_native import NativeRunner
from autopipe.core.backends.fused_runner import Runner
from autopipe.core.backends.packed_decoder import PackedDecoder
from autopipe.core.errors import ConfigError, UnsupportedModelError
from autopipe.core.kernels import has_kernels, reason_missing
from autopipe.core.models.adapters import split_lora
from autopipe.core.models.shared_base import (
    MODULES,
    DrafterInfo,
    check_drafter,
    is_layer_matrix,
    read_head_ids,
    truncated_state,
)


def reason_unfit_drafter(config: Any, device: str) -> str | None:
    """Why shared-base drafters of this target cannot run here; None when they can."""
    if device != "cpu":
        return f"shared-base drafters run on the CPU, not on {device}"
    if not has_kernels():
        return f"shared-base drafters need the native CPU kernels: {reason_missing()}"
    return reason_unfit(config)


class SharedBaseBackend(FusedBackend):
    """A stage of some of the target's layers, adapted, with an output head of the most frequent tokens.

    Logits have the target's whole vocabulary; tokens that the head lacks have -inf. The layers' matrices are the
    target's own, in memory once for all processes (`packed_layers`), and LoRA is computed beside them; the input
    embedding is read where the checkpoint is mapped. Its own are LoRA's matrices, the norms and the head.

    All drafters are loaded at the start; `select` changes to another without reading anything.

    Args:
        config: of the target.
        load: gives the target's weights by name, mapped from disk if possible. Called anew for every drafter and for
            the embedding, so that pages which packing has touched are given back.
        adapters: drafters' folders, the one to begin with first; all with the same layers and size of head.
        dtype: torch.bfloat16 or torch.float32.
        threads: compute threads; None: all cores this process may use.
        name: how stats name the stage.

    Raises:
        UnsupportedModelError: no native kernels, or a target they cannot run.
        ConfigError: a folder that holds no such drafter.
        ModelLoadError: a drafter of another target, or one whose tensors do not fit it.
    """

    def __init__(
        self,
        config: Any,
        load: Callable[[], Mapping[str, torch.Tensor]],
        adapters: Sequence[str],
        *,
        dtype: torch.dtype,
        threads: int | None = None,
        name: str = "drafter",
    ) -> None:
        reason = reason_unfit_drafter(config, "cpu")
        if reason is not None:
            raise UnsupportedModelError(reason)
        check_threads(threads)
        shape = shape_of(config)
        self._config, self._load_state, self._dtype = config, load, dtype
        self._embedding = input_embedding(load(), shape, dtype)
        self._loaded: dict[str, Drafter] = {}
        self._screens = False
        self.adapter = adapters[0]
        for adapter in dict.fromkeys(adapters):
            self._loaded[adapter] = self._load(adapter)
        first = self._loaded[self.adapter]
        self._native = NativeRunner.of(first.weights, threads)
        runner = _WholeVocabulary(self._native, first.head_ids, shape.vocab)
        self._begin(runner, shape.vocab, shape.max_positions, name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The drafters that are loaded."""
        return tuple(self._loaded)

    def add(self, adapter: str) -> None:
        """Load one more drafter. Whatever is wrong with it, those loaded before stay as they are.

        Raises:
            ConfigError, ModelLoadError: as the constructor.
        """
        if adapter not in self._loaded:
            self._loaded[adapter] = self._load(adapter)
            if self._screens:
                self._loaded[adapter].weights.add_screen()

    def prepare_best(self) -> None:
        self._native.prepare_best()
        self._screens = True
        for drafter in self._loaded.values():
            drafter.weights.add_screen()

    def select(self, adapter: str) -> None:
        """Draft with another drafter from now on; the cache is emptied, for it was the other's.

        Raises:
            ConfigError: it is not loaded; the old one stays in use.
        """
        if adapter not in self._loaded:
            raise ConfigError("adapter", adapter, f"one that is loaded: {', '.join(self._loaded)}")
        if adapter == self.adapter:
            return
        drafter = self._loaded[adapter]
        self._native.use(drafter.weights)
        self._runner = _WholeVocabulary(self._native, drafter.head_ids, self.vocab_size)
        self._length = 0
        self.adapter = adapter

    def close(self) -> None:
        super().close()
        for drafter in self._loaded.values():
            drafter.weights.close()

    def cost_notes(self) -> CostNotes:
        notes = super().cost_notes()
        return dataclasses.replace(notes, notes=f"{notes.notes}, drafter {self.adapter}")

    def _load(self, adapter: str) -> Drafter:
        like = next(iter(self._loaded.values())).info if self._loaded else None
        return Drafter.load(self._config, self._load_state(), adapter, self._dtype, self._embedding, like)


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter's packed weights, and the token id of every row of its head."""

    info: DrafterInfo
    head_ids: torch.Tensor
    weights: PackedDecoder

    @classmethod
    def load(
        cls,
        config: Any,
        state: Mapping[str, torch.Tensor],
        adapter: str,
        dtype: torch.dtype,
        embedding: torch.Tensor,
        like: DrafterInfo | None = None,
    ) -> Drafter:
        """Check and load a drafter.

        Args:
            config, state: of the target.
            embedding: the target's input embedding in `dtype`, read where it is.
            like: one whose place it must be able to take.

        Raises:
            ConfigError, ModelLoadError: as `SharedBaseBackend`.
        """
        info = check_drafter(adapter, config, state)
        if like is not None and (len(info.layers), info.head_size) != (len(like.layers), like.head_size):
            raise ConfigError("adapters", adapter, "drafters with as many layers and as large a head as the first")
        shape = shape_of(config)
        head_ids = read_head_ids(adapter, info)
        base = truncated_state(state, info.layers, head_ids)
        adapted, added = split_lora(base, adapter)
        beside = {
            name: low_rank for name, low_rank in added.items() if is_layer_matrix(name) and not low_rank.transposed
        }
        for name in added.keys() - beside.keys():
            adapted[f"{name}.weight"] = added[name].added_to(adapted[f"{name}.weight"])
        truncated = dataclasses.replace(shape, num_layers=len(info.layers), vocab=info.head_size, tied=False)
        layers = [layer for layer in range(len(info.layers)) if _is_the_targets(layer, adapted, base)]
        packed = PackedDecoder(truncated, adapted, dtype, embedding=embedding, shared_layers=layers, adapters=beside)
        return cls(info, head_ids, packed)


def _is_the_targets(layer: int, adapted: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]) -> bool:
    """Whether the matrices of a layer are the target's own: the adapter has saved or changed none of them."""
    names = [
        f"model.layers.{layer}.{group}.{module}.weight" for group, modules in MODULES.items() for module in modules
    ]
    return all(adapted.get(name) is base.get(name) for name in names)


class _WholeVocabulary(Runner):
    """Spreads the logits of a trimmed head over the target's vocabulary."""

    def __init__(self, inner: Runner, head_ids: torch.Tensor, vocab_size: int) -> None:
        self._inner, self._head_ids, self._vocab_size = inner, head_ids.numpy(), vocab_size
        self.exact, self.shortfalls = inner.exact, inner.shortfalls
        self.weight_bytes, self.kv_bytes_per_token = inner.weight_bytes, inner.kv_bytes_per_token
        self._logits = torch.empty(0, vocab_size, dtype=torch.float32)

    @property
    def description(self) -> str:
        return f"{self._inner.description}, head of {len(self._head_ids)} tokens"

    def run(self, ids: Sequence[int], position: int, num_logits: int) -> torch.Tensor:
        if self._logits.shape[0] < num_logits:
            self._logits = torch.full((num_logits, self._vocab_size), -torch.inf, dtype=torch.float32)
        logits = self._logits[:num_logits]
        # By numpy: torch would wake its threads, which then spin beside those of the kernels.
        logits.numpy()[:, self._head_ids] = self._inner.run(ids, position, num_logits).numpy()
        return logits

    def best(self, ids: Sequence[int], position: int, num_logits: int) -> list[int]:
        rows = self._inner.best(ids, position, num_logits)  # of the head, whose ids ascend
        return [int(self._head_ids[row]) if row >= 0 else -1 for row in rows]

    def set_threads(self, threads: int) -> None:
        self._inner.set_threads(threads)

    def close(self) -> None:
        self._inner.close()


def input_embedding(state: Mapping[str, torch.Tensor], shape: DecoderShape, dtype: torch.dtype) -> torch.Tensor:
    """The input embedding in `dtype`: the mapped checkpoint's own tensor where it has that dtype."""
    tensor = state.get("model.embed_tokens.weight")
    if tensor is None or tuple(tensor.shape) != (shape.vocab, shape.hidden):
        raise UnsupportedModelError("the target's input embedding is missing or does not fit its config")
    return tensor.to(dtype).contiguous()
