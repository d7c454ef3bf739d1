"""What a shared pipeline drafts: the part of a plan that may change while requests run."""

from __future__ import annotations

from autopipe.core.config import UserModel
from autopipe.core.plan import Mode, NgramOptions, Plan, Warmup


class DraftingConfig(UserModel):
    """Drawn from a plan.

    Attributes:
        ngram: options of the n-gram drafter; None: no drafts.
        window: most drafts of one request in one step.
        warmup: how the window opens.
    """

    ngram: NgramOptions | None = None
    window: int = 4
    warmup: Warmup = Warmup()

    @classmethod
    def of(cls, plan: Plan) -> DraftingConfig:
        """What `plan` says; plain decoding drafts nothing."""
        first = plan.chain[0]
        if plan.mode is Mode.PLAIN or not first.is_ngram:
            return cls()
        window = min(first.window, plan.target.verify_cap)
        return cls(ngram=first.ngram_options(), window=window, warmup=plan.warmup)

    @property
    def gate(self) -> bool:
        """Whether drafts are weighed against what their rows cost."""
        return self.ngram is None or self.ngram.gate

    def limit(self, generated: int, max_new_tokens: int) -> int:
        """Most drafts after `generated` of at most `max_new_tokens` output tokens."""
        return self.warmup.window(self.window, generated, max_new_tokens)
