"""What the conformance checks are made of: the backend in question, and ways to find it wanting."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autopipe.core.backends.base import StageBackend
from autopipe.core.errors import AutoPipeError

MakeBackend = Callable[[], StageBackend]
ReferenceLogits = Callable[[Sequence[int]], torch.Tensor]


class ConformanceError(AutoPipeError):
    """A backend breaks the contract. `check` names the check that found it."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check


@dataclass(frozen=True)
class Subject:
    """What is checked, against what.

    Attributes:
        make_backend: see the module.
        reference_logits: see the module.
        tolerance: largest absolute difference of a logit from the reference's.
        prompt_length, text_length: tokens prefilled and forwarded in each check (shortened to fit the context).
        seed: of the token ids and groupings.
    """

    make_backend: MakeBackend
    reference_logits: ReferenceLogits
    tolerance: float
    prompt_length: int = 9
    text_length: int = 40
    seed: int = 0

    def backend(self) -> StageBackend:
        """A backend ready for a request."""
        backend = self.make_backend()
        backend.reset()
        return backend

    def ids(self, backend: StageBackend, salt: int = 0) -> tuple[list[int], list[int]]:
        """Token ids of a prompt and of a text after it."""
        draw = random.Random(self.seed * 1000 + salt)
        room = backend.max_length - 2
        prompt = max(1, min(self.prompt_length, room // 2))
        text = max(1, min(self.text_length, room - prompt))
        ids = [draw.randrange(backend.vocab_size) for _ in range(prompt + text)]
        return ids[:prompt], ids[prompt:]


def continued(subject: Subject, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """Logits of `text` after `prompt` on a backend to which nothing else happened."""
    backend = subject.backend()
    backend.prefill(prompt)
    logits = backend.forward(text).clone()
    backend.reset()
    return logits


def split(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Cut `ids` into groups of these sizes, over and over."""
    groups: list[list[int]] = []
    start = 0
    while start < len(ids):
        size = sizes[len(groups) % len(sizes)]
        groups.append(list(ids[start : start + size]))
        start += size
    return groups


def require(check: str, holds: bool, message: str) -> None:
    if not holds:
        raise ConformanceError(check, message)


def require_same(check: str, rows: torch.Tensor, expected: torch.Tensor, after: str) -> None:
    if torch.equal(rows, expected):
        return
    if rows.shape != expected.shape:
        raise ConformanceError(check, f"after {after}: shape {tuple(rows.shape)}, not {tuple(expected.shape)}")
    difference = (rows - expected).abs().max().item()
    raise ConformanceError(check, f"after {after}: logits are not bitwise the same, but differ by {difference:.3g}")


def require_close(check: str, subject: Subject, rows: torch.Tensor, expected: torch.Tensor, after: str) -> None:
    if rows.shape != expected.shape:
        raise ConformanceError(check, f"after {after}: shape {tuple(rows.shape)}, not {tuple(expected.shape)}")
    difference = (rows - expected).abs().max().item()
    if not difference <= subject.tolerance:  # also catches nan
        found = f"logits differ from the expected by {difference:.3g}, more than {subject.tolerance:.3g}"
        raise ConformanceError(check, f"after {after}: {found}")


def require_error(check: str, kind: type[AutoPipeError], call: Callable[[], object], what: str) -> None:
    try:
        call()
    except kind:
        return
    except Exception as error:
        raise ConformanceError(check, f"{what} raises {type(error).__name__}, not {kind.__name__}") from error
    raise ConformanceError(check, f"{what} is not refused with {kind.__name__}")
