"""What the transformers backend finds out about a model by running it, once, at load."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from autopipe.core.backends.transformers_layout import Layout
from autopipe.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from autopipe.core.backends.transformers import TransformersBackend

_PROMPT_LENGTH = 3
_SIZES = (1, 2, 5, 8)
"""Of the forwards whose rows are compared with those of one forward of all their tokens."""
_TOGETHER = 64
"""Numbers of a tensor that torch computes together at most (two vectors of bf16 with AVX-512)."""
_LINEAR_ONLY = ("attn", "attention")
"""Names of modules whose layers no such function follows."""
_FAR = 0.1
"""Logits further apart than this, in mean absolute difference by standard deviation, are not rounding."""

_logger = logging.getLogger(__name__)


def check_at_load(backend: TransformersBackend) -> None:
    """Choose the cheapest layout in which a model is exact, and make sure that it can be rolled back at all.

    Costs about ten forwards.

    Raises:
        UnsupportedModelError: it cannot be rolled back.
    """
    text_length = min(sum(_SIZES), backend.max_length - _PROMPT_LENGTH)
    if text_length < 1:
        return
    ids = [(7919 * (index + 1)) % backend.vocab_size for index in range(_PROMPT_LENGTH + text_length)]
    prompt, text = ids[:_PROMPT_LENGTH], ids[_PROMPT_LENGTH:]
    if backend.exact:
        _choose_layout(backend, prompt, text)
    _require_rollback(backend, prompt, text[: _SIZES[-1]])
    backend.reset()


def _choose_layout(backend: TransformersBackend, prompt: list[int], text: list[int]) -> None:
    """The first of rows on our kernels, padding, and single tokens that is exact."""
    experts = _num_experts(backend.model.config)
    if experts > 1:  # one text cannot show all ways in which tokens may share experts: no trial
        _one_at_a_time(backend, f"its {experts} experts compute as many rows as choose them")
        return
    problem = None
    if backend.layout is Layout.ROWS:
        problem = _uneven(backend, 1) or _problem(backend, prompt, text)
        if problem is not None:
            backend.give_up_kernels()
            backend.layout = Layout.PADDED
            backend.choice_reason = f"torch's linear layers and padding, since with our kernels {problem}"
            _logger.warning("%s: exact output takes %s", backend.name, backend.choice_reason)
    if backend.layout is Layout.PADDED:
        problem = _uneven(backend, backend.grid.rows) or _problem(backend, prompt, text)
        if problem is not None:
            _one_at_a_time(backend, f"padded, {problem}")


def _one_at_a_time(backend: TransformersBackend, reason: str) -> None:
    backend.layout = Layout.SINGLE
    backend.choice_reason = f"one token per forward, since {reason}"
    _logger.warning("%s: exact output takes %s", backend.name, backend.choice_reason)


def _num_experts(config: Any) -> int:
    """Experts per layer by whatever name a config calls them; 0 if it names none."""
    options = config.get_text_config(decoder=True).to_dict()
    return max((v for name, v in options.items() if "experts" in name and type(v) is int), default=0)


def _uneven(backend: TransformersBackend, rows: int) -> str | None:
    """Whether so many rows of some width leave numbers over where torch computes on a CPU: the last row's last ones are
    then rounded otherwise, by functions such as SiLU. Too seldom for a trial to show it."""
    if backend.model.device.type != "cpu":
        return None
    head = backend.model.get_output_embeddings()
    for name, module in backend.model.named_modules():
        width = getattr(module, "out_features", None) or getattr(module, "nf", None)
        if (
            module is not head
            and not any(part in name for part in _LINEAR_ONLY)
            and isinstance(width, int)
            and rows * width % _TOGETHER
        ):
            return f"{rows} x {width} numbers are not a multiple of {_TOGETHER}"
    return None


def _problem(backend: TransformersBackend, prompt: list[int], text: list[int]) -> str | None:
    backend.reset()
    try:
        backend.prefill(prompt)
        together = backend.forward(text)
        backend.rollback(len(prompt))
        parts = [text[sum(_SIZES[:index]) :][:size] for index, size in enumerate(_SIZES)]
        apart = torch.cat([backend.forward(part) for part in parts if part])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        backend.reset()
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"it cannot run ({reason})"
    if not torch.equal(together, apart):
        return "its rows are not independent of each other"
    layout, backend.layout = backend.layout, Layout.FREE
    backend.reset()
    backend.prefill(prompt)
    plain = backend.forward(text)
    backend.layout = layout
    if (together - plain).abs().mean() > _FAR * plain.std():
        return "its output changes"
    return None


def _require_rollback(backend: TransformersBackend, prompt: list[int], text: list[int]) -> None:
    backend.reset()
    backend.prefill(prompt)
    uses_cache = backend.uses_cache
    first = backend.forward(text)
    backend.rollback(len(prompt))
    again = backend.forward(text)
    if not uses_cache:
        reason = "it keeps its state outside the cache given to it"
    elif not torch.allclose(first, again, atol=1e-3, rtol=1e-3):
        reason = "after rolling back, the same tokens give other logits"
    else:
        return
    raise UnsupportedModelError(f"{backend.name}: cannot serve as a stage: {reason}")
