"""Runs the arms of a bench, interleaved prompt by prompt: a slow minute of the machine hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autopipe.bench.arms import Arm, ArmMissingError, PipelineArm
from autopipe.bench.report import PLAIN, Row, Sample, make_rows
from autopipe.core.sampling import SamplingParams

if TYPE_CHECKING:
    from autopipe.core.telemetry import Sampler

WARM_UP_TOKENS = 16

Clock = Callable[[], float]
Advance = Callable[[str], None]
"""Told before each measurement which arm is next."""


def prepare_arms(arms: Sequence[Arm]) -> tuple[list[Arm], dict[str, str]]:
    """Load every arm; return those that can run, and for the others the reason."""
    ready, missing = [], {}
    for arm in arms:
        try:
            arm.prepare()
            ready.append(arm)
        except ArmMissingError as error:
            missing[arm.name] = str(error)
    return ready, missing


def run_bench(
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    repeat: int = 1,
    advance: Advance = lambda name: None,
    clock: Clock = time.perf_counter,
    sampler: Sampler | None = None,
) -> list[Row]:
    """Measure prepared arms on prompts (token ids each); one row per arm, in their order.

    Each arm first continues the first prompt by a few tokens, unmeasured. Then for every prompt and repeat
    all arms take their turn, starting with another one each time.

    Args:
        sampler: where energy and device figures come from; None: they stay None.
    """
    short = sampling.replace(max_new_tokens=min(WARM_UP_TOKENS, sampling.max_new_tokens), min_new_tokens=0)
    for arm in arms:
        arm.generate(prompts[0], short)
    samples: dict[str, list[Sample]] = {arm.name: [] for arm in arms}
    turn = 0
    for index, ids in enumerate(prompts):
        for _ in range(repeat):
            for arm in [*arms[turn % len(arms) :], *arms[: turn % len(arms)]]:
                advance(arm.name)
                samples[arm.name].append(_measure(arm, index, ids, sampling, clock, sampler))
            turn += 1
    noisy = {arm.name for arm in arms if arm.draws_own_noise and not sampling.greedy}
    plain = next((arm for arm in arms if arm.name == PLAIN and isinstance(arm, PipelineArm)), None)

    def gap_at(prompt: int, prefix: Sequence[int]) -> float | None:
        return plain.gap([*prompts[prompt], *prefix]) if plain is not None else None

    return make_rows(samples, comparable=lambda name: name not in noisy, gap_at=gap_at)


def _measure(
    arm: Arm, index: int, ids: Sequence[int], sampling: SamplingParams, clock: Clock, sampler: Sampler | None
) -> Sample:
    if isinstance(arm, PipelineArm):
        arm.engine()  # arms that share an engine switch its plan here, outside the measurement
    meter = None if sampler is None else sampler.measure_use()
    start = clock()
    output = arm.generate(ids, sampling)
    seconds = clock() - start
    use = None if meter is None else meter.stop(len(output.token_ids))
    return Sample(index, output.token_ids, seconds, output.acceptance_length, use)
