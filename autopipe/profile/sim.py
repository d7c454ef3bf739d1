"""From a profile to the simulator: any plan over the profiled stages, with full information about agreement."""

from __future__ import annotations

import functools
import itertools
import logging
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.core.chain import default_threads, neural_stages
from autopipe.core.errors import ConfigError
from autopipe.core.plan import FEWER_BITS, Mode, NgramOptions, Plan, StagePlan
from autopipe.envs.simulator import LatencyCurve, LocalDrafts, SimChain, SimRequest, SimStage, simulate
from autopipe.envs.simulator.from_plan import chain_from_plan
from autopipe.profile.model import Curves, LatencyPoint, NgramReplay, Profile, PromptRecord, StageProfile

_log = logging.getLogger(__name__)

_LOOSE = {"dtype": "auto", "device": "auto", "backend": "auto"}
"""Keys of a stage for which `auto` matches any value: on one machine it stands for one of them."""


def sim_requests(profile: Profile, kinds: Sequence[str] | None = None) -> list[SimRequest]:
    """The recorded prompts as requests, of these kinds only (None: all), in the order of the tables.

    Raises:
        ConfigError: a kind that the profile does not have.
    """
    return [SimRequest(len(prompt.output_ids), len(prompt.prompt_ids)) for prompt in chosen_prompts(profile, kinds)]


def sim_stages(profile: Profile, plan: Plan, kinds: Sequence[str] | None = None) -> dict[str, SimStage]:
    """What `chain_from_plan` needs of every stage of `plan`, by the plan's names for them.

    Latencies are those of the thread count each stage will have and of the mean context of the recorded
    requests; agreement tables are the recorded ones, request after request, to go with `sim_requests`.

    Raises:
        ConfigError: a stage that was not profiled, or not as a drafter; another target; an unknown kind.
    """
    _check_target(profile, plan)
    prompts = chosen_prompts(profile, kinds)
    context = statistics.fmean(len(prompt.prompt_ids) + len(prompt.output_ids) / 2 for prompt in prompts)
    stages: dict[str, SimStage] = {}
    last = len(plan.chain) - 1
    for index, (name, stage) in enumerate(zip(plan.names(), plan.chain, strict=True)):
        if stage.is_ngram:
            stages[name] = _ngram_stage(profile, stage.ngram_options(), prompts)
            continue
        found = find_stage(profile, stage, f"chain.{index}")
        curves = _curves(found, stage.threads or default_threads(plan))
        base = SimStage(
            _verify_curve(curves.verify, context),
            prefill=_prefill_curve(curves.prefill),
            overhead_s=_overhead_s(profile, plan),
            switch_s=profile.engine.join_s.get(found.name, found.start_s + found.load_s),
        )
        stages[name] = base if index == last else replace(base, table=_table(profile, found, prompts, index))
    return stages


def sim_contention(profile: Profile, plan: Plan) -> dict[tuple[str, str], float]:
    """Slow-down of the first-named stage while the second computes, by the plan's names."""
    names = [name for name, stage in zip(plan.names(), plan.chain, strict=True) if not stage.is_ngram]
    measured: dict[tuple[str, str], float] = {}
    found = [find_stage(profile, stage, "chain").name for stage in neural_stages(plan)]
    for name, as_measured in zip(names, found, strict=True):
        for other, other_measured in zip(names, found, strict=True):
            factors = [
                entry.factor
                for entry in profile.contention
                if (entry.stage, entry.other) == (as_measured, other_measured)
            ]
            if name != other and factors:
                measured[name, other] = statistics.fmean(factors)
    return measured


def sim_chain(profile: Profile, plan: Plan, kinds: Sequence[str] | None = None) -> SimChain:
    """The simulated chain of a plan; arguments and errors as for `sim_stages`."""
    measured = sim_stages(profile, plan, kinds)
    chain = chain_from_plan(
        plan, measured, contention=sim_contention(profile, plan), wrong_equal=_wrong_equal(profile, plan)
    )
    if not plan.target.is_emulated:
        return chain
    # Emulated stages describe themselves, except for where they agree in several requests one after another.
    stages = tuple(
        replace(stage, table=measured[stage.name].table, overhead_s=measured[stage.name].overhead_s)
        for stage in chain.stages
    )
    return replace(chain, stages=stages)


def simulate_plan(profile: Profile, plan: Plan, kinds: Sequence[str] | None = None, *, seed: int = 0) -> dict[str, Any]:
    """Simulate a plan on the recorded requests, and plain decoding of the same.

    Returns:
        JSON-ready: {plan: {tokens, total_s, ttft_s, ms_per_token, decode_ms_per_token, acceptance_length,
        stages: [...]}, plain: the same, speedup, seed}. `ms_per_token` includes the prefill,
        `decode_ms_per_token` is per token after a request's first.

    Raises:
        ConfigError: as `sim_stages`.
    """
    chain, requests = sim_chain(profile, plan, kinds), sim_requests(profile, kinds)
    results = {}
    for name, each in (("plan", chain), ("plain", sim_chain(profile, plan.replace(mode=Mode.PLAIN), kinds))):
        result = simulate(each, requests, seed=seed)
        decode_s = result.total_s - len(requests) * result.ttft_s
        later = result.tokens - len(requests)
        results[name] = {**result.as_dict(), "decode_ms_per_token": 1e3 * decode_s / later if later else None}
    return {**results, "speedup": results["plain"]["total_s"] / results["plan"]["total_s"], "seed": seed}


