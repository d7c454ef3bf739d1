"""Stage backend for any causal language model that transformers can load.

How `exact` is kept. Library kernels round a row differently when a call has another number of rows or keys. So
a forward offers a row a number of keys that depends on the row's position alone (masked up to a multiple of
`KEY_BLOCK`), and the number of rows is kept out of the result in the cheapest way that serves (see `Layout`):
on a CPU, linear layers move to our own kernels, whose rows are independent, and attention takes rows in groups of
eight; elsewhere every forward has the same number of rows, the rest padding; and models for which neither holds
(mixtures of experts, whose matmuls grow with the rows that chose an expert; ALiBi biases that must fit the keys) run
one token per forward, which is exact for every model, but no faster for several tokens. A check at load finds out
which.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers.cache_utils import Cache

from autopipe.core.affinity import usable_cores
from autopipe.core.backends.base import CostNotes, StageBackend
from autopipe.core.backends.transformers_attention import NAME as ATTENTION
from autopipe.core.backends.transformers_attention import QUERY_ROWS, Block, attending_in
from autopipe.core.backends.transformers_cache import (
    HeldSequence,
    RollbackLayer,
    Step,
    rollback_cache,
    unfit_reason,
)
from autopipe.core.backends.transformers_check import check_at_load
from autopipe.core.backends.transformers_layout import KEY_BLOCK, UNLIMITED, Grid, Layout, long_from
from autopipe.core.backends.transformers_linear import KernelLinears, fits_kernels, weight_bytes
from autopipe.core.backends.transformers_model import cache_argument, stateful_reason, vocabulary
from autopipe.core.backends.transformers_moves import Moved, move_layers
from autopipe.core.errors import ConfigError, ContextLengthError, RollbackError, UnsupportedModelError
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.models.spec import ModelSource
from autopipe.core.plan import FEWER_BITS, Dtype

DEFAULT_ROWS = 8
MOST_ROWS = 64
"""Of a forward on our own kernels."""
PREFILL_CHUNK = 1024


class TransformersBackend(StageBackend):
    """See the module.

    Args:
        model: a model spec, what `resolve` made of it, or a transformers model (which is put in eval mode and
            must not be used elsewhere).
        exact: see `StageBackend`.
        rows: rows of a padded forward, and so most tokens in one.
        dtype: `auto`: see `autopipe.core.models.choose_dtype`. Ignored for a model object.
        device: `auto` (a CUDA GPU if there is one, else the CPU), or any torch device.
        device_map: for `from_pretrained`; takes the place of `device`. Needs accelerate.
        adapter: folder of a PEFT adapter, merged at load.
        threads: compute threads; None: all cores for our kernels, else torch's setting. torch's own threads are
            a setting of the whole process: the number given, or 1 beside our kernels (two pools of threads on the
            same cores slow each other down).
        max_length: shorten the context; None: the model's own.
        kernels: use our own kernels for linear layers where they fit (CPU; bf16 or fp32).
        check: run the check at load (about ten forwards); false: trust the first layout.

    Raises:
        ConfigError, ModelLoadError: the model cannot be found or loaded.
        UnsupportedModelError: its cache cannot be rolled back; the message gives the reason.
    """

    def __init__(
        self,
        model: str | ModelSource | torch.nn.Module,
        *,
        exact: bool = True,
        rows: int = DEFAULT_ROWS,
        dtype: Dtype = Dtype.AUTO,
        device: str = "auto",
        device_map: str | dict[str, int | str] | None = None,
        adapter: str | None = None,
        trust_remote_code: bool = False,
        threads: int | None = None,
        max_length: int | None = None,
        name: str | None = None,
        kernels: bool = True,
        weights: WeightFormat | None = None,
        check: bool = True,
    ) -> None:
        if rows < 1:
            raise ConfigError("rows", rows, "1 or more")
        if max_length is not None and max_length < 1:
            raise ConfigError("max_length", max_length, "1 or more")
        if threads is not None and threads < 1:
            raise ConfigError("threads", threads, "1 or more")
        self._model: Any = model
        if isinstance(model, (str, ModelSource)):
            from autopipe.core.backends.transformers_loading import load_model

            self._model, source = load_model(
                model,
                dtype,
                device,
                device_map,
                adapter,
                trust_remote_code,
                quantise=weights is None and dtype in FEWER_BITS,
            )
            name = name or source.name
        self._model.eval().requires_grad_(False)
        config = self._model.config
        reason = unfit_reason(config) or stateful_reason(self._model)
        if reason is not None:
            raise UnsupportedModelError(f"{name or config.model_type}: cannot serve as a stage: {reason}")
        self.name = name or str(config.model_type)
        self.vocab_size, self._id_limit = vocabulary(self._model)
        own_length = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.max_length = min(own_length or UNLIMITED, max_length or UNLIMITED)
        self.exact = exact
        self.layout = Layout.FREE
        self.choice_reason = ""
        self._linears: KernelLinears | None = None
        self._torch_threads = 0  # as they are
        self._weights = weights
        if kernels and fits_kernels(self._model):
            self._linears = KernelLinears(self._model, threads, weights)
        elif weights is not None:
            raise UnsupportedModelError(f"{self.name}: its layers cannot be quantised by the native kernels")
        if threads is not None or self._linears is not None:
            self.set_threads(threads or 0)
        if exact:
            own_attention = config._attn_implementation == ATTENTION
            self.layout = Layout.ROWS if self._linears is not None and own_attention else Layout.PADDED
        self._device = self._model.get_input_embeddings().weight.device
        self.grid = Grid(min(rows, self.max_length), self.max_length, long_from(config))
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(self._model).forward).parameters
        self._cache_argument = cache_argument(self._model)
        self.device_map = dict(device_map) if isinstance(device_map, dict) else None
        self._step = Step()
        self.sequence = self.new_sequence()
        if check:
            check_at_load(self)
        if self._linears is not None:
            self._linears.commit()

    @property
    def length(self) -> int:
        return len(self._ids)

    @property
    def sequence(self) -> HeldSequence:
        """What the backend works on. Another one takes its place by being put here; nothing is copied."""
        return HeldSequence(self._ids, self._cache)

    @sequence.setter
    def sequence(self, held: HeldSequence) -> None:
        self._ids, self._cache = held.ids, held.cache

    def new_sequence(self) -> HeldSequence:
        """An empty sequence for `sequence`."""
        return HeldSequence([], rollback_cache(self._model.config, self._step))

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self._model

    @property
    def uses_cache(self) -> bool:
        """Whether the model has stored the tokens so far in the cache given to it."""
        return any(isinstance(layer, RollbackLayer) and layer.num_stored for layer in self._cache.layers)

    def set_threads(self, threads: int) -> None:
        """Compute with so many threads from now on; 0: all cores. With our kernels results do not change."""
        if self._linears is not None:
            self._linears.team.set_threads(threads or usable_cores())
        self._torch_threads = 1 if self._linears is not None else threads or usable_cores()
        self.use_threads()

    def use_threads(self) -> None:
        """Have torch use its threads as this model does: they are a setting of the whole process, and of the thread
        that calls, so several models in one process need this before each forward."""
        if self._torch_threads and torch.get_num_threads() != self._torch_threads:
            torch.set_num_threads(self._torch_threads)

    def place(self, device_map: Mapping[str, int | str]) -> Moved:
        """Move layers, and what is cached of them, to other devices.

        Raises:
            ConfigError, ModelLoadError: not possible; call it again with the map before.
            UnsupportedModelError: the layers run on our kernels, which are for CPUs.
        """
        if self._linears is None:
            moved = move_layers(self._model, self._cache.layers, device_map)
        elif set(device_map.values()) == {"cpu"}:
            moved = Moved()
        else:
            raise UnsupportedModelError(f"{self.name}: its layers run on the native kernels, on the CPU only")
        self.device_map = dict(device_map)
        self._device = self._model.get_input_embeddings().weight.device
        return moved

    def give_up_kernels(self) -> None:
        """Go back to the model's own linear layers, while that is possible: during the check at load.

        Raises:
            UnsupportedModelError: the layers were quantised: their own ones are another model.
        """
        if self._weights is not None:
            raise UnsupportedModelError(f"{self.name}: exact output needs layers of its own, which are not quantised")
        if self._linears is not None:
            threads = self._linears.team.team.threads
            self._linears.restore()
            self._linears = None
            self.set_threads(threads)

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        """As the contract says. Chunks of `PREFILL_CHUNK` tokens bound the memory of long prompts."""
        self._require_fit(ids)
        chunks = [ids[start : start + PREFILL_CHUNK] for start in range(0, len(ids), PREFILL_CHUNK)]
        return self._append([(len(chunk), self._run_free) for chunk in chunks], ids, last_only=True)[0]

    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        self._require_fit(ids)
        if self.layout is Layout.FREE:
            return self._append([(len(ids), self._run_free)], ids)
        if self.layout is Layout.SINGLE:
            return self._append([(1, self._run_free)] * len(ids), ids)
        start, grid = len(self._ids), self.grid
        if self.layout is Layout.ROWS:
            return self._append([(size, self._run_rows) for size in grid.sizes(start, len(ids), MOST_ROWS)], ids)
        sizes = grid.sizes(start, len(ids), grid.rows, KEY_BLOCK)
        return self._append([(size, self._run_padded) for size in sizes], ids)

    def rollback(self, length: int) -> None:
        if not 0 <= length <= len(self._ids):
            held = len(self._ids)
            raise RollbackError(f"{self.name}: cannot roll back to {length}, the cache holds {held} tokens")
        with torch.inference_mode():
            for layer in self._cache.layers:
                if isinstance(layer, RollbackLayer):
                    layer.forget_from(length)
        del self._ids[length:]

    def close(self) -> None:
        self.rollback(0)
        self._cache.layers.clear()
        self._model = None

    def cost_notes(self) -> CostNotes:
        kv_bytes = 0
        for layer in self._cache.layers:
            if isinstance(layer, RollbackLayer) and layer.is_initialized:
                for buffer in (layer.keys, layer.values):
                    kv_bytes += buffer.numel() // buffer.shape[2] * buffer.element_size()
        return CostNotes(weight_bytes(self._model), kv_bytes or None, self.choice_reason)

    # -- forwards -------------------------------------------------------------------------------------------

    def _require_fit(self, ids: Sequence[int]) -> None:
        if len(ids) == 0:
            raise ConfigError("ids", list(ids), "one or more token ids")
        for token in ids:
            if not 0 <= token < self._id_limit:
                raise ConfigError("ids", token, f"token ids from 0 to {self._id_limit - 1}")
        if len(self._ids) + len(ids) > self.max_length:
            raise ContextLengthError(
                f"{self.name}: {len(self._ids)} tokens in the cache and {len(ids)} new ones are more than its "
                f"context of {self.max_length}"
            )

    def _append(self, parts: list[tuple[int, Any]], ids: Sequence[int], last_only: bool = False) -> torch.Tensor:
        """Run parts of `ids` one after the other; all or nothing. Returns float32 [tokens, vocab] on the CPU."""
        before, offset = len(self._ids), 0
        # Made outside inference mode, so that the caller may change it in place.
        logits = torch.empty(1 if last_only else len(ids), self.vocab_size, dtype=torch.float32)
        try:
            with torch.inference_mode():
                for size, run in parts:
                    rows = run(ids[offset : offset + size], last_only)
                    logits[0 if last_only else slice(offset, offset + size)] = rows[-1] if last_only else rows
                    offset += size
        except BaseException:
            self.rollback(before)
            raise
        return logits

    def _run_free(self, ids: Sequence[int], last_only: bool = False) -> torch.Tensor:
        start = len(self._ids)
        end = start + len(ids)
        self._ids.extend(ids)
        return self._call(list(ids), Step(start, start, end, end), keep=1 if last_only else 0)

    def _run_rows(self, ids: Sequence[int], last_only: bool = False) -> torch.Tensor:
        blocks, start = list[Block](), len(self._ids)
        for size in self.grid.sizes(start, len(ids), QUERY_ROWS, KEY_BLOCK):
            blocks.append(Block(size, self.grid.num_keys(len(self._ids))))
            self._ids.extend(ids[len(self._ids) - start :][:size])
        with attending_in(blocks):
            return self._call(list(ids), Step(start, start, len(self._ids), blocks[-1].keys))

    def _run_padded(self, ids: Sequence[int], last_only: bool = False) -> torch.Tensor:
        length, rows = len(self._ids), self.grid.rows
        start = max(0, min(length, self.grid.border(length) - rows))  # before a border the padding is in front
        self._ids.extend(ids)
        row_ids = self._ids[start : start + rows]
        row_ids = row_ids + [row_ids[-1]] * (rows - len(row_ids))
        logits = self._call(row_ids, Step(start, length, length + len(ids), self.grid.num_keys(length)))
        return logits[length - start : length - start + len(ids)]

    def _call(self, ids: list[int], step: Step, keep: int = 0) -> torch.Tensor:
        """The model's forward; logits [rows, vocab], or of the last `keep` rows."""
        self._step.start, self._step.num_keys = step.start, step.num_keys
        self._step.keep_from, self._step.keep_to = step.keep_from, step.keep_to
        return self.call(ids, self._cache, keep)

    def call(self, ids: list[int], cache: Cache, keep: int = 0, positions: Sequence[int] | None = None) -> torch.Tensor:
        """The model's forward over a cache, as it is; logits [rows, vocab], or of the last `keep` rows.

        Args:
            positions: of the rows; None: as the cache says.
        """
        inputs: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if self._keeps_logits:
            inputs["logits_to_keep"] = keep
        if positions is not None:
            inputs["position_ids"] = torch.tensor([positions], device=self._device)
        with self._linears.team.team.awake() if self._linears is not None else nullcontext():
            logits: torch.Tensor = self._model(torch.tensor([ids], device=self._device), **inputs).logits[0]
        return logits[-keep:] if keep else logits
