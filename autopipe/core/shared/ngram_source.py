"""The n-gram drafters of the shared pipeline, one for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopipe.core.gating import StepCosts, best_length
from autopipe.core.ngram import NgramDrafter
from autopipe.core.shared.neural import Want
from autopipe.core.shared.sequence import SharedRequest
from autopipe.core.stats import NGRAM


class NgramSource:
    """Drafts for the target, or for a neural drafter.

    Args:
        make: builds the drafter of one request.
        max_length: of the target.

    Attributes:
        costs: of the neural drafter after it, against which drafts are weighed; None: they are not.
        learns_online: drafters learn from texts for which they have not drafted, too.
    """

    name = NGRAM

    def __init__(self, make: Callable[[], NgramDrafter], max_length: int) -> None:
        self.costs: StepCosts | None = None
        self.learns_online = False
        self._make, self._max_length = make, max_length

    def draft(self, wants: Sequence[Want]) -> list[list[int]]:
        """Drafts for a neural drafter, as many as pay."""
        drafts = []
        for want in wants:
            ids, confidence = self.propose(want.request, want.extra, want.limit)
            drafts.append(ids if self.costs is None else ids[: best_length(confidence, self.costs)])
        return drafts

    def learn(self, request: SharedRequest) -> None:
        """A request is over, or gives way: its drafter may learn from the text, for others, and forgets it."""
        if request.ngram is None and self.learns_online:
            request.ngram = self._make()
            request.ngram.sync(request.tokens[: request.prompt_length], 0)
            request.ngram.sync(request.tokens, request.prompt_length)
        if request.ngram is not None:
            request.ngram.reset()
        request.ngram, request.ngram_unchanged = None, 0

    def settle(self, request: SharedRequest, length: int) -> None:
        """Nothing to do: what it is asked next begins with the text that stands."""

    def propose(self, request: SharedRequest, extra: Sequence[int], limit: int) -> tuple[list[int], list[float]]:
        """At most `limit` tokens after a request's text and `extra`, and the chance of each."""
        if request.ngram is None:
            request.ngram, request.ngram_unchanged = self._make(), 0
        text = [*request.tokens, *extra] if extra else request.tokens
        request.ngram.sync(text, request.ngram_unchanged)
        request.ngram_unchanged = len(request.tokens)
        limit = min(limit, self._max_length - len(text))
        if limit <= 0:
            return [], []
        draft = request.ngram.draft(limit)
        return draft.token_ids, draft.confidence