def chosen_prompts(profile: Profile, kinds: Sequence[str] | None) -> list[PromptRecord]:
    """Prompts of these kinds, or all.

    Raises:
        ConfigError: an unknown kind.
    """
    for kind in kinds or ():
        if kind not in profile.kinds:
            raise ConfigError("--kind", kind, ", ".join(profile.kinds))
    return [prompt for prompt in profile.prompts if not kinds or prompt.kind in kinds]


def find_stage(profile: Profile, stage: StagePlan, key: str) -> StageProfile:
    """The profiled stage that has the model of `stage`.

    Raises:
        ConfigError: it was not profiled.
    """
    same = [each for each in profile.stages if _same_model(each.stage, stage)]
    found = next((each for each in same if each.stage.identity() == stage.identity()), same[0] if same else None)
    if found is None:
        known = ", ".join(each.name for each in profile.stages)
        raise ConfigError(f"{key}.model", stage.model, f"a stage of the profile ({known}), with the same settings")
    return found


def _same_model(one: StagePlan, other: StagePlan) -> bool:
    ours, theirs = one.identity(), other.identity()
    for key, loose in _LOOSE.items():
        if loose in (ours[key], theirs[key]) and not {ours[key], theirs[key]} & {*FEWER_BITS}:
            ours[key] = theirs[key] = loose
    return ours == theirs


def _check_target(profile: Profile, plan: Plan) -> None:
    wanted = profile.settings.plan.target
    if not _same_model(wanted, plan.target):
        last = len(plan.chain) - 1
        raise ConfigError(f"chain.{last}.model", plan.target.model, f"the profile's target ({wanted.model})")


def _curves(found: StageProfile, threads: int) -> Curves:
    nearest = min(found.curves, key=lambda curves: abs(curves.threads - threads))
    if nearest.threads != threads:
        _warn_of_threads(found.name, threads, nearest.threads)
    return nearest


@functools.lru_cache
def _warn_of_threads(name: str, threads: int, nearest: int) -> None:
    """Once for each case: a search asks for the same ones thousands of times."""
    _log.warning("%s was not profiled on %d threads; those of %d count", name, threads, nearest)


def _verify_curve(points: Sequence[LatencyPoint], context: float) -> LatencyCurve:
    """Seconds by number of tokens at a context, linear between the measured contexts."""
    curve = {}
    for tokens in sorted({point.tokens for point in points}):
        known = sorted((point.context, point.seconds) for point in points if point.tokens == tokens)
        contexts, seconds = zip(*known, strict=True)
        curve[tokens] = float(np.interp(context, contexts, seconds))
    return LatencyCurve(curve)


def _prefill_curve(points: Sequence[LatencyPoint]) -> LatencyCurve:
    return LatencyCurve({point.tokens: point.seconds for point in points})


def _overhead_s(profile: Profile, plan: Plan) -> float:
    """Of a step beside the forward: more where stages in several processes take turns."""
    alone = plan.mode is Mode.PLAIN or len(neural_stages(plan)) == 1
    if alone or profile.engine.handover_s is None:
        return profile.engine.step_overhead_s
    return profile.engine.handover_s


def _table(profile: Profile, found: StageProfile, prompts: Sequence[PromptRecord], index: int) -> NDArray[np.bool_]:
    agreement = next((each for each in profile.agreement if each.drafter == found.name), None)
    if agreement is None:
        measured = ", ".join(each.drafter for each in profile.agreement) or "none"
        raise ConfigError(f"chain.{index}", found.name, f"a stage that was profiled as a drafter ({measured})")
    wanted = {id(prompt) for prompt in prompts}
    texts = [bits for bits, prompt in zip(agreement.agrees, profile.prompts, strict=True) if id(prompt) in wanted]
    return np.array([bit == "1" for bit in "".join(texts)], dtype=np.bool_)


def _ngram_stage(profile: Profile, options: NgramOptions, prompts: Sequence[PromptRecord]) -> SimStage:
    recorded = profile.ngram
    if recorded.options.replace(gate=True) != options.replace(gate=True):
        from autopipe.profile.ngram_replay import replay

        recorded = replay(options, profile.prompts)
    wanted = {id(prompt) for prompt in prompts}
    places = [place for place, prompt in enumerate(profile.prompts) if id(prompt) in wanted]
    return SimStage(
        LatencyCurve({1: recorded.draft_s}),
        drafts=_local_drafts(recorded, places, options.gate),
        overhead_s=recorded.draft_s,
    )


def _local_drafts(recorded: NgramReplay, places: Sequence[int], gate: bool) -> LocalDrafts:
    offers = [recorded.prompts[place] for place in places]
    length = np.array([n for offer in offers for n in offer.length], dtype=np.int64)
    right = np.array([n for offer in offers for n in offer.right], dtype=np.int64)
    confidence = np.zeros((len(length), max(1, int(length.max()))))
    for row, values in enumerate(values for offer in offers for values in offer.confidence):
        confidence[row, : len(values)] = values
    return LocalDrafts(length, right, confidence, gate)


def _wrong_equal(profile: Profile, plan: Plan) -> float:
    """Mean over neighbouring neural drafters; 0 where nothing was measured."""
    tables = {each.drafter: each for each in profile.agreement}
    found = [find_stage(profile, stage, "chain").name for stage in neural_stages(plan)[:-1]]
    chances = [
        1.0 if mine == other else tables[mine].wrong_equal.get(other, 0.0)
        for mine, other in itertools.pairwise(found)
        if mine in tables
    ]
    return statistics.fmean(chances) if chances else 0.0
