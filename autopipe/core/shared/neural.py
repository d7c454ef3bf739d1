"""A neural drafter of the shared pipeline: it drafts for many requests in the same forwards.

It is a stage in lockstep, for all requests at once: each step of it is one forward over the rows of those that still
want drafts: the token drafted last, or the drafts of what comes before it, to be verified by its own picks. A prompt
is read in pieces, so that nobody waits long for somebody else's; whose prompt is not read yet gets no drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

from autopipe.core.backends.fused_batch import BatchRunner, Segment
from autopipe.core.errors import AutoPipeError, KVMemoryError
from autopipe.core.gating import StepCosts
from autopipe.core.picker import Picker, Verdict
from autopipe.core.shared.options import SharingOptions
from autopipe.core.shared.sequence import DrafterCounts, SharedRequest
from autopipe.core.shared.slots import SlotKeeper

if TYPE_CHECKING:
    import torch

MAX_CATCH_UP_ROWS = 8
"""A text that a drafter has not read further than this is read without drafts."""
_REST_CALLS = 64
"""After a shortage of KV memory it is asked so many times in vain: all texts would have to be read again."""


class Want(NamedTuple):
    """A request that wants drafts: at most `limit` tokens after its text and `extra`, drafts of a later stage."""

    request: SharedRequest
    extra: list[int]
    limit: int

    @property
    def text(self) -> list[int]:
        return self.request.tokens + self.extra


class Source(Protocol):
    """What stands before a stage of the chain."""

    def draft(self, wants: Sequence[Want]) -> list[list[int]]:
        """At most `limit` tokens for each."""

    def settle(self, request: SharedRequest, length: int) -> None:
        """The stage after it has decided: of what was drafted for a request, the text up to `length` stands."""


class DrafterFailedError(Exception):
    """A neural drafter's model has raised something."""

    def __init__(self, drafter: SharedDrafter, error: Exception) -> None:
        super().__init__(str(error))
        self.drafter, self.error = drafter, error


@dataclass(slots=True, eq=False)
class _Seat:
    """A request at this drafter. See `slots.Seated`."""

    tokens: list[int]
    picker: Picker
    counts: DrafterCounts
    slot: int = -1
    cached: int = 0
    reused: int = 0
    known: int = 0
    """Tokens of the text that are known to be tokens of this drafter; -1: one is not."""


@dataclass(slots=True, eq=False)
class _Draft:
    """A draft under way."""

    want: Want
    seat: _Seat
    token_ids: list[int] = field(default_factory=list)
    stuck: bool = False

    @property
    def text(self) -> list[int]:
        return self.want.text + self.token_ids

    @property
    def missing(self) -> int:
        """Tokens to read before the next can be drafted."""
        want = self.want
        return len(want.request.tokens) + len(want.extra) + len(self.token_ids) - self.seat.cached

    @property
    def room(self) -> int:
        return self.want.limit - len(self.token_ids)

    @property
    def ended(self) -> bool:
        text = self.token_ids
        return self.stuck or self.room <= 0 or bool(text and text[-1] in self.want.request.eos_token_ids)


