"""The shared pipeline: one target, many requests, one forward a step for all of them.

A step: let waiting requests in; choose who is served (`schedule.py`); draft for those that are answering, and share
the rows out (`drafts.py`); one forward; verify each request by itself; emit. Nothing a request answers depends on any
of these choices: its rows do not (`fused_batch.py`), and drafts only ever confirm what the target picks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from autopipe.core.backends.fused_batch import BatchRunner, Segment
from autopipe.core.errors import AutoPipeError, KVMemoryError
from autopipe.core.gating import StepCosts
from autopipe.core.ngram import NgramDrafter
from autopipe.core.shared.drafting import DraftingConfig
from autopipe.core.shared.drafts import share_rows
from autopipe.core.shared.neural import DrafterFailedError, SharedDrafter, Source, Want
from autopipe.core.shared.ngram_source import NgramSource
from autopipe.core.shared.options import SharingOptions
from autopipe.core.shared.schedule import Chunk, choose_answering, choose_chunks, who_gives_way
from autopipe.core.shared.sequence import Served, SharedRequest, StepReport
from autopipe.core.shared.slots import SlotKeeper
from autopipe.core.shared.worth import WindowWorth
from autopipe.core.stats import NGRAM

if TYPE_CHECKING:
    import torch


class _Row(NamedTuple):
    """A request's part of a step: `num_read` tokens it lacks, then drafts."""

    request: SharedRequest
    num_read: int
    drafts: list[int]
    drafter: str = NGRAM
    """Whose drafts they are, as stats call it."""

    @property
    def chooses(self) -> bool:
        """Whether its last token is read, so that the next can be chosen."""
        return self.num_read == self.request.missing

    @property
    def num_logits(self) -> int:
        return 1 + len(self.drafts) if self.chooses else 0

    def takes_best(self, vocab_size: int) -> bool:
        """Whether the largest logits are all it needs."""
        return not self.chooses or self.request.picker.takes_best(len(self.request.tokens), vocab_size)

    @property
    def segment(self) -> Segment:
        request = self.request
        ids = request.tokens[request.cached : request.cached + self.num_read] + self.drafts
        return Segment(request.slot, ids, self.num_logits)


