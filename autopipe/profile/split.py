"""Threads and cores for each stage of a chain, chosen by measuring.

Where stages take turns, all cores for each is right. Where they run at once it depends on the chain: a drafter that
mostly waits should leave its cores to the target, a busy one wants its own; only measuring tells.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopipe.core.affinity import core_numbers
from autopipe.core.chain import neural_stages
from autopipe.core.engine import Engine
from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.core.plan import Plan, StagePlan
from autopipe.core.sampling import SamplingParams
from autopipe.profile.run import default_threads

AS_IT_IS = "as it is"
"""The plan without a change."""
_MOST = 16
_KEEP, _KEEP_LATER, _LATER = 1.15, 1.06, 3
"""Splits this much slower than the best so far are not measured again; less is forgiven from the third round on."""
_TIE = 0.01

Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """The fastest split. `ms_per_token`: by split, those that were dropped early included."""

    label: str
    plan: Plan
    ms_per_token: dict[str, float]


def core_splits(plan: Plan, cores: Sequence[int] | None = None) -> dict[str, Plan]:
    """The plan as it is, and with every split of the cores over its neural stages.

    A split gives each stage a number of threads (1, 2, 4, ... all) and, where that makes no more than the cores, cores
    of its own or not. On many cores only such splits and `all cores for every stage` are kept.

    Args:
        cores: to split; None: those this process may use.
    """
    cores = list(core_numbers() if cores is None else cores)
    num_stages = len(neural_stages(plan))
    combinations = list(itertools.product(default_threads(len(cores)), repeat=num_stages))
    if len(combinations) > _MOST:
        fitting = [each for each in combinations if sum(each) <= len(cores)]
        largest = sorted(fitting, key=sum, reverse=True)[: _MOST - 1]
        combinations = [*largest, (len(cores),) * num_stages]
    splits = {AS_IT_IS: plan}
    for threads in combinations:
        label = "+".join(map(str, threads)) + " threads"
        splits[label] = _with(plan, threads, [None] * num_stages)
        if sum(threads) <= len(cores):
            ends = list(itertools.accumulate(threads))
            own = [tuple(cores[end - count : end]) for count, end in zip(threads, ends, strict=True)]
            splits[f"{label}, own cores"] = _with(plan, threads, own)
    return splits


def choose_split(
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 32,
    rounds: int = 8,
    advance: Advance = lambda label: None,
) -> SplitChoice:
    """Run every split in turns on the same prompts, leave out what is clearly slower, and take the fastest.

    Args:
        prompts: token ids each.
        rounds: measurements of a split that stays; a first one of all, not counted, warms up.
        advance: told which split is measured next.

    Raises:
        ConfigError: no prompts.
        AutoPipeError: the chain cannot run, or a split gave other tokens (which would be a bug).
    """
    if not prompts:
        raise ConfigError("prompts", list(prompts), "one or more prompts")
    splits = core_splits(plan)
    times: dict[str, list[float]] = {label: [] for label in splits}
    expected: list[int] | None = None
    params = SamplingParams(max_new_tokens=max_new_tokens)
    with Engine(plan) as engine:
        alive = list(splits)
        for number in range(rounds + 1):
            for label in alive:
                advance(label)
                engine.apply(splits[label])
                seconds, tokens = 0.0, list[int]()
                for ids in prompts:
                    handle = engine.submit(list(ids), params)
                    tokens += [token for block in handle for token in block.token_ids]
                    seconds += handle.outcome().stats.total_s
                if expected is not None and tokens != expected:
                    raise AutoPipeError(f"split {label!r} gave other tokens; please report this")
                expected = tokens
                if number:
                    times[label].append(1e3 * seconds / len(tokens))
            if number:
                best = min(statistics.median(times[label]) for label in alive)
                most = best * (_KEEP if number < _LATER else _KEEP_LATER)
                alive = [label for label in alive if statistics.median(times[label]) <= most]
    medians = {label: statistics.median(values) for label, values in times.items()}
    fastest = min(alive, key=medians.__getitem__)
    if AS_IT_IS in alive and medians[AS_IT_IS] <= (1 + _TIE) * medians[fastest]:
        fastest = AS_IT_IS
    return SplitChoice(fastest, splits[fastest], medians)


def _with(plan: Plan, threads: Sequence[int], cores: Sequence[tuple[int, ...] | None]) -> Plan:
    given = iter(zip(threads, cores, strict=True))
    chain: list[StagePlan] = []
    for stage in plan.chain:
        if stage.is_ngram:
            chain.append(stage)
        else:
            count, own = next(given)
            chain.append(stage.replace(threads=count, cores=own))
    return plan.replace(chain=chain)
