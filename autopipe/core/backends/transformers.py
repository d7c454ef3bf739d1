"""Stage backend for any causal language model that transformers can load.

How `exact` is kept. Library kernels round a row differently when a call has another number of rows or keys. So every
forward here has the same number of rows (`rows`, the rest padding), and offers a row a number of keys that depends
on the row's position alone (masked up to a multiple of `KEY_BLOCK`). Then a row's logits are the same however
tokens were grouped. Models for which that does not hold (mixtures of experts, whose matmuls grow with the number of
rows that chose an expert; ALiBi masks that must fit the keys) are found out by a check at load and run one token per
forward instead, which is exact for all, but no faster for several tokens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from autopipe.core.backends.base import CostNotes, StageBackend
from autopipe.core.backends.transformers_cache import RollbackLayer, Step, rollback_cache, unfit_reason
from autopipe.core.errors import ConfigError, ContextLengthError, RollbackError, UnsupportedModelError
from autopipe.core.models.spec import ModelSource
from autopipe.core.plan import Dtype

DEFAULT_ROWS = 8
KEY_BLOCK = 128
PREFILL_CHUNK = 1024
_UNLIMITED = 1 << 20
_logger = logging.getLogger(__name__)


class Layout(str, Enum):
    """How tokens are laid out in a model's forward."""

    FREE = "free"
    """As many rows as tokens: not exact."""
    PADDED = "padded"
    """`rows` rows over a fixed number of keys."""
    SINGLE = "single"
    """One row, as many keys as tokens."""