class SharedDrafter:
    """One model that drafts. For one thread.

    Attributes:
        costs: seconds of a forward by rows.
        shortages: times it went without drafts because KV memory was short.
        about_to_compute: called with the number of rows before each forward.
        source: what drafts for it; None: it drafts by itself.
        fed_window: most drafts of its source that it verifies at a time.
        read_ns: nanoseconds spent on reading texts, not on drafting, so far.
    """

    def __init__(self, name: str, runner: BatchRunner, options: SharingOptions) -> None:
        self.name = name
        self.runner = runner
        self.costs = StepCosts()
        self.shortages = 0
        self.about_to_compute: Callable[[int], None] = lambda num_rows: None
        self.source: Source | None = None
        self.fed_window = 0
        self.read_ns = 0
        self._resting = 0
        self._read_rows = options.prefill_rows_alone
        self._slots = SlotKeeper(runner, options.cached_sequences if options.prefix_cache else 0)
        self._seats: dict[int, _Seat] = {}

    def draft(self, wants: Sequence[Want]) -> list[list[int]]:
        """At most `limit` tokens for each; none for a request whose text it has not read yet."""
        if self._resting:
            self._resting -= 1
            return [[] for _ in wants]
        while True:
            try:
                return self._draft(wants)
            except KVMemoryError:
                if self._slots.evict():
                    continue
                self.shortages += 1
                self._resting = _REST_CALLS
                self.clear()
                return [[] for _ in wants]

    def _draft(self, wants: Sequence[Want]) -> list[list[int]]:
        drafts = [self._begin(want) for want in wants]
        open_drafts = self._read_up([draft for draft in drafts if draft is not None and not draft.ended])
        while open_drafts:
            self._advance(open_drafts)
            open_drafts = [draft for draft in open_drafts if not draft.ended]
        return [[] if draft is None else draft.token_ids[: draft.want.limit] for draft in drafts]

    def settle(self, request: SharedRequest, length: int) -> None:
        if self.source is not None:
            self.source.settle(request, length)
        seat = self._seats.get(request.id)
        if seat is not None and seat.cached > length:
            self.runner.rollback(seat.slot, length)
            seat.cached = length

    def leave(self, request: SharedRequest, *, keep: bool) -> None:
        """A request is over, or gives way; with `keep`, what has been read may serve others."""
        seat = self._seats.pop(request.id, None)
        if seat is not None:
            self._slots.release(seat, keep=keep)

    def take_counts(self, request: SharedRequest) -> DrafterCounts | None:
        """What it has done for a request since this was last asked; None: nothing."""
        seat = self._seats.get(request.id)
        if seat is None or not seat.counts.forwards:
            return None
        counts, seat.counts = seat.counts, DrafterCounts(self.name)
        return counts

    def clear(self) -> None:
        """Forget all texts."""
        for seat in self._seats.values():
            self._slots.release(seat, keep=False)
        self._seats.clear()
        self._slots.clear()

    def close(self) -> None:
        self.runner.close()

    # -- steps ----------------------------------------------------------------------------------------------

    def _begin(self, want: Want) -> _Draft | None:
        seat = self._seats.get(want.request.id)
        if seat is None:
            picker = want.request.drafter_picker(self.runner.vocab_size)
            seat = _Seat(want.request.tokens, picker, DrafterCounts(self.name))
            if not self._slots.admit(seat):
                return None
            self._seats[want.request.id] = seat
        if not self._knows(seat, want.extra):
            return None
        length = len(want.request.tokens) + len(want.extra)
        if seat.cached >= length:  # asked once more: its last token is read again
            self.runner.rollback(seat.slot, length - 1)
            seat.cached = length - 1
        return _Draft(want, seat) if length + want.limit <= self.runner.max_length else None

    def _knows(self, seat: _Seat, extra: Sequence[int]) -> bool:
        """Whether a text has only tokens that this drafter has: its vocabulary may be smaller than the target's."""
        if seat.known >= 0:
            new = seat.tokens[seat.known :]
            seat.known = len(seat.tokens) if self._fitting(new) == len(new) else -1
        return seat.known >= 0 and self._fitting(extra) == len(extra)

    def _fitting(self, ids: Sequence[int]) -> int:
        """How many of these come before the first that is no token of this drafter."""
        return next((place for place, token in enumerate(ids) if token >= self.runner.vocab_size), len(ids))

    def _read_up(self, drafts: Sequence[_Draft]) -> list[_Draft]:
        """Read some of what is missing; those that can draft now."""
        behind = [draft for draft in drafts if draft.missing > MAX_CATCH_UP_ROWS]
        for draft in behind:
            self._slots.reuse(draft.seat, self._seats.values())
        reading, budget = list[tuple[_Seat, Segment]](), self._read_rows
        for draft in behind:
            seat, count = draft.seat, min(draft.missing - 1, budget)
            if count > 0:
                reading.append((seat, Segment(seat.slot, draft.text[seat.cached : seat.cached + count], 0)))
                budget -= count
        if reading:
            _, took = self._forward([segment for _, segment in reading], takes_best=False)
            self.read_ns += took
            num_rows = sum(len(segment.ids) for _, segment in reading)
            for seat, segment in reading:
                seat.cached += len(segment.ids)
                seat.counts.read(took * len(segment.ids) // num_rows)
        return [draft for draft in drafts if draft.missing <= MAX_CATCH_UP_ROWS]

    def _forward(self, segments: Sequence[Segment], *, takes_best: bool) -> tuple[torch.Tensor | list[int], int]:
        """Logits, or best ids, of the rows that are wanted, and the nanoseconds it took."""
        self.about_to_compute(sum(len(segment.ids) for segment in segments))
        start = time.monotonic_ns()
        try:
            found = self.runner.best(segments) if takes_best else self.runner.forward(segments)
        except KVMemoryError:
            raise
        except Exception as error:  # whatever a model may raise: the target goes on without it
            raise DrafterFailedError(self, error) from error
        return found, max(1, time.monotonic_ns() - start)

    def _feed(self, drafts: Sequence[_Draft]) -> list[list[int]]:
        """Drafts of the source, for this drafter to verify."""
        if self.source is None:
            return [[] for _ in drafts]
        wants = (
            Want(draft.want.request, draft.want.extra + draft.token_ids, min(self.fed_window, draft.room - 1))
            for draft in drafts
        )
        return [ids[: self._fitting(ids)] for ids in self.source.draft(list(wants))]

    def _advance(self, drafts: Sequence[_Draft]) -> None:
        """One forward for all: verify what the source drafts, and add a token to each."""
        fed = self._feed(drafts)
        segments = [
            Segment(d.seat.slot, d.text[d.seat.cached :] + ids, 1 + len(ids))
            for d, ids in zip(drafts, fed, strict=True)
        ]
        num_rows = sum(len(segment.ids) for segment in segments)
        takes_best = all(d.seat.picker.takes_best(len(d.text), self.runner.vocab_size) for d in drafts)
        found, took = self._forward(segments, takes_best=takes_best)
        self.costs.observe(num_rows, took / 1e9)
        ends = list(accumulate((segment.num_logits for segment in segments), initial=0))
        for index, (draft, ids, segment) in enumerate(zip(drafts, fed, segments, strict=True)):
            rows = found[ends[index] : ends[index + 1]]
            self._settle(draft, ids, rows, took * len(segment.ids) // num_rows)

    def _settle(self, draft: _Draft, fed: list[int], rows: torch.Tensor | list[int], nanoseconds: int) -> None:
        """Add to a draft what its rows say."""
        seat, text = draft.seat, draft.text
        try:
            if isinstance(rows, list):
                verdict = seat.picker.verify_best(rows, len(text), fed)
            else:
                verdict = seat.picker.verify(rows, text, fed)
        except AutoPipeError:  # it has no token to choose; the target will see for itself
            verdict, draft.stuck = Verdict(0, []), True
        seat.cached = len(text) + verdict.num_accepted
        if fed:
            self.runner.rollback(seat.slot, seat.cached)
        if self.source is not None:
            self.source.settle(draft.want.request, seat.cached)
        draft.token_ids += verdict.token_ids
        seat.counts.step(nanoseconds, len(fed), verdict.num_accepted, len(verdict.token_ids))
