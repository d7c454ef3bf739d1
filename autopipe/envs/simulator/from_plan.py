"""From a plan to a simulated chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopipe.core.errors import ConfigError
from autopipe.core.plan import EmulatedStage, Plan, StagePlan, WhenShort
from autopipe.envs.simulator.model import LatencyCurve, SimChain, SimStage

_NGRAM_S = 2e-6


def chain_from_plan(
    plan: Plan,
    measured: Mapping[str, SimStage] | None = None,
    *,
    contention: Mapping[tuple[str, str], float] | None = None,
    prompt_tokens: int = 1,
    output_tokens: int = 512,
    overhead_s: float = 0.0,
    wrong_equal: float = 0.0,
) -> SimChain:
    """The simulated chain of a plan.

    Stages that the plan itself describes (`emulated`) need nothing more: latency, agreement (the very same
    positions) and equality of wrong picks are those of the emulated backend. Any other stage takes latency,
    agreement and costs from `measured`; its window and the like come from the plan.

    Args:
        measured: by the name the plan gives the stage (`plan.names()`).
        contention: slow-down of the first-named stage while the second computes.
        prompt_tokens, output_tokens: of the request, for emulated agreement, which goes by absolute position.
        overhead_s: seconds of an emulated stage's step beside the forward.
        wrong_equal: chance that two neighbours that both pick wrongly pick the same (emulated stages: 1).

    Raises:
        ConfigError: a stage that is neither emulated nor in `measured`.
    """
    names = plan.names()
    stages = []
    for index, (name, stage) in enumerate(zip(names, plan.chain, strict=True)):
        if stage.emulated is not None:
            base = _emulated(stage.emulated, prompt_tokens, output_tokens, is_target=stage is plan.chain[-1])
            base = replace(base, overhead_s=overhead_s)
        elif measured is not None and name in measured:
            base = measured[name]
        elif stage.is_ngram and measured is not None:
            raise ConfigError(f"chain.{index}", name, "an n-gram stage whose agreement was measured")
        else:
            known = ", ".join(sorted(measured or {})) or "none"
            raise ConfigError(f"chain.{index}", name, f"`emulated`, or a stage in the profile ({known})")
        stages.append(_with_settings(base, name, stage, plan.chain[index - 1] if index else None))
    matrix = None
    if contention is not None:
        matrix = [[contention.get((mine, other), 1.0) for other in names] for mine in names]
    if plan.chain[-1].is_emulated:
        wrong_equal = 1.0
    return SimChain(tuple(stages), plan.mode, plan.warmup, matrix, wrong_equal)


def emulated_agreement(spec: EmulatedStage, first: int, count: int) -> NDArray[np.bool_]:
    """Whether an emulated stage agrees at absolute positions `first` .. `first + count - 1`, bool [count]."""
    positions = np.arange(first, first + count, dtype=np.uint64)
    if spec.trace is not None:
        return np.array(spec.trace, dtype=np.bool_)[(positions % np.uint64(len(spec.trace))).astype(np.int64)]
    if spec.agreement >= 1:
        return np.ones(count, dtype=np.bool_)
    salt = (spec.seed * 0x9E3779B97F4A7C15 + (1 << 33) * 0x94D049BB133111EB + 1) % (1 << 64)
    value = positions * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    value ^= value >> np.uint64(31)
    agrees: NDArray[np.bool_] = value < np.uint64(int(spec.agreement * (1 << 64)))
    return agrees


def _emulated(spec: EmulatedStage, prompt_tokens: int, output_tokens: int, *, is_target: bool) -> SimStage:
    curve = LatencyCurve({n: ms / 1e3 for n, ms in spec.ms.items()}, interpolate=False)
    table = None if is_target else emulated_agreement(spec, prompt_tokens, output_tokens)
    return SimStage(curve, table=table, prefill_s=None if spec.prefill_ms is None else spec.prefill_ms / 1e3)


def _with_settings(base: SimStage, name: str, stage: StagePlan, upstream: StagePlan | None) -> SimStage:
    """`base` with what the plan says of the stage."""
    min_drafts = 0 if upstream is None else min(stage.min_drafts, upstream.window)
    if upstream is not None and upstream.is_ngram:
        min_drafts = upstream.window  # it drafts in its consumer's process, before every step
    if stage.is_ngram and base.drafts is None:
        base = replace(base, latency=LatencyCurve({1: _NGRAM_S}), prefill_s=0.0, overhead_s=0.0)
    elif base.drafts is not None:
        base = replace(base, drafts=replace(base.drafts, gate=stage.ngram_options().gate))
    return replace(
        base,
        name=name,
        window=stage.window,
        min_drafts=min_drafts,
        verify_cap=stage.verify_cap,
        step_alone=stage.when_short is WhenShort.STEP and not (upstream is not None and upstream.is_ngram),
    )
