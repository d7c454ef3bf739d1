"""What a drafter that works ahead knows of one request: the consumer's text, and its own drafts after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopipe.core.shared.neural import Want
from autopipe.core.shared.sequence import SharedRequest
from autopipe.core.stats import StageStats


@dataclass(slots=True, eq=False)
class Lane:
    """Shared by the consumer's thread and the drafter's, under the lock of their `Ahead`; `mirror` is the drafter's.

    The sequence is the mirror's text and then `tail`, whose first `given` tokens are the consumer's (text that the
    mirror lacks, and drafts of the consumer's own); the rest are drafts for it.

    Attributes:
        mirror: the request, for the drafter: a copy, which changes only between two of its forwards.
        text: length of the text that the consumer has told.
        under_way: `tail` as the forward under way knows it; None: there is none.
        cut: tokens of the sequence at most that the drafter's KV cache may hold; None: it is right.
        reading: the drafter is still reading the text.
        barren: the drafter has nothing to add until the text changes.
        stats: what the drafter has done, not asked for yet.
    """

    mirror: SharedRequest
    text: int
    tail: list[int] = field(default_factory=list)
    given: int = 0
    under_way: list[int] | None = None
    cut: int | None = None
    reading: bool = False
    barren: bool = False
    stats: StageStats | None = None

    @classmethod
    def of(cls, request: SharedRequest) -> Lane:
        mirror = SharedRequest(
            id=request.id,
            tokens=list(request.tokens),
            prompt_length=request.prompt_length,
            end=request.end,
            eos_token_ids=request.eos_token_ids,
            picker=request.picker,
            drafter_picker=request.drafter_picker,
        )
        return cls(mirror, len(mirror.tokens))

    @property
    def drafts(self) -> list[int]:
        return self.tail[self.given :]

    @property
    def num_drafts(self) -> int:
        return len(self.tail) - self.given

    def room(self, window: int, max_length: int) -> int:
        """Drafts that may be added, at most `window` in all."""
        if self.num_drafts and self.tail[-1] in self.mirror.eos_token_ids:
            return 0
        longest = min(self.mirror.end - 1, max_length)
        return min(window - self.num_drafts, longest - len(self.mirror.tokens) - len(self.tail))

    # -- the consumer's side --------------------------------------------------------------------------------

    def tell(self, tokens: Sequence[int], extra: Sequence[int]) -> None:
        """The consumer's text is `tokens`, and it has drafted `extra` after it. Drafts that go on from there stay."""
        told = [*tokens[len(self.mirror.tokens) :], *extra]
        self.text = len(tokens)
        if told != self.tail[: self.given]:
            self.barren = False
        shared = _num_common(self.tail, told)
        if shared < len(told):
            if self.under_way is None:
                self._cut_at(shared)
            self.tail = told
        self.given = len(told)

    # -- the drafter's side ---------------------------------------------------------------------------------

    def begin(self, limit: int) -> Want:
        """What to draft now, at most so many tokens; the mirror takes over the text so far."""
        new = self.text - len(self.mirror.tokens)
        self.mirror.tokens += self.tail[:new]
        del self.tail[:new]
        self.given -= new
        self.under_way = list(self.tail)
        return Want(self.mirror, list(self.tail), limit)

    def take(self, drafts: Sequence[int], *, has_read: bool) -> None:
        """The drafter has added `drafts` to what it was asked for, or read something (`has_read`), or neither."""
        known = [*(self.under_way or ()), *drafts]
        self.under_way = None
        told = self.tail[: self.given]
        shared = _num_common(known, told)
        if shared == len(told):
            self.tail = known
        else:
            self._cut_at(shared)
        self.reading = has_read and not drafts
        self.barren = not drafts and not has_read and shared == len(told)

    def _cut_at(self, place: int) -> None:
        cut = len(self.mirror.tokens) + place
        self.cut = cut if self.cut is None else min(self.cut, cut)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)
