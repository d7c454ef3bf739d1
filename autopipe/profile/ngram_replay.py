"""What the n-gram drafter would have offered at every position of recorded outputs: no model is needed for that."""

from __future__ import annotations

import time
from collections.abc import Sequence

from autopipe.core.ngram import NgramDrafter
from autopipe.core.ngram_table import NgramTable
from autopipe.core.plan import NgramOptions
from autopipe.profile.model import NgramOffer, NgramReplay, PromptRecord

MAX_OFFER = 32
"""Most drafts recorded per position; windows beyond are simulated as this one."""
_TIMED_WINDOW = 7


def replay(options: NgramOptions, prompts: Sequence[PromptRecord], *, table: NgramTable | None = None) -> NgramReplay:
    """Run the drafter over prompts and outputs in their order, as the engine's stage would.

    The drafter learns from every token of the text, drafted or not, so what it offers at a position is the same
    in every plan that has it in front of the target.

    Args:
        table: a learned table, instead of the one named in `options`.

    Raises:
        ConfigError, ModelLoadError: the table in `options` cannot be read.
    """
    drafter = NgramDrafter(options.model_copy(update={"gate": True}), table)
    offers: list[NgramOffer] = []
    seconds, steps = 0.0, 0
    for prompt in prompts:
        drafter.reset()
        output = list(prompt.output_ids)
        text = list(prompt.prompt_ids)
        known = 0
        length, right = [0], [0]  # the first token comes from the prefill
        confidence: list[tuple[float, ...]] = [()]
        for position in range(1, len(output)):
            text.append(output[position - 1])
            started = time.monotonic()
            drafter.sync(text, known)
            drafter.draft(_TIMED_WINDOW)
            seconds += time.monotonic() - started
            steps += 1
            known = len(text)
            draft = drafter.draft(MAX_OFFER)
            rest = output[position : position + len(draft.token_ids)]
            hits = next((i for i, token in enumerate(rest) if token != draft.token_ids[i]), len(rest))
            length.append(len(draft.token_ids))
            right.append(hits)
            confidence.append(tuple(round(value, 4) for value in draft.confidence))
        offers.append(NgramOffer(length=tuple(length), right=tuple(right), confidence=tuple(confidence)))
    return NgramReplay(options=options, draft_s=seconds / max(steps, 1), prompts=tuple(offers))
