"""Shared pipelines with neural drafters, mostly emulated ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopipe.core.backends.batch import BatchRunner
from autopipe.core.backends.emulated_batch import EmulatedBatchRunner
from autopipe.core.errors import KVMemoryError
from autopipe.core.gating import StepCosts
from autopipe.core.ngram import NgramDrafter
from autopipe.core.plan import EmulatedStage, NgramOptions, StagePlan
from autopipe.core.shared.drafting import DraftingConfig, NeuralDrafting
from autopipe.core.shared.neural import SharedDrafter
from autopipe.core.shared.options import SharingOptions
from autopipe.core.shared.pipeline import SharedPipeline
from autopipe.core.shared.sequence import SharedRequest
from autopipe.core.shared.window_gate import WindowGate
from tests.core.pipeline import plain_output
from tests.core.shared.requests import Collected, request

SHARING = {"max_active": 16, "max_batch": 8, "max_rows": 64, "cached_sequences": 8}
SLOTS = 24
EMULATED_VOCAB = 64


def spec(agreement: float = 1.0, **extra: Any) -> EmulatedStage:
    return EmulatedStage.parse({"ms": {1: 0}, "agreement": agreement, "vocab_size": EMULATED_VOCAB, **extra})


class Decided(WindowGate):
    """Windows by turns, in place of what measurements would say; none given: always the whole window."""

    def __init__(self, windows: Sequence[int] = ()) -> None:
        super().__init__()
        self._windows, self._turn = list(windows), 0

    def window(self, num_requests: int, window: int, base_rows: int, costs: StepCosts) -> int:
        self._turn += 1
        return min(window, self._windows[self._turn % len(self._windows)]) if self._windows else window


def drafting(
    windows: Sequence[int], *, ngram: int = 0, gate: bool = False, min_drafts: int = 1, **more: Any
) -> DraftingConfig:
    """Neural drafters `d0`, `d1`, ... with these windows, behind an n-gram with window `ngram` if not 0."""
    before = [ngram, *windows]
    stage = StagePlan(model="any")
    neural = [
        NeuralDrafting(
            key=f"d{n}", name=f"d{n}", stage=stage, fed_window=before[n], window=window,
            min_drafts=min(min_drafts, window),
        )
        for n, window in enumerate(windows)
    ]  # fmt: skip
    options = NgramOptions(gate=gate) if ngram else None
    return DraftingConfig(ngram=options, neural=tuple(neural), window=windows[-1], **more)


def configure(pipeline: SharedPipeline, runners: Sequence[BatchRunner], config: DraftingConfig) -> None:
    for wanted, runner in zip(config.neural, runners, strict=True):
        pipeline.maker.add(wanted.key, SharedDrafter(wanted.name, runner, pipeline.options))
    options = config.ngram
    pipeline.configure(config, None if options is None else lambda: NgramDrafter(options))


def pipeline_of(
    runners: Sequence[BatchRunner],
    config: DraftingConfig,
    *,
    tried: Sequence[int] = (),
    target: BatchRunner | None = None,
    **options: Any,
) -> Collected:
    """An emulated target, or another, behind these drafters.

    Args:
        tried: the windows of its steps, by turns; none: always the whole one.
    """
    sharing = SharingOptions.parse({**SHARING, **options})
    pipeline = SharedPipeline(target or EmulatedBatchRunner(spec(), SLOTS), sharing)
    pipeline.maker.make_gate = lambda: Decided(tried)
    configure(pipeline, runners, config)
    return Collected(pipeline)


def emulated_pipeline(agreements: Sequence[float], config: DraftingConfig, **options: Any) -> Collected:
    """`pipeline_of` emulated drafters."""
    return pipeline_of([EmulatedBatchRunner(spec(agreement), SLOTS) for agreement in agreements], config, **options)


def prompt_of(number: int, length: int = 5, system: int = 0) -> list[int]:
    """A prompt of its own, after a beginning of `system` tokens that all have in common."""
    return [place % EMULATED_VOCAB for place in range(system)] + [
        (7 * number + place) % EMULATED_VOCAB for place in range(length)
    ]


def expected(number: int, tokens: int = 24, length: int = 5, **params: Any) -> list[int]:
    return plain_output(tokens, prompt=prompt_of(number, length), **params)


def plain_text(prompt: list[int], params: dict[str, Any]) -> list[int]:
    """What the emulated target says to a request alone."""
    sharing = SharingOptions.parse(SHARING)
    collected = Collected(SharedPipeline(EmulatedBatchRunner(spec(), SLOTS), sharing))
    collected.pipeline.begin(request(0, prompt, vocab=EMULATED_VOCAB, **params))
    return collected.run()[0]


class ShortOfMemory(EmulatedBatchRunner):
    """Has room for so many tokens in all."""

    room = 40

    def _run(self, segments: Any) -> torch.Tensor:
        if sum(self._lengths) + sum(len(segment.ids) for segment in segments) > self.room:
            raise KVMemoryError("full")
        return super()._run(segments)


def serve(
    collected: Collected,
    waiting: Sequence[tuple[int, SharedRequest]],
    *,
    leaves: int,
    before_step: Callable[[int], None] = lambda step: None,
) -> int | None:
    """Run requests that come at their steps; request 0 of several is cancelled after step `leaves`.

    Returns:
        The one that was cancelled.
    """
    left, cancelled = list(waiting), None
    while left or collected.pipeline.has_work:
        for _, new in [entry for entry in left if entry[0] <= collected.steps]:
            collected.pipeline.begin(new)
        left = [entry for entry in left if entry[0] > collected.steps]
        before_step(collected.steps)
        if collected.pipeline.has_work:
            collected.step()
        else:
            collected.steps += 1
        if collected.steps == leaves and len(waiting) > 1:
            collected.pipeline.cancel(0)
            cancelled = 0
        assert collected.steps < 2000
    return cancelled


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.002)


def threads_end(before: set[threading.Thread]) -> None:
    """No thread has stayed that was not there."""
    assert not [thread for thread in threading.enumerate() if thread not in before]