class TransformersBackend(StageBackend):
    """See the module.

    Args:
        model: a model spec, what `resolve` made of it, or a transformers model (which is then put in eval mode
            and must not be used elsewhere).
        exact: see `StageBackend`.
        rows: rows of a padded forward; most tokens checked at the price of one forward.
        dtype: `auto`: see `autopipe.core.models.choose_dtype`. Ignored for a model object.
        device: `auto` (a CUDA GPU if there is one, else the CPU), or any torch device.
        device_map: for `from_pretrained`; takes the place of `device`. Needs accelerate.
        adapter: folder of a PEFT adapter, merged at load.
        threads: torch threads of this process; None: as they are.
        max_length: shorten the context; None: the model's own.
        check: run the check at load (about ten forwards); false: trust the model to be exact when padded.

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
        check: bool = True,
    ) -> None:
        if rows < 1:
            raise ConfigError("rows", rows, "1 or more")
        if max_length is not None and max_length < 1:
            raise ConfigError("max_length", max_length, "1 or more")
        if threads is not None:
            self.set_threads(threads)
        if not isinstance(model, torch.nn.Module):
            from autopipe.core.backends.transformers_loading import load_model

            model, source = load_model(model, dtype, device, device_map, adapter, trust_remote_code)
            name = name or source.name
        self._model: Any = model.eval().requires_grad_(False)
        config = self._model.config
        reason = unfit_reason(config) or _stateful_reason(self._model)
        if reason is not None:
            raise UnsupportedModelError(f"{name or config.model_type}: cannot serve as a stage: {reason}")
        self.name = name or str(config.model_type)
        self.vocab_size, self._id_limit = _vocabulary(self._model)
        own_length = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.max_length = min(own_length or _UNLIMITED, max_length or _UNLIMITED)
        self.exact = exact
        self.layout = Layout.PADDED if exact else Layout.FREE
        self.choice_reason = ""
        self._rows = min(rows, self.max_length)
        self._device = self._model.get_input_embeddings().weight.device
        self._keeps_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._cache_argument = _cache_argument(self._model)
        self._ids: list[int] = []
        self._step = Step()
        self._cache = rollback_cache(config, self._step)
        if check:
            self._check()

    @property
    def length(self) -> int:
        return len(self._ids)

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self._model

    def set_threads(self, threads: int) -> None:
        """Set torch's threads, of the whole process. Rounding of a prefill may depend on them."""
        torch.set_num_threads(threads)

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        """As the contract says. Chunks of `PREFILL_CHUNK` tokens bound the memory of long prompts."""
        self._require_fit(ids)
        if self.layout is Layout.SINGLE:
            return self.forward(ids)[-1]
        chunks = [ids[start : start + PREFILL_CHUNK] for start in range(0, len(ids), PREFILL_CHUNK)]
        return self._append([(len(chunk), self._run_free) for chunk in chunks], ids, last_only=True)[0]

    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        self._require_fit(ids)
        if self.layout is Layout.FREE:
            return self._append([(len(ids), self._run_free)], ids)
        if self.layout is Layout.SINGLE:
            return self._append([(1, self._run_free)] * len(ids), ids)
        return self._append([(size, self._run_padded) for size in self._padded_sizes(len(ids))], ids)

    def rollback(self, length: int) -> None:
        if not 0 <= length <= len(self._ids):
            raise RollbackError(f"{self.name}: cannot roll back to {length}, the cache holds {len(self._ids)} tokens")
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
        weight_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        kv_bytes = 0
        for layer in self._cache.layers:
            if isinstance(layer, RollbackLayer) and layer.is_initialized:
                for buffer in (layer.keys, layer.values):
                    kv_bytes += buffer.numel() // buffer.shape[2] * buffer.element_size()
        return CostNotes(weight_bytes, kv_bytes or None, self.choice_reason)

    # -- forwards -------------------------------------------------------------------------------------------

    def _require_fit(self, ids: Sequence[int]) -> None:
        if len(ids) == 0:
            raise ConfigError("ids", list(ids), "one or more token ids")
        for token in ids:
            if not 0 <= token < self._id_limit:
                raise ConfigError("ids", token, f"token ids from 0 to {self._id_limit - 1}")
        if len(self._ids) + len(ids) > self.max_length:
            raise ContextLengthError(
                f"{self.name}: {len(self._ids)} tokens in the cache and {len(ids)} new ones are more than its context "
                f"of {self.max_length}"
            )

    def _append(self, parts: list[tuple[int, Any]], ids: Sequence[int], last_only: bool = False) -> torch.Tensor:
        """Run parts of `ids` one after the other; all or nothing. Returns float32 [tokens, vocab] on the CPU."""
        before, offset = len(self._ids), 0
        logits = torch.empty(1 if last_only else len(ids), self.vocab_size)  # outside inference mode: a plain tensor
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

    def _run_padded(self, ids: Sequence[int], last_only: bool = False) -> torch.Tensor:
        length = len(self._ids)
        border = self._border(length)
        start = min(length, border - self._rows)  # near a border the padding is in front: tokens once more
        self._ids.extend(ids)
        row_ids = self._ids[start : start + self._rows]
        row_ids = row_ids + [row_ids[-1]] * (self._rows - len(row_ids))
        logits = self._call(row_ids, Step(start, length, length + len(ids), border))
        return logits[length - start : length - start + len(ids)]

    def _border(self, length: int) -> int:
        """Where the block of keys that holds position `length` ends: the number of keys its row is offered."""
        return min(max(KEY_BLOCK, self._rows) * (length // max(KEY_BLOCK, self._rows) + 1), self.max_length)

    def _padded_sizes(self, count: int) -> list[int]:
        """Cut `count` tokens so that no part has more than `rows`, or straddles a block of keys."""
        sizes, length = [], len(self._ids)
        while count:
            sizes.append(min(count, self._rows, self._border(length) - length))
            length += sizes[-1]
            count -= sizes[-1]
        return sizes

    def _call(self, ids: list[int], step: Step, keep: int = 0) -> torch.Tensor:
        """The model's forward; logits [rows, vocab], or of the last `keep` rows."""
        self._step.start, self._step.num_keys = step.start, step.num_keys
        self._step.keep_from, self._step.keep_to = step.keep_from, step.keep_to
        inputs: dict[str, Any] = {self._cache_argument: self._cache, "use_cache": True}
        if self._keeps_logits:
            inputs["logits_to_keep"] = keep
        logits: torch.Tensor = self._model(torch.tensor([ids], device=self._device), **inputs).logits[0]
        return logits[-keep:] if keep else logits

    # -- the check at load ----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Find out whether this model is exact when padded, and can be rolled back at all.

        Raises:
            UnsupportedModelError: it cannot be rolled back.
        """
        count = min(self._rows, self.max_length - 3)
        if count < 1:
            return
        ids = [(7919 * (index + 1)) % self._id_limit for index in range(count + 3)]
        prompt, text = ids[:3], ids[3:]
        try:
            if self.layout is Layout.PADDED:
                problem = self._padding_problem(prompt, text)
                if problem is not None:
                    self.layout = Layout.SINGLE
                    self.choice_reason = f"one token per forward, since {problem}"
                    _logger.warning("%s: exact output takes %s", self.name, self.choice_reason)
            self._require_rollback(prompt, text)
        finally:
            self.reset()

    def _padding_problem(self, prompt: list[int], text: list[int]) -> str | None:
        try:
            self.prefill(prompt)
            together = self.forward(text)
            self.rollback(len(prompt))
            apart = torch.cat([self.forward([token]) for token in text])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            self.reset()
            return f"it cannot run padded ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        if not torch.equal(together, apart):
            return "padding does not make its rows independent of each other"
        self.reset()
        self.layout = Layout.FREE
        self.prefill(prompt)
        plain = self.forward(text)
        self.reset()
        self.layout = Layout.PADDED
        if (together - plain).abs().mean() > 0.1 * plain.std():
            return "padding changes its output"
        return None

    def _require_rollback(self, prompt: list[int], text: list[int]) -> None:
        self.reset()
        self.prefill(prompt)
        stored = [layer.num_stored for layer in self._cache.layers if isinstance(layer, RollbackLayer)]
        first = self.forward(text)
        self.rollback(len(prompt))
        again = self.forward(text)
        if not any(stored):
            reason = "it keeps its state outside the cache given to it"
        elif not torch.allclose(first, again, atol=1e-3, rtol=1e-3):
            reason = "after rolling back, the same tokens give other logits"
        else:
            return
        raise UnsupportedModelError(f"{self.name}: cannot serve as a stage: {reason}")


def _stateful_reason(model: Any) -> str | None:
    if getattr(model, "_is_stateful", False):
        return "it keeps a running state, which cannot be rolled back token by token"
    return None


def _vocabulary(model: Any) -> tuple[int, int]:
    """Rows of the output head, and how many token ids both it and the input embeddings know."""
    embeddings = int(model.get_input_embeddings().weight.shape[0])
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    size = int(weight.shape[0]) if weight is not None else int(model.config.get_text_config(decoder=True).vocab_size)
    return size, min(size, embeddings)


def _cache_argument(model: Any) -> str:
    """The cache is `cache` from transformers 5.2x on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
