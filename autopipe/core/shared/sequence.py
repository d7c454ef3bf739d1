"""One request as the shared pipeline sees it, and what a step did for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopipe.core.backends.batch import Pass
from autopipe.core.errors import AutoPipeError
from autopipe.core.logprobs import TokenLogprobs
from autopipe.core.ngram import NgramDrafter
from autopipe.core.picker import Picker
from autopipe.core.stats import StageStats


@dataclass(slots=True, eq=False)
class SharedRequest:
    """A request in the pipeline.

    Attributes:
        tokens: prompt and output so far.
        end: length of `tokens` at which max_new_tokens is reached.
        slot: of the batch runner, while it is active.
        cached: tokens in that slot's KV cache.
        served_step: step in which it last got a token.
        since_active: output tokens since it became active.
        reused: tokens whose KV came from other sequences since it was last served.
        drafter_picker: makes what chooses its tokens at a neural drafter with so many token ids.
        ngram, ngram_unchanged: its drafter, and how much of `tokens` the drafter knows.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    end: int
    eos_token_ids: frozenset[int]
    picker: Picker
    drafter_picker: Callable[[int], Picker]
    ngram: NgramDrafter | None = None
    ngram_unchanged: int = 0
    slot: int = -1
    cached: int = 0
    served_step: int = -1
    since_active: int = 0
    reused: int = 0

    @property
    def missing(self) -> int:
        """Tokens to read before the next one can be chosen; 1 while it is answering."""
        return len(self.tokens) - self.cached

    def is_answering(self, *, whole_prompts: bool) -> bool:
        """Whether all but its last token has been read; with `whole_prompts` the last of the prompt is read with it."""
        return self.missing == 1 and not (whole_prompts and self.cached < self.prompt_length)

    @property
    def finish_reason(self) -> str | None:
        """`stop` after an eos, `length` at the end, None before."""
        if len(self.tokens) > self.prompt_length and self.tokens[-1] in self.eos_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.end else None

    def up_to_end(self, tokens: list[int]) -> list[int]:
        """Of the next `tokens` those that belong to the output."""
        for index, token in enumerate(tokens):
            if token in self.eos_token_ids:
                tokens = tokens[: index + 1]
                break
        return tokens[: self.end - len(self.tokens)]


@dataclass(frozen=True, slots=True)
class Served:
    """What one step did for one request.

    Attributes:
        token_ids: its new output.
        num_read: tokens of its sequence that were read, the last one included.
        num_drafts, num_accepted: drafts verified, and of these accepted; drafter: whose they were.
        reused: tokens whose KV was taken over from others since it was last served.
        drafters: what neural drafters did for it.
        finish_reason: stop or length when the request is over.
        error: why no token could be chosen; the request is over.
    """

    request: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: Sequence[TokenLogprobs] | None = None
    num_read: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    drafter: str = ""
    reused: int = 0
    drafters: list[StageStats] = field(default_factory=list)
    finish_reason: str | None = None
    error: AutoPipeError | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step.

    Attributes:
        prefill: whether prompt tokens were among the rows.
        start_ns, finished_ns: monotonic clock.
        draft_ns: how long drafting took, before the target's forward.
        passes: what that forward was made of.
    """

    served: list[Served]
    num_rows: int
    prefill: bool
    start_ns: int
    finished_ns: int
    draft_ns: int
    passes: Sequence[Pass]
