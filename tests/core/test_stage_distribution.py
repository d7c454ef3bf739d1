"""The stage loop keeps the target's distribution whatever the timing: chi-square on text written by whole pipelines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autopipe.core.backends.base import StageBackend
from autopipe.core.plan import Mode, Verification, WhenShort
from autopipe.core.sampling import SamplingParams
from tests.core.pipeline import chain_configs, make_pipeline
from tests.core.test_distribution import TABLES, VOCAB, exact, p_value

NUM_TOKENS = 8000


class MarkovBackend(StageBackend):
    """Logits follow from the last token alone, by a table [vocab, vocab]."""

    name = "markov"
    vocab_size = VOCAB
    max_length = 1 << 20
    exact = True

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.ids: list[int] = []

    @property
    def length(self) -> int:
        return len(self.ids)

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        return self.forward(ids)[-1]

    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        self.ids.extend(ids)
        return self.table[list(ids)]

    def rollback(self, length: int) -> None:
        del self.ids[length:]


def write(
    num_stages: int,
    mode: Mode,
    rule: Verification,
    order_seed: int,
    options: dict[str, Any],
    rewire_every: int | None = None,
) -> list[int]:
    """A text of NUM_TOKENS tokens by a pipeline whose stages run in random order.

    With `rewire_every` the middle of three stages leaves the chain, and comes back, every so many turns.
    """
    chance = random.Random(order_seed)
    configs = chain_configs(num_stages, mode=mode, window=5, min_drafts=2, verify_cap=4, when_short=WhenShort.STEP)
    pipeline = make_pipeline([MarkovBackend(table) for table in TABLES[:num_stages][::-1]], configs)
    pipeline.begin(prompt=[0], max_new_tokens=NUM_TOKENS, rule=rule, seed=11, **options)
    turn = 0
    while not pipeline.done:
        turn += 1
        if rewire_every and turn % rewire_every == 0:
            bridged = turn // rewire_every % 2 == 1
            first, middle, target = pipeline.stages
            first.configure(configs[0].replace(consumer=2 if bridged else 1))
            target.configure(configs[2].replace(producer=0 if bridged else 1))
            middle.configure(configs[1].replace(active=not bridged))
        chance.choice(pipeline.stages).advance()
    return [0, *pipeline.output]


@pytest.mark.parametrize(
    ("num_stages", "mode", "rule"),
    [
        (2, Mode.LOCKSTEP, Verification.REJECTION),
        (2, Mode.ASYNC, Verification.REJECTION),
        (3, Mode.ASYNC, Verification.REJECTION),
        (3, Mode.ASYNC, Verification.EQUALITY),
    ],
)
def test_text_of_a_pipeline_in_random_order_is_distributed_as_the_targets(
    num_stages: int, mode: Mode, rule: Verification
) -> None:
    options = {"temperature": 1.0} if num_stages == 2 else {"temperature": 0.9, "top_k": 4}
    text = write(num_stages, mode, rule, order_seed=num_stages, options=options)
    assert p_value(text, exact(SamplingParams(**options))) > 1e-4


@pytest.mark.parametrize("rule", list(Verification))
def test_a_stage_that_leaves_and_returns_in_the_middle_changes_no_distribution(rule: Verification) -> None:
    """Tokens that the middle stage corrected were not drawn by the first, so it may not offer them as its own."""
    text = write(3, Mode.ASYNC, rule, order_seed=5, options={"temperature": 1.0}, rewire_every=7)
    assert p_value(text, exact(SamplingParams(temperature=1.0))) > 1e-4
