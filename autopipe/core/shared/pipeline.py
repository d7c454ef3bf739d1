"""The shared pipeline: one target, many requests, one forward a step for all of them.

A step: let waiting requests in; choose who is served (`schedule.py`); draft for those that are answering, and share
the rows out (`draft_maker.py`); one forward; verify each request by itself; emit. Nothing a request answers depends on
any of these choices: its rows do not (`fused_batch.py`), and drafts only ever confirm what the target picks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from autopipe.core.backends.batch import BatchRunner, Segment
from autopipe.core.errors import AutoPipeError, KVMemoryError
from autopipe.core.gating import StepCosts
from autopipe.core.ngram import NgramDrafter
from autopipe.core.shared.draft_maker import Drafted, DraftMaker
from autopipe.core.shared.drafting import DraftingConfig
from autopipe.core.shared.options import SharingOptions
from autopipe.core.shared.schedule import Chunk, choose_answering, choose_chunks, choose_prompt, who_gives_way
from autopipe.core.shared.sequence import Served, SharedRequest, StepReport
from autopipe.core.shared.slots import SlotKeeper

if TYPE_CHECKING:
    import torch


class _Row(NamedTuple):
    """A request's part of a step: `num_read` tokens it lacks, then drafts."""

    request: SharedRequest
    num_read: int
    drafted: Drafted

    @property
    def drafts(self) -> list[int]:
        return self.drafted.token_ids

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
        maker: the drafters.
        waiting: requests without KV, the next first.
        active: requests with KV, the one that came in first, first.
        preemptions: times a request was sent back because KV memory was short.
        about_to_compute: called with the number of rows before each forward.
    """

    def __init__(self, runner: BatchRunner, options: SharingOptions) -> None:
        self.runner = runner
        self.options = options
        self.costs = StepCosts()
        self.maker = DraftMaker(runner.max_length, options, self.costs, one_by_one=runner.one_by_one)
        self._draft_ns = 0
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
        return self.runner.kv_bytes_in_use() + self.maker.kv_bytes_in_use

    def configure(
        self,
        drafting: DraftingConfig,
        make_ngram: Callable[[], NgramDrafter] | None,
        make_apart: Callable[[], NgramDrafter] | None = None,
    ) -> None:
        """Draft otherwise from the next step on, with new n-gram drafters.

        Args:
            make_ngram, make_apart: see `DraftMaker.use_ngrams`.
        """
        for request in (*self.active, *self.waiting):
            request.ngram, request.ngram_unchanged = None, 0
        self.maker.use_ngrams(make_ngram, make_apart)
        self.maker.retune(drafting)

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
                self.slots.forget(request)
                return

    def step(self) -> StepReport:
        """Serve some of the requests; there must be work."""
        start = time.monotonic_ns()
        self._step += 1
        self._let_in()
        rows, logits = self._compute()
        prefill = any(row.num_read > 1 for row in rows)
        num_rows = sum(row.num_read + len(row.drafts) for row in rows)
        passes = self.runner.passes
        if not prefill:
            for each in passes:
                self.costs.observe(each.num_rows, each.nanoseconds / 1e9)
        served = self._verify(rows, logits)
        return StepReport(served, num_rows, prefill, start, time.monotonic_ns(), self._draft_ns, passes)

    # -- who is in ------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        self._admit_waiting()
        tired = who_gives_way(self.active, self.options.quantum_tokens) if self.waiting else None
        if tired is not None:
            self._leave(tired, comes_again=True)
            self.waiting.append(tired)
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self.waiting and len(self.active) < self.options.max_active and self._has_memory(self.waiting[0]):
            if not self.slots.admit(self.waiting[0]):
                return
            request = self.waiting.popleft()
            request.since_active = 0
            self.active.append(request)

    def _leave(self, request: SharedRequest, *, keep: bool = True, comes_again: bool = False) -> None:
        self.active.remove(request)
        self.maker.leave(request, keep=keep)
        if comes_again and self.runner.whole_prompts:
            self.slots.park(request)  # it cannot find its KV by its text, as others may not
        else:
            self.slots.release(request, keep=keep)

    def _has_memory(self, request: SharedRequest) -> bool:
        """Whether there is room for what a request must read, after giving up finished sequences if need be."""
        needed = len(request.tokens) - self.slots.num_parked(request)
        needed += self.runner.page_tokens * (len(self.active) + 1)
        while self.active:
            free = self.runner.free_tokens()
            if free is None or free >= needed:
                return True
            if not self.slots.evict(besides=request):
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

    def _compute(self) -> tuple[list[_Row], torch.Tensor | list[int]]:
        """The rows of this step, and their logits (best ids, where no row needs more)."""
        while True:
            try:
                rows = self._choose()
                self.about_to_compute(sum(row.num_read + len(row.drafts) for row in rows))
                segments = [row.segment for row in rows]
                takes_best = all(row.takes_best(self.runner.vocab_size) for row in rows)
                return rows, self.runner.best(segments) if takes_best else self.runner.forward(segments)
            except KVMemoryError:
                self._make_memory()

    def _choose(self) -> list[_Row]:
        answering, chunks = self._choose_who()
        rows = [_Row(chunk.request, chunk.num_tokens, Drafted([])) for chunk in chunks]
        base_rows = len(answering)
        if not self.runner.whole_prompts:  # else prompts have forwards of their own
            base_rows += sum(chunk.num_tokens for chunk in chunks)
        start = time.monotonic_ns()
        drafts = self.maker.draft(answering, base_rows)
        self._draft_ns = time.monotonic_ns() - start
        return rows + [_Row(request, 1, drafted) for request, drafted in zip(answering, drafts, strict=True)]

    def _choose_who(self) -> tuple[list[SharedRequest], list[Chunk]]:
        """Who gets a token, and whose prompts are read, once all that others have read already is taken over."""
        if self.runner.whole_prompts:
            answering = choose_answering(self.active, self.options.max_batch, whole_prompts=True)
            return answering, choose_prompt(self.active, len(answering), self.options)
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
        done = Served(
            request.id,
            num_read=row.num_read,
            num_drafts=len(row.drafts),
            drafter=row.drafted.drafter,
            reused=request.reused,
            drafters=self.maker.take_stats(request),
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
        self.maker.settle(request, row.drafted, verdict.num_accepted)
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
