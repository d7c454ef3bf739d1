"""What a shared pipeline drafts: the part of a plan that may change while requests run."""

from __future__ import annotations

import json
from itertools import pairwise

from autopipe.core.chain import neural_names
from autopipe.core.config import UserModel
from autopipe.core.plan import Mode, NgramOptions, Plan, StagePlan, Warmup, WhenShort


class NeuralDrafting(UserModel):
    """One neural drafter's part.

    Attributes:
        key: the same for stages that can be one loaded model.
        name: what stats call it.
        stage: as the plan has it.
        fed_window: most drafts it is given at a time by what comes before it; 0: it drafts by itself.
        window: drafts it may be ahead of the stage after it, in async mode.
        min_drafts: as many that stage waits for there; 0: it does not wait.
    """

    key: str
    name: str
    stage: StagePlan
    fed_window: int = 0
    window: int = 1
    min_drafts: int = 1


class DraftingConfig(UserModel):
    """Drawn from a plan.

    Attributes:
        ngram: options of the n-gram drafter; None: there is none.
        neural: neural drafters, cheapest first.
        ahead: neural drafters work while the stages after them do (async mode).
        window: most drafts of one request in one step.
        warmup: how the window opens.
    """

    ngram: NgramOptions | None = None
    neural: tuple[NeuralDrafting, ...] = ()
    ahead: bool = False
    window: int = 4
    warmup: Warmup = Warmup()

    @classmethod
    def of(cls, plan: Plan) -> DraftingConfig:
        """What `plan` says; plain decoding drafts nothing."""
        if plan.mode is Mode.PLAIN or not plan.drafters:
            return cls()
        first, last = plan.drafters[0], plan.drafters[-1]
        return cls(
            ngram=first.ngram_options() if first.is_ngram else None,
            neural=neural_drafters(plan),
            ahead=plan.mode is Mode.ASYNC,
            window=min(last.window, plan.target.verify_cap),
            warmup=plan.warmup,
        )

    @property
    def gate(self) -> bool:
        """Whether drafts of the n-gram are weighed against what their rows cost."""
        return self.ngram is None or self.ngram.gate

    def limit(self, generated: int, max_new_tokens: int) -> int:
        """Most drafts after `generated` of at most `max_new_tokens` output tokens."""
        return self.warmup.window(self.window, generated, max_new_tokens)


def neural_drafters(plan: Plan) -> tuple[NeuralDrafting, ...]:
    """The neural drafters in a plan's chain, whatever its mode."""
    drafters: list[NeuralDrafting] = []
    names, before = neural_names(plan), 0
    for stage, consumer in pairwise(plan.chain):
        if not stage.is_ngram:
            identity = json.dumps({**stage.identity(), "adapter": stage.adapter, "exact": plan.exact}, sort_keys=True)
            key = f"{identity}#{sum(drafter.key.startswith(identity) for drafter in drafters)}"
            fed = min(before, stage.verify_cap)
            waits = consumer.when_short is WhenShort.WAIT
            drafting = NeuralDrafting(
                key=key,
                name=names[len(drafters)],
                stage=stage,
                fed_window=fed,
                window=stage.window,
                min_drafts=min(consumer.min_drafts, stage.window) if waits else 0,
            )
            drafters.append(drafting)
        before = stage.window
    return tuple(drafters)
