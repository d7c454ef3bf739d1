"""A whole chain in one process, its stages advanced in whatever order a test likes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopipe.core.backends.base import StageBackend
from autopipe.core.backends.emulated import EmulatedBackend
from autopipe.core.board import Board, create_segment
from autopipe.core.chain import StageConfig
from autopipe.core.channel import Doorbell
from autopipe.core.ngram import NgramDrafter
from autopipe.core.picker import Picker
from autopipe.core.plan import EmulatedStage, Verification
from autopipe.core.sampling import SamplingParams
from autopipe.core.stage import Stage
from autopipe.core.stage_request import StageRequest

PROMPT = [1, 2, 3, 4, 5]


class SilentBell(Doorbell):
    """Nobody sleeps in these tests."""

    def __init__(self) -> None:
        super().__init__(-1, -1)

    def ring(self) -> None:
        return


@dataclass
class Pipeline:
    """Stages 0..k-1 over one board; the last is the target. `output` is what it has emitted."""

    stages: list[Stage]
    configs: list[StageConfig]
    output: list[int] = field(default_factory=list)

    def begin(
        self,
        number: int = 1,
        prompt: Sequence[int] = PROMPT,
        *,
        rule: Verification = Verification.EQUALITY,
        eos: Sequence[int] = (),
        **options: object,
    ) -> None:
        params = SamplingParams.parse(options)
        self.output.clear()
        for index, stage in enumerate(self.stages):
            stage.configure(self.configs[index])
            is_target = index == len(self.stages) - 1
            picker = Picker(
                params,
                vocab_size=stage.backend.vocab_size,
                eos_token_ids=eos,
                prompt_length=len(prompt),
                rule=rule,
                stage=len(self.stages) - 1 - index,
                is_target=is_target,
            )
            stage.begin(
                StageRequest(
                    id=number,
                    tokens=list(prompt),
                    prompt_length=len(prompt),
                    end=len(prompt) + params.max_new_tokens,
                    eos_token_ids=frozenset(eos),
                    verification=rule,
                    picker=picker,
                    committed=len(prompt),
                    producer_committed=len(prompt),
                    changed_from=len(prompt),
                ),
                trace=False,
            )

    @property
    def done(self) -> bool:
        request = self.stages[-1].request
        assert request is not None
        return bool(self.output) and (len(request.tokens) >= request.end or request.tokens[-1] in request.eos_token_ids)

    def run(self, order: Sequence[int] = ()) -> list[int]:
        """Advance stages in `order`, then all in turn, until the target is done; raises when nothing moves."""
        for index in order:
            if self.done:
                break
            self.stages[index % len(self.stages)].advance()
        idle_rounds = 0
        while not self.done:
            moved = [stage.advance() for stage in self.stages]
            idle_rounds = 0 if any(moved) else idle_rounds + 1
            if idle_rounds > 10:
                raise AssertionError("the pipeline is stuck")
        return list(self.output)


def make_pipeline(backends: Sequence[StageBackend], configs: Sequence[StageConfig]) -> Pipeline:
    descriptor = create_segment()
    board = Board(descriptor)
    os.close(descriptor)
    pipeline = Pipeline([], list(configs))
    bells = [SilentBell() for _ in backends]
    for index, backend in enumerate(backends):
        pipeline.stages.append(
            Stage(backend, board, index, bells, lambda _, ids, __: pipeline.output.extend(ids), NgramDrafter)
        )
    return pipeline


def chain_configs(count: int, **settings: object) -> list[StageConfig]:
    """Configs of a chain of `count` stages in slots 0..count-1."""
    return [
        StageConfig(
            producer=index - 1 if index else None,
            consumer=index + 1 if index < count - 1 else None,
            **settings,  # type: ignore[arg-type]
        )
        for index in range(count)
    ]


def emulated(agreement: float = 1.0, *, seed: int = 0, vocab_size: int = 64, **extra: object) -> EmulatedBackend:
    spec = EmulatedStage.parse({"ms": {1: 0}, "agreement": agreement, "seed": seed, "vocab_size": vocab_size, **extra})
    return EmulatedBackend(spec, f"emulated-{agreement}")


def plain_output(num_tokens: int, *, seed: int = 0, prompt: Sequence[int] = PROMPT, **options: object) -> list[int]:
    """What the emulated target says by itself."""
    pipeline = make_pipeline([emulated(seed=seed)], chain_configs(1))
    pipeline.begin(prompt=prompt, max_new_tokens=num_tokens, **options)  # type: ignore[arg-type]
    return pipeline.run()
