"""The conformance suite: an honest backend passes, and each check catches a backend that breaks its rule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from autopipe.core.backends.base import StageBackend
from autopipe.core.backends.conformance import CHECKS, ConformanceError, Subject, check_backend
from autopipe.core.errors import ConfigError, ContextLengthError, RollbackError

VOCAB = 17


def reference_logits(ids: Sequence[int]) -> torch.Tensor:
    """Row i depends on ids[: i + 1]: a running sum and the last token."""
    rows = []
    total = 0.0
    for position, token in enumerate(ids):
        total = 0.9 * total + token
        rows.append(torch.arange(VOCAB, dtype=torch.float32) * (total + position) % 5 + token)
    return torch.stack(rows)


class HonestBackend(StageBackend):
    """A toy model whose cache is the list of tokens."""

    def __init__(self, max_length: int = 100, exact: bool = True) -> None:
        self.name, self.vocab_size, self.max_length, self.exact = "toy", VOCAB, max_length, exact
        self.ids: list[int] = []

    @property
    def length(self) -> int:
        return len(self.ids)

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        return self.append(ids)[-1]

    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        return self.append(ids)

    def append(self, ids: Sequence[int]) -> torch.Tensor:
        if len(ids) == 0 or not all(0 <= token < VOCAB for token in ids):
            raise ConfigError("ids", ids, f"0 to {VOCAB - 1}")
        if len(self.ids) + len(ids) > self.max_length:
            raise ContextLengthError("full")
        self.ids.extend(ids)
        return reference_logits(self.ids)[-len(ids) :]

    def rollback(self, length: int) -> None:
        if not 0 <= length <= len(self.ids):
            raise RollbackError("no")
        del self.ids[length:]


class NeverEmpty(HonestBackend):
    def rollback(self, length: int) -> None:
        super().rollback(max(length, min(1, self.length)))


class HalfPrecision(HonestBackend):
    def append(self, ids: Sequence[int]) -> torch.Tensor:
        return super().append(ids).half()


class SlightlyWrong(HonestBackend):
    def append(self, ids: Sequence[int]) -> torch.Tensor:
        return super().append(ids) + 0.1


class NotANumber(HonestBackend):
    def append(self, ids: Sequence[int]) -> torch.Tensor:
        return super().append(ids) * float("nan")


class Drifting(HonestBackend):
    """Every call adds a little to the logits."""

    calls = 0

    def append(self, ids: Sequence[int]) -> torch.Tensor:
        self.calls += 1
        return super().append(ids) + 1e-6 * self.calls


class KeepsOneTooMany(HonestBackend):
    """Reports the right length, but a rejected token stays in the cache."""

    stale: int | None = None

    def append(self, ids: Sequence[int]) -> torch.Tensor:
        logits = super().append(ids)
        return logits if self.stale is None else logits + 1e-3 * self.stale

    def rollback(self, length: int) -> None:
        if 0 < length < self.length:
            self.stale = self.ids[length]
        super().rollback(length)
        if length == 0:
            self.stale = None


class ForgetsThePrompt(HonestBackend):
    """After a roll-back into the prompt it takes what is left of it for zeros."""

    prompt = 0

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        self.prompt = len(self.ids) + len(ids)
        return super().prefill(ids)

    def rollback(self, length: int) -> None:
        super().rollback(length)
        if length < self.prompt:
            self.ids = [0] * length


class RollsBackTooFar(HonestBackend):
    def rollback(self, length: int) -> None:
        super().rollback(min(max(length, 0), self.length))


class ClearsOnError(HonestBackend):
    def rollback(self, length: int) -> None:
        try:
            super().rollback(length)
        except RollbackError:
            self.ids = [0] * self.length
            raise


class TakesAnyId(HonestBackend):
    def append(self, ids: Sequence[int]) -> torch.Tensor:
        return super().append([token % VOCAB for token in ids])


class KeepsHalfOfABadRequest(HonestBackend):
    def append(self, ids: Sequence[int]) -> torch.Tensor:
        good = [token for token in ids if 0 <= token < VOCAB]
        if len(good) < len(ids):
            self.ids.extend(good)
        return super().append(ids)


class WrapsAround(HonestBackend):
    def append(self, ids: Sequence[int]) -> torch.Tensor:
        if len(self.ids) + len(ids) > self.max_length:
            self.ids.clear()
            ids = ids[: self.max_length]
        return super().append(ids)


class OneTokenShort(HonestBackend):
    """Its last position does not work."""

    def append(self, ids: Sequence[int]) -> torch.Tensor:
        logits = super().append(ids)
        return logits + 1.0 if self.length == self.max_length else logits


class RemembersRequests(HonestBackend):
    """What the first request said colours the next."""

    first: int | None = None
    requests = 0

    def append(self, ids: Sequence[int]) -> torch.Tensor:
        self.first = ids[0] if self.first is None and ids else self.first
        return super().append(ids) + 1e-6 * (self.requests > 0) * (self.first or 1)

    def reset(self) -> None:
        self.requests += self.length > 0
        super().reset()


class GroupsMatter(HonestBackend):
    """Rounds differently in larger groups, as library kernels do."""

    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        return super().forward(ids) + 1e-6 * (len(ids) > 1)


class PicksAnother(HonestBackend):
    def best(self, ids: Sequence[int]) -> list[int]:
        return [(token + 1) % VOCAB for token in super().best(ids)]


class BestLeavesNothing(HonestBackend):
    """Tokens given to `best` do not get into the cache as they are."""

    def best(self, ids: Sequence[int]) -> list[int]:
        found = super().best(ids)
        self.ids[-1] = (self.ids[-1] + 1) % VOCAB
        return found


BROKEN = [
    (NeverEmpty, "fresh_backend_is_empty"),
    (HalfPrecision, "logits_have_the_right_form"),
    (SlightlyWrong, "logits_equal_the_reference"),
    (NotANumber, "logits_equal_the_reference"),
    (Drifting, "prefill_is_deterministic"),
    (KeepsOneTooMany, "rollback_and_forward_again"),
    (ForgetsThePrompt, "rollback_into_a_prompt"),
    (KeepsOneTooMany, "rejected_drafts_leave_no_trace"),
    (RollsBackTooFar, "too_long_a_rollback_is_an_error"),
    (ClearsOnError, "too_long_a_rollback_is_an_error"),
    (PicksAnother, "best_is_what_forward_says"),
    (BestLeavesNothing, "best_is_what_forward_says"),
    (TakesAnyId, "bad_ids_are_refused"),
    (KeepsHalfOfABadRequest, "bad_ids_are_refused"),
    (WrapsAround, "context_overflow_is_refused"),
    (OneTokenShort, "context_overflow_is_refused"),
    (RemembersRequests, "nothing_is_left_of_a_request"),
    (GroupsMatter, "exact_over_groupings"),
]


def subject(kind: type[HonestBackend], **options: object) -> Subject:
    return Subject(lambda: kind(**options), reference_logits, tolerance=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_length", [6, 30, 100, 5000])
def test_an_honest_backend_passes(max_length: int) -> None:
    check_backend(lambda: HonestBackend(max_length), reference_logits, tolerance=1e-6)


def test_an_honest_backend_passes_when_reused() -> None:
    backend = HonestBackend()
    check_backend(lambda: backend, reference_logits, tolerance=1e-6)


@pytest.mark.parametrize(("kind", "check"), BROKEN)
def test_a_check_finds_the_broken_rule(kind: type[HonestBackend], check: str) -> None:
    with pytest.raises(ConformanceError, match=check) as caught:
        CHECKS[check](subject(kind))
    assert caught.value.check == check


def test_every_check_can_fail() -> None:
    assert {check for _, check in BROKEN} == set(CHECKS)


def test_check_backend_raises_what_a_check_finds() -> None:
    with pytest.raises(ConformanceError, match="logits_equal_the_reference"):
        check_backend(SlightlyWrong, reference_logits, tolerance=1e-3)


def test_groupings_need_not_be_exact_where_exact_is_false() -> None:
    CHECKS["exact_over_groupings"](subject(GroupsMatter, exact=False))
