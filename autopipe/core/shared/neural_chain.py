"""The neural drafters of a chain as the pipeline sees them: stages that take turns, or that work at the same time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from autopipe.core.shared.ahead import Ahead, Watch
from autopipe.core.shared.drafting import DraftingConfig, NeuralDrafting
from autopipe.core.shared.neural import SharedDrafter, Source, Want
from autopipe.core.shared.ngram_source import NgramSource
from autopipe.core.shared.sequence import SharedRequest
from autopipe.core.stats import StageStats


class NeuralChain(ABC):
    """Drafters, cheapest first; there may be none. For the pipeline's thread."""

    def __init__(self, drafters: Sequence[SharedDrafter]) -> None:
        self.drafters = list(drafters)

    @property
    def read_ns(self) -> int:
        """Nanoseconds that `draft` has spent on reading texts so far."""
        return sum(drafter.read_ns for drafter in self.drafters)

    @abstractmethod
    def set_up(self, parts: Sequence[NeuralDrafting], drafting: DraftingConfig, ngrams: NgramSource | None) -> None:
        """Let each drafter have what comes before it for its source.

        Args:
            parts: of the drafters, in their order.
            ngrams: what drafts for the first of them.
        """

    @abstractmethod
    def draft(self, wants: Sequence[Want]) -> list[list[int]]:
        """Drafts of the last drafter; raises DrafterFailedError for any."""

    @abstractmethod
    def settle(self, request: SharedRequest, length: int) -> None:
        """The target has decided: of what was drafted for a request, the text up to `length` stands."""

    @abstractmethod
    def leave(self, request: SharedRequest, *, keep: bool) -> None:
        """See `SharedDrafter.leave`."""

    @abstractmethod
    def take_stats(self, request: SharedRequest) -> list[StageStats]:
        """What drafters have done for a request since this was last asked."""

    @abstractmethod
    def resting(self, drafter: SharedDrafter) -> AbstractContextManager[None]:
        """The drafter computes nothing meanwhile."""

    @contextmanager
    def all_resting(self) -> Generator[None]:
        """None of them does."""
        with ExitStack() as stack:
            for drafter in reversed(self.drafters):  # the last may be waiting for those before it
                stack.enter_context(self.resting(drafter))
            yield

    @abstractmethod
    def stop(self, staying: Collection[SharedDrafter] = ()) -> None:
        """Another chain takes the place of this one; `staying` drafters are in it."""


class TurnsChain(NeuralChain):
    """Drafters that work when they are asked, in the pipeline's thread."""

    def set_up(self, parts: Sequence[NeuralDrafting], drafting: DraftingConfig, ngrams: NgramSource | None) -> None:
        source: Source | None = ngrams
        for part, drafter in zip(parts, self.drafters, strict=True):
            drafter.source, drafter.fed_window = source, part.fed_window
            _weigh(source, drafter, drafting)
            source = drafter

    def draft(self, wants: Sequence[Want]) -> list[list[int]]:
        return self.drafters[-1].draft(wants)

    def settle(self, request: SharedRequest, length: int) -> None:
        self.drafters[-1].settle(request, length)

    def leave(self, request: SharedRequest, *, keep: bool) -> None:
        for drafter in self.drafters:
            drafter.leave(request, keep=keep)

    def take_stats(self, request: SharedRequest) -> list[StageStats]:
        return [found for drafter in self.drafters if (found := drafter.take_stats(request)) is not None]

    def resting(self, drafter: SharedDrafter) -> AbstractContextManager[None]:
        return nullcontext()

    def stop(self, staying: Collection[SharedDrafter] = ()) -> None:
        for drafter in self.drafters:
            if drafter not in staying:
                drafter.clear()


class AheadChain(NeuralChain):
    """Drafters that work at the same time, each in a thread of its own.

    Args:
        max_batch: requests in one of a drafter's forwards.
    """

    read_ns = 0
    """Nobody waits for what they read."""

    def __init__(self, drafters: Sequence[SharedDrafter], max_batch: int) -> None:
        super().__init__(drafters)
        self._watch = Watch()
        self._stages = [Ahead(drafter, max_batch, self._watch) for drafter in drafters]

    def set_up(self, parts: Sequence[NeuralDrafting], drafting: DraftingConfig, ngrams: NgramSource | None) -> None:
        with self.all_resting():
            source: Source | None = ngrams
            for part, stage in zip(parts, self._stages, strict=True):
                stage.set_up(source, part, drafting.warmup, is_last=stage is self._stages[-1])
                _weigh(source, stage.drafter, drafting)
                source = stage

    def draft(self, wants: Sequence[Want]) -> list[list[int]]:
        for stage in self._stages:
            stage.report()
        return self._stages[-1].draft(wants)

    def settle(self, request: SharedRequest, length: int) -> None:
        self._stages[-1].settle(request, length)

    def leave(self, request: SharedRequest, *, keep: bool) -> None:
        for stage in self._stages[-1:]:  # it tells the one before it
            stage.leave(request, keep=keep)

    def take_stats(self, request: SharedRequest) -> list[StageStats]:
        return [found for stage in self._stages if (found := stage.take_stats(request)) is not None]

    def resting(self, drafter: SharedDrafter) -> AbstractContextManager[None]:
        for stage in self._stages:
            if stage.drafter is drafter:
                return stage.resting()
        return nullcontext()

    def stop(self, staying: Collection[SharedDrafter] = ()) -> None:
        for stage in reversed(self._stages):  # the last may be waiting for those before it
            stage.stop()


def _weigh(source: Source | None, drafter: SharedDrafter, drafting: DraftingConfig) -> None:
    """Let drafts of an n-gram be weighed against what their rows cost the neural drafter after it."""
    if isinstance(source, NgramSource):
        source.costs = drafter.costs if drafting.gate else None
