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

from autopipe.core.backends.batch import BatchRunner, Segment
from autopipe.core.errors import AutoPipeError, KVMemoryError
from autopipe.core.gating import StepCosts
from autopipe.core.picker import Picker, Verdict
from autopipe.core.shared.options import SharingOptions
from autopipe.core.shared.sequence import SharedRequest
from autopipe.core.shared.slots import SlotKeeper
from autopipe.core.stats import StageStats

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
    def length(self) -> int:
        """Of the text and `extra`."""
        return len(self.request.tokens) + len(self.extra)


class Source(Protocol):
    """What stands before a stage of the chain."""

    @property
    def name(self) -> str:
        """What stats call it."""

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
    stats: StageStats
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
    def length(self) -> int:
        return self.want.length + len(self.token_ids)

    @property
    def missing(self) -> int:
        """Tokens to read before the next can be drafted."""
        return self.length - self.seat.cached

    @property
    def unread(self) -> list[int]:
        """These tokens; a long text is not copied for them."""
        tokens, drafted = self.want.request.tokens, self.want.extra + self.token_ids
        beyond = self.seat.cached - len(tokens)
        return drafted[beyond:] if beyond >= 0 else tokens[self.seat.cached :] + drafted

    @property
    def room(self) -> int:
        return self.want.limit - len(self.token_ids)

    @property
    def ended(self) -> bool:
        eos = self.want.request.eos_token_ids
        return self.stuck or self.room <= 0 or bool(self.token_ids and self.token_ids[-1] in eos)


class SharedDrafter:
    """One model that drafts. For one thread.

    Attributes:
        costs: seconds of a forward by rows.
        fell_short: called when it goes without drafts because KV memory is short.
        about_to_compute: called with the number of rows before each forward.
        source: what drafts for it; None: it drafts by itself.
        fed_window: most drafts of its source that it verifies at a time.
        read_ns: nanoseconds spent on reading texts, not on drafting, so far.
    """

    def __init__(self, name: str, runner: BatchRunner, options: SharingOptions) -> None:
        self.name = name
        self.runner = runner
        self.costs = StepCosts()
        self.fell_short: Callable[[], None] = lambda: None
        self.about_to_compute: Callable[[int], None] = lambda num_rows: None
        self.source: Source | None = None
        self.fed_window = 0
        self.read_ns = 0
        self._resting = 0
        self._read_rows = options.prefill_rows_alone
        self._slots = SlotKeeper(runner, options.cached_sequences if options.prefix_cache else 0)
        self._seats: dict[int, _Seat] = {}

    def draft(self, wants: Sequence[Want], *, once: bool = False) -> list[list[int]]:
        """At most `limit` tokens for each; none for a request whose text it has not read yet.

        Args:
            once: what one forward gives.
        """
        if self._resting:
            self._resting -= 1
            return [[] for _ in wants]
        while True:
            try:
                return self._draft(wants, once=once)
            except KVMemoryError:
                if self._slots.evict():
                    continue
                self.fell_short()
                self._resting = _REST_CALLS
                self.clear()
                return [[] for _ in wants]

    def _draft(self, wants: Sequence[Want], *, once: bool) -> list[list[int]]:
        drafts = [self._begin(want) for want in wants]
        open_drafts = self._read_up([draft for draft in drafts if draft is not None and not draft.ended])
        while open_drafts:
            self._advance(open_drafts)
            open_drafts = [] if once else [draft for draft in open_drafts if not draft.ended]
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

    def take_stats(self, request: SharedRequest) -> StageStats | None:
        """What it has done for a request since this was last asked; None: nothing. Seconds are shared out by rows."""
        seat = self._seats.get(request.id)
        if seat is None or not seat.stats.forwards:
            return None
        stats, seat.stats = seat.stats, StageStats(name=self.name)
        return stats

    def num_read(self, request: SharedRequest) -> int:
        """Tokens of a request's text, and of drafts after it, that its KV cache holds."""
        seat = self._seats.get(request.id)
        return 0 if seat is None else seat.cached

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
            seat = _Seat(want.request.tokens, picker, StageStats(name=self.name))
            if not self._slots.admit(seat):
                return None
            self._seats[want.request.id] = seat
        if not self._knows(seat, want.extra):
            return None
        if seat.cached >= want.length:  # asked once more: its last token is read again
            seat.cached = want.length - 1
            self.runner.rollback(seat.slot, seat.cached)
        return _Draft(want, seat) if want.length + want.limit <= self.runner.max_length else None

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
                reading.append((seat, Segment(seat.slot, draft.unread[:count], 0)))
                budget -= count
        if reading:
            _, took = self._forward([segment for _, segment in reading], takes_best=False)
            self.read_ns += took
            num_rows = sum(len(segment.ids) for _, segment in reading)
            for seat, segment in reading:
                seat.cached += len(segment.ids)
                share_s = took / 1e9 * len(segment.ids) / num_rows
                seat.stats.add(StageStats(forwards=1, busy_s=share_s, catch_up_s=share_s))
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
            Segment(draft.seat.slot, draft.unread + ids, 1 + len(ids)) for draft, ids in zip(drafts, fed, strict=True)
        ]
        num_rows = sum(len(segment.ids) for segment in segments)
        takes_best = all(draft.seat.picker.takes_best(draft.length, self.runner.vocab_size) for draft in drafts)
        found, took = self._forward(segments, takes_best=takes_best)
        self.costs.observe(num_rows, took / 1e9)
        ends = list(accumulate((segment.num_logits for segment in segments), initial=0))
        for index, (draft, ids, segment) in enumerate(zip(drafts, fed, segments, strict=True)):
            rows = found[ends[index] : ends[index + 1]]
            self._extend(draft, ids, rows, took / 1e9 * len(segment.ids) / num_rows)

    def _extend(self, draft: _Draft, fed: list[int], rows: torch.Tensor | list[int], share_s: float) -> None:
        """Add to a draft what its rows say."""
        seat, want = draft.seat, draft.want
        try:
            if isinstance(rows, list):
                verdict = seat.picker.verify_best(rows, draft.length, fed)
            else:
                verdict = seat.picker.verify(rows, want.request.tokens + want.extra + draft.token_ids, fed)
        except AutoPipeError:  # it has no token to choose; the target will see for itself
            verdict, draft.stuck = Verdict(0, []), True
        seat.cached = draft.length + verdict.num_accepted
        if fed:
            self.runner.rollback(seat.slot, seat.cached)
        num_tokens = len(verdict.token_ids)
        done = StageStats(forwards=1, emitted=num_tokens, busy_s=share_s)
        done.acceptance_lengths[num_tokens] += 1
        if self.source is not None:
            self.source.settle(want.request, seat.cached)
            done.verified, done.accepted = len(fed), verdict.num_accepted
            done.count_drafts(self.source.name, len(fed), verdict.num_accepted)
        seat.stats.add(done)
        draft.token_ids += verdict.token_ids
