"""Who drafts what in a step of the shared pipeline: neural drafters where they are worth it, n-grams elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from autopipe.core.gating import StepCosts, best_length
from autopipe.core.ngram import NgramDrafter
from autopipe.core.shared.drafting import DraftingConfig
from autopipe.core.shared.drafts import share_rows
from autopipe.core.shared.neural import DrafterFailedError, SharedDrafter, Want
from autopipe.core.shared.neural_chain import AheadChain, NeuralChain, TurnsChain
from autopipe.core.shared.ngram_source import NgramSource
from autopipe.core.shared.options import SharingOptions
from autopipe.core.shared.sequence import SharedRequest
from autopipe.core.shared.window_gate import WindowGate
from autopipe.core.stats import NGRAM, StageStats


class Drafted(NamedTuple):
    """Drafts for one request, and whose they are, as stats call it."""

    token_ids: list[int]
    drafter: str = NGRAM


class DraftMaker:
    """The drafters in front of a shared target. For one thread.

    Args:
        max_length: of the target.
        costs: seconds of its forward by rows.
        one_by_one: it serves requests one after another: drafts cost each what they would alone.

    Attributes:
        drafting: what is wanted of the plan in force.
        drafters: neural ones that are loaded, by key, used or not.
        gate: learns what neural drafts are worth, as long as the same drafters draft.
        make_gate: makes a new one of these.
        failed: called with key and name of a neural drafter that has raised, and what; it is gone then.
    """

    def __init__(self, max_length: int, options: SharingOptions, costs: StepCosts, *, one_by_one: bool = False) -> None:
        self.drafting = DraftingConfig()
        self.drafters: dict[str, SharedDrafter] = {}
        self.gate = WindowGate()
        self.make_gate: Callable[[], WindowGate] = WindowGate
        self.failed: Callable[[str, str, Exception], None] = lambda key, name, error: None
        self._max_length, self._max_rows, self._costs = max_length, options.max_rows, costs
        self._one_by_one = one_by_one
        self._max_batch = options.max_batch
        self._ngrams: NgramSource | None = None
        self._apart: NgramSource | None = None
        self._chain: NeuralChain = TurnsChain([])
        self._trial: SharedRequest | None = None  # it drafts the whole window until it has once
        self._trials = 0

    @property
    def names(self) -> list[str]:
        """The neural drafters that take part, cheapest first."""
        return [drafter.name for drafter in self._chain.drafters]

    @property
    def kv_bytes_in_use(self) -> int:
        """Memory of the neural drafters' KV caches."""
        return sum(drafter.runner.kv_bytes_in_use() for drafter in self.drafters.values())

    def use_ngrams(
        self, make: Callable[[], NgramDrafter] | None, make_apart: Callable[[], NgramDrafter] | None = None
    ) -> None:
        """Build an n-gram drafter for each request by `make`; None: there is none.

        Args:
            make_apart: builds those for a neural drafter that works in another thread; None: as `make`.
        """
        self._ngrams = None if make is None else NgramSource(make, self._max_length)
        self._apart = None if make is None else NgramSource(make_apart or make, self._max_length)

    def retune(self, drafting: DraftingConfig) -> None:
        """Draft otherwise from the next step on. Neural drafters take part as soon as they are there."""
        self.drafting = drafting
        if self._ngrams is not None:
            self._ngrams.learns_online = drafting.ahead and drafting.ngram is not None and drafting.ngram.online
        self._link()

    def add(self, key: str, drafter: SharedDrafter) -> None:
        """A neural drafter has been loaded."""
        self.drafters[key] = drafter
        self._link()

    def remove(self, key: str) -> None:
        """Unload a neural drafter."""
        drafter = self.drafters.pop(key, None)
        if drafter is not None:
            self._link()
            drafter.close()

    def resting(self) -> AbstractContextManager[None]:
        """No neural drafter computes meanwhile."""
        return self._chain.all_resting()

    def set_threads(self, key: str, threads: int) -> None:
        """Let a neural drafter that is loaded compute with so many threads."""
        drafter = self.drafters[key]
        with self._chain.resting(drafter):
            drafter.runner.set_threads(threads)

    def leave(self, request: SharedRequest, *, keep: bool) -> None:
        """A request is over, or gives way; with `keep`, what has been read may serve others."""
        if self._ngrams is not None:
            self._ngrams.learn(request)
        if request is self._trial:
            self._trial = None
        self._chain.leave(request, keep=keep)

    def settle(self, request: SharedRequest, drafted: Drafted, num_accepted: int) -> None:
        """The target has decided on a request's drafts; its KV cache says how much of the text stands."""
        if not self._chain.drafters:
            return
        self._chain.settle(request, request.cached)
        if drafted.token_ids and drafted.drafter != NGRAM:
            self.gate.observe_verdict(len(drafted.token_ids), num_accepted)

    def take_stats(self, request: SharedRequest) -> list[StageStats]:
        """What neural drafters have done for a request since this was last asked."""
        return self._chain.take_stats(request)

    def draft(self, answering: Sequence[SharedRequest], base_rows: int) -> list[Drafted]:
        """Drafts for each of those that are answering.

        Args:
            base_rows: rows of the step without drafts.
        """
        room = max(base_rows, self._max_rows)
        fair = (room - base_rows) // max(1, len(answering))  # drafts of each, so that all have room
        neural = self._neural(answering, base_rows, fair)
        used = base_rows + sum(len(drafted.token_ids) for drafted in neural.values())
        copied = self._copied([each for each in answering if each.id not in neural], used, fair, room)
        return [neural.get(each.id) or Drafted(copied.get(each.id, [])) for each in answering]

    def _link(self) -> None:
        """Make a chain of the neural drafters that are wanted and loaded."""
        parts = [each for each in self.drafting.neural if each.key in self.drafters]
        drafters = [self.drafters[each.key] for each in parts]
        for each, drafter in zip(parts, drafters, strict=True):
            drafter.name = each.name
        before, ahead = self._chain, self.drafting.ahead
        if drafters != before.drafters or ahead != isinstance(before, AheadChain):
            before.stop(drafters)
            self._chain = AheadChain(drafters, self._max_batch) if ahead else TurnsChain(drafters)
            self.gate = self.make_gate()
        self._chain.set_up(parts, self.drafting, self._apart if ahead else self._ngrams)

    def _copied(self, requests: Sequence[SharedRequest], base_rows: int, fair: int, room: int) -> dict[int, list[int]]:
        """Drafts of the n-gram drafters, by the number of the request, as many as pay and there is room for."""
        if self._ngrams is None:
            return {}
        proposals = [self._ngrams.propose(request, [], self._limit(request)) for request in requests]
        counts = [fair] * len(requests)
        if self.drafting.gate and self._one_by_one:
            counts = [min(fair, best_length(chances, self._costs)) for _, chances in proposals]
        elif self.drafting.gate:
            counts = share_rows([chances for _, chances in proposals], self._costs, base_rows, float(base_rows), room)
        return {each.id: ids[:count] for each, (ids, _), count in zip(requests, proposals, counts, strict=True)}

    def _limit(self, request: SharedRequest) -> int:
        """Most drafts for a request."""
        length = len(request.tokens)
        room = min(request.end - length - 1, self._max_length - length)
        generated, budget = length - request.prompt_length, request.end - request.prompt_length
        return max(0, min(self.drafting.limit(generated, budget), room))

    def _neural(self, answering: Sequence[SharedRequest], base_rows: int, fair: int) -> dict[int, Drafted]:
        """Drafts of the last neural drafter, by the number of the request, of those for whom they are worth it."""
        windows = self._windows(answering, base_rows)
        limits = {each.id: min(self._limit(each), fair, windows[each.id]) for each in answering}
        wants = [Want(each, [], limits[each.id]) for each in answering if limits[each.id]]
        while wants and self._chain.drafters:  # one that fails is left out from now on
            chain, start, read_ns = self._chain, time.monotonic_ns(), self._chain.read_ns
            try:
                drafts = chain.draft(wants)
            except DrafterFailedError as failure:
                key = next(key for key, drafter in self.drafters.items() if drafter is failure.drafter)
                self.remove(key)
                self.failed(key, failure.drafter.name, failure.error)
                continue
            depths = [len(ids) for ids in drafts if ids]
            drafting_ns = time.monotonic_ns() - start - (chain.read_ns - read_ns)
            self.gate.observe_drafting(len(depths), max(depths, default=0), drafting_ns / 1e9)
            last = chain.drafters[-1].name
            found = {want.request.id: Drafted(ids, last) for want, ids in zip(wants, drafts, strict=True) if ids}
            if self._trial is not None and self._trial.id in found:
                self._trial = None
            return found
        return {}

    def _windows(self, answering: Sequence[SharedRequest], base_rows: int) -> dict[int, int]:
        """Most neural drafts of each: as many as pay, or the whole window for one that tries whether more would."""
        if not self._chain.drafters:
            return dict.fromkeys((request.id for request in answering), 0)
        whole = self.drafting.window
        num_together = 1 if self._one_by_one else len(answering)
        common = self.gate.window(num_together, whole, base_rows, self._costs)
        if self.gate.trial_is_due() and self._trial is None and answering:
            self._trials += 1
            self._trial = answering[self._trials % len(answering)]
        return {request.id: whole if request is self._trial else common for request in answering}