class SharedPipeline:
    """Requests on one batch runner. For one thread.

    Attributes:
        costs: seconds of a forward by rows, as measured; kept from request to request.
        worth: what neural drafts are worth, likewise, as long as the same drafters draft.
        waiting: requests without KV, the next first.
        active: requests with KV, the one that came in first, first.
        drafters: neural ones that are loaded, by key, used or not.
        failed: called with key and name of a neural drafter that has raised, and what; it is gone then.
        preemptions: times a request was sent back because KV memory was short.
        about_to_compute: called with the number of rows before each forward.
    """

    def __init__(self, runner: BatchRunner, options: SharingOptions) -> None:
        self.runner = runner
        self.options = options
        self.costs = StepCosts()
        self.worth = WindowWorth()
        self.make_worth: Callable[[], WindowWorth] = WindowWorth
        self.drafting = DraftingConfig()
        self.drafters: dict[str, SharedDrafter] = {}
        self.failed: Callable[[str, str, Exception], None] = lambda key, name, error: None
        self._ngrams: NgramSource | None = None
        self._chain: list[SharedDrafter] = []
        self._draft_ns = 0
        self._trial: SharedRequest | None = None  # it drafts the whole window until it has once
        self._trials = 0
        self.waiting: deque[SharedRequest] = deque()
        self.active: list[SharedRequest] = []
        self.slots = SlotKeeper(runner, options.cached_sequences if options.prefix_cache else 0)
        self.preemptions = 0
        self.about_to_compute: Callable[[int], None] = lambda num_rows: None
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self.active or self.waiting)

    @property
    def kv_bytes_in_use(self) -> int:
        """Memory of all KV caches, the drafters' included."""
        runners = [self.runner, *(drafter.runner for drafter in self.drafters.values())]
        return sum(runner.kv_bytes_in_use() for runner in runners)

    @property
    def drafter_names(self) -> list[str]:
        """The neural drafters that take part, cheapest first."""
        return [drafter.name for drafter in self._chain]

    def configure(self, drafting: DraftingConfig, make_ngram: Callable[[], NgramDrafter] | None) -> None:
        """Draft otherwise from the next step on. Neural drafters take part as soon as they are there.

        Args:
            make_ngram: builds an n-gram drafter for one request; None: there is none.
        """
        self._ngrams = None if make_ngram is None else NgramSource(make_ngram, self.runner.max_length)
        for request in (*self.active, *self.waiting):
            request.ngram, request.ngram_unchanged = None, 0
        self.retune(drafting)

    def retune(self, drafting: DraftingConfig) -> None:
        """As `configure`, with the n-gram drafters there are."""
        self.drafting = drafting
        self._link()

    def add_drafter(self, key: str, drafter: SharedDrafter) -> None:
        """A neural drafter has been loaded."""
        drafter.about_to_compute = self.about_to_compute
        self.drafters[key] = drafter
        self._link()

    def remove_drafter(self, key: str) -> None:
        """Unload a neural drafter."""
        drafter = self.drafters.pop(key, None)
        if drafter is not None:
            self._link()
            drafter.close()

    def _link(self) -> None:
        """Let each neural drafter that takes part have what comes before it for its source."""
        before: Source | None = self._ngrams
        chain = []
        for wanted in self.drafting.neural:
            drafter = self.drafters.get(wanted.key)
            if drafter is not None:
                drafter.name, drafter.source, drafter.fed_window = wanted.name, before, wanted.fed_window
                if isinstance(before, NgramSource):
                    before.costs = drafter.costs if self.drafting.gate else None
                before = drafter
                chain.append(drafter)
        for drafter in self._chain:
            if drafter not in chain:
                drafter.clear()
        if chain != self._chain:
            self.worth = self.make_worth()
        self._chain = chain

    def begin(self, request: SharedRequest) -> None:
        self.waiting.append(request)

    def cancel(self, number: int) -> None:
        """Forget a request, wherever it is."""
        for request in self.active:
            if request.id == number:
                self._leave(request)
                return
        for request in self.waiting:
            if request.id == number:
                self.waiting.remove(request)
                return

    def step(self) -> StepReport:
        """Serve some of the requests; there must be work."""
        start = time.monotonic_ns()
        self._step += 1
        self._let_in()
        rows, logits, forward_ns = self._compute()
        prefill = any(row.num_read > 1 for row in rows)
        num_rows = sum(row.num_read + len(row.drafts) for row in rows)
        if not prefill:
            self.costs.observe(num_rows, max(1, forward_ns) / 1e9)
        served = self._verify(rows, logits)
        return StepReport(served, num_rows, prefill, start, time.monotonic_ns(), self._draft_ns, forward_ns)

    # -- who is in ------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        self._admit_waiting()
        tired = who_gives_way(self.active, self.options.quantum_tokens) if self.waiting else None
        if tired is not None:
            self._leave(tired)
            self.waiting.append(tired)
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self.waiting and len(self.active) < self.options.max_active and self._has_memory(self.waiting[0]):
            if not self.slots.admit(self.waiting[0]):
                return
            request = self.waiting.popleft()
            request.since_active = 0
            self.active.append(request)

    def _leave(self, request: SharedRequest, *, keep: bool = True) -> None:
        self.active.remove(request)
        if request.ngram is not None:
            request.ngram.reset()  # it may learn from the text, for other requests
            request.ngram, request.ngram_unchanged = None, 0
        for drafter in self._chain:
            drafter.leave(request, keep=keep)
        self.slots.release(request, keep=keep)

    def _has_memory(self, request: SharedRequest) -> bool:
        """Whether there is room for what a request must read, after giving up finished sequences if need be."""
        needed = len(request.tokens) + self.runner.page_tokens * (len(self.active) + 1)
        while self.active:
            free = self.runner.free_tokens()
            if free is None or free >= needed:
                return True
            if not self.slots.evict():
                return False
        return True

    def _make_memory(self) -> None:
        """Give up a finished sequence, or else send the youngest request back to wait, its KV forgotten."""
        if self.slots.evict():
            return
        if len(self.active) < 2:
            raise KVMemoryError("the KV memory does not hold even one request; raise kv_bytes")
        youngest = self.active[-1]
        self._leave(youngest, keep=False)
        self.waiting.appendleft(youngest)
        self.preemptions += 1

    # -- the forward ----------------------------------------------------------------------------------------

    def _compute(self) -> tuple[list[_Row], torch.Tensor | list[int], int]:
        """The rows of this step, their logits (best ids, where no row needs more), and the forward's nanoseconds."""
        while True:
            try:
                rows = self._choose()
                start = time.monotonic_ns()
                self.about_to_compute(sum(row.num_read + len(row.drafts) for row in rows))
                segments = [row.segment for row in rows]
                takes_best = all(row.takes_best(self.runner.vocab_size) for row in rows)
                found = self.runner.best(segments) if takes_best else self.runner.forward(segments)
                return rows, found, time.monotonic_ns() - start
            except KVMemoryError:
                self._make_memory()

    def _choose(self) -> list[_Row]:
        answering, chunks = self._choose_who()
        rows = [_Row(chunk.request, chunk.num_tokens, []) for chunk in chunks]
        base_rows = len(answering) + sum(chunk.num_tokens for chunk in chunks)
        start = time.monotonic_ns()
        drafted = self._draft(answering, base_rows)
        self._draft_ns = time.monotonic_ns() - start
        return rows + drafted

    def _choose_who(self) -> tuple[list[SharedRequest], list[Chunk]]:
        """Who gets a token, and whose prompts are read, once all that others have read already is taken over."""
        asked: set[int] = set()
        while True:
            answering = choose_answering(self.active, self.options.max_batch)
            chunks = choose_chunks(self.active, len(answering), self.options)
            new = [chunk.request for chunk in chunks if chunk.request.id not in asked]
            if not new:
                return answering, chunks
            for request in new:
                asked.add(request.id)
                self.slots.reuse(request, self.active)

    def _draft(self, answering: Sequence[SharedRequest], base_rows: int) -> list[_Row]:
        """The rows of those that are answering."""
        room = max(base_rows, self.options.max_rows)
        fair = (room - base_rows) // max(1, len(answering))  # drafts of each, so that all have room
        neural = self._draft_neurally(answering, base_rows, fair)
        used = base_rows + sum(map(len, neural.values()))
        copied = self._draft_by_ngram([each for each in answering if each.id not in neural], used, fair, room)
        rows = []
        for request in answering:
            if request.id in neural:
                rows.append(_Row(request, 1, neural[request.id], self._chain[-1].name))
            else:
                rows.append(_Row(request, 1, copied.get(request.id, []), NGRAM))
        return rows

    def _draft_by_ngram(
        self, requests: Sequence[SharedRequest], base_rows: int, fair: int, room: int
    ) -> dict[int, list[int]]:
        """Drafts of the n-gram drafters, by the number of the request, as many as pay and there is room for."""
        if self._ngrams is None:
            return {}
        proposals = [self._ngrams.propose(request, [], self._limit(request)) for request in requests]
        counts = [fair] * len(requests)
        if self.drafting.gate:
            counts = share_rows([chances for _, chances in proposals], self.costs, base_rows, float(base_rows), room)
        return {each.id: ids[:count] for each, (ids, _), count in zip(requests, proposals, counts, strict=True)}

    def _limit(self, request: SharedRequest) -> int:
        """Most drafts for a request."""
        length = len(request.tokens)
        room = min(request.end - length - 1, self.runner.max_length - length)
        generated, budget = length - request.prompt_length, request.end - request.prompt_length
        return max(0, min(self.drafting.opened(self.drafting.window, generated, budget), room))

    def _draft_neurally(self, answering: Sequence[SharedRequest], base_rows: int, fair: int) -> dict[int, list[int]]:
        """Drafts of the last neural drafter, by the number of the request, of those for whom they are worth it."""
        windows = self._windows(answering, base_rows)
        limits = {each.id: min(self._limit(each), fair, windows[each.id]) for each in answering}
        wants = [Want(each, [], limits[each.id]) for each in answering if limits[each.id]]
        start, read_before = time.monotonic_ns(), self._read_ns()
        while wants and self._chain:  # one that fails is left out from now on
            try:
                drafts = self._chain[-1].draft(wants)
            except DrafterFailedError as failure:
                key = next(key for key, drafter in self.drafters.items() if drafter is failure.drafter)
                self.remove_drafter(key)
                self.failed(key, failure.drafter.name, failure.error)
                continue
            depths = [len(ids) for ids in drafts if ids]
            seconds = (time.monotonic_ns() - start - self._read_ns() + read_before) / 1e9
            self.worth.observe_drafting(len(depths), max(depths, default=0), seconds)
            found = {want.request.id: ids for want, ids in zip(wants, drafts, strict=True) if ids}
            if self._trial is not None and self._trial.id in found:
                self._trial = None
            return found
        return {}

    def _read_ns(self) -> int:
        return sum(drafter.read_ns for drafter in self._chain)

    def _windows(self, answering: Sequence[SharedRequest], base_rows: int) -> dict[int, int]:
        """Most neural drafts of each: as many as pay, or the whole window for one that tries whether more would."""
        if not self._chain:
            return dict.fromkeys((request.id for request in answering), 0)
        whole = self.drafting.window
        common = self.worth.window(len(answering), whole, base_rows, self.costs)
        if self._trial not in self.active:
            self._trial = None
        if self.worth.trial_is_due() and self._trial is None and answering:
            self._trials += 1
            self._trial = answering[self._trials % len(answering)]
        return {request.id: whole if request is self._trial else common for request in answering}

    # -- what came of it ------------------------------------------------------------------------------------

    def _verify(self, rows: Sequence[_Row], logits: torch.Tensor | list[int]) -> list[Served]:
        served: list[Served] = []
        begin = 0
        for row in rows:
            end = begin + row.num_logits
            served.append(self._settle(row, logits[begin:end]))
            begin = end
        return served

    def _settle(self, row: _Row, logits: torch.Tensor | list[int]) -> Served:
        request = row.request
        counts = [found for drafter in self._chain if (found := drafter.take_counts(request)) is not None]
        done = Served(
            request.id,
            num_read=row.num_read,
            num_drafts=len(row.drafts),
            drafter=row.drafter,
            reused=request.reused,
            drafters=counts,
        )
        request.served_step, request.reused = self._step, 0
        if not row.chooses:
            request.cached += row.num_read
            return done
        length = len(request.tokens)
        try:
            if isinstance(logits, list):
                verdict = request.picker.verify_best(logits, length, row.drafts)
            else:
                verdict = request.picker.verify(logits, request.tokens, row.drafts)
        except AutoPipeError as error:
            request.cached = length
            self._leave(request, keep=False)
            return replace(done, error=error)
        tokens = request.up_to_end(verdict.token_ids)
        request.tokens += tokens
        request.since_active += len(tokens)
        request.cached = min(length + verdict.num_accepted, len(request.tokens))
        if row.drafts:
            self.runner.rollback(request.slot, request.cached)
        if self._chain:
            self._chain[-1].settle(request, request.cached)
            if row.drafts and row.drafter != NGRAM:
                self.worth.observe_verdict(len(row.drafts), verdict.num_accepted)
        reason = request.finish_reason
        if reason is not None:
            self._leave(request)
        return replace(
            done,
            token_ids=tokens,
            logprobs=verdict.logprobs and verdict.logprobs[: len(tokens)],
            num_accepted=verdict.num_accepted,
            finish_reason=reason,
        )
