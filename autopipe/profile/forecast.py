"""How fast a placement will be, before it exists: the simulator over published, profiled or estimated latencies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopipe.core.errors import ConfigError
from autopipe.core.placement import Curve, Placement
from autopipe.core.plan import Dtype, Mode, WhenShort
from autopipe.envs.simulator import LatencyCurve, SimChain, SimRequest, SimStage, simulate
from autopipe.profile.model import Profile

ASSUMED_AGREEMENT = 0.7
"""Of a drafter nothing is known of."""
_WINDOWS = (2, 4, 8, 16, 64)
_LOCKSTEP_WINDOWS = (1, 2, 3, 5, 8, 16)
_MIN_DRAFTS = (0, 1, 2, 4, 6, 8, 12, 16)

Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the search chose for one way to run: windows by drafter, drafts the target waits for."""

    windows: tuple[int, ...] = ()
    min_drafts: int = 1
    when_short: WhenShort = WhenShort.WAIT


@dataclass(frozen=True, slots=True)
class Prediction:
    """One way to run the chain, or a part of it, at its best settings.

    Attributes:
        stages: names, cheapest drafter first, the target last.
        acceptance_length: output tokens per forward of the target.
        estimated: a latency or an agreement behind it was not measured.
    """

    mode: Mode
    stages: tuple[str, ...]
    settings: Settings
    ms_per_token: float
    speedup_over_plain: float
    acceptance_length: float
    estimated: bool

    @property
    def name(self) -> str:
        return f"{self.mode.value} {' + '.join(self.stages)}"

    @property
    def tokens_per_s(self) -> float:
        return 1e3 / self.ms_per_token


def forecast(
    placement: Placement,
    agreement: Mapping[str, float],
    *,
    output_tokens: int = 2000,
    prompt_tokens: int = 64,
    seed: int = 0,
    advance: Advance = lambda name: None,
) -> list[Prediction]:
    """Predict plain decoding, lockstep and async with all drafters, and async with each drafter alone; best first.

    Args:
        agreement: with the target, by drafter; `ASSUMED_AGREEMENT` where it is missing.
        advance: told which prediction begins.
    """
    request = SimRequest(output_tokens, prompt_tokens)
    stages = _sim_stages(placement, agreement)
    everyone = tuple(range(len(stages)))
    last = everyone[-1]
    ways: list[tuple[Mode, tuple[int, ...]]] = [(Mode.PLAIN, (last,))]
    if len(everyone) > 1:
        ways += [(Mode.LOCKSTEP, everyone), (Mode.ASYNC, everyone)]
    if len(everyone) > 2:
        ways += [(mode, (index, last)) for mode in (Mode.LOCKSTEP, Mode.ASYNC) for index in everyone[:-1]]
    predictions: list[Prediction] = []
    plain_ms = 0.0
    for mode, members in ways:
        advance(f"{mode.value} {' + '.join(stages[index].name for index in members)}")
        found = _best(placement, stages, members, mode, request, seed, agreement)
        plain_ms = plain_ms or found.ms_per_token
        predictions.append(replace(found, speedup_over_plain=plain_ms / found.ms_per_token))
    return sorted(predictions, key=lambda each: each.ms_per_token)


def predicted_speed(placement: Placement, agreement: Mapping[str, float]) -> float:
    """Tokens a second of the whole chain in async mode (of the target alone without drafters): for `rebalance`."""
    stages = _sim_stages(placement, agreement)
    members = tuple(range(len(stages)))
    mode = Mode.ASYNC if len(members) > 1 else Mode.PLAIN
    found = _best(placement, stages, members, mode, SimRequest(600, 64), 0, agreement, quick=True)
    return found.tokens_per_s


def curves_from_profile(profile: Profile, source: str) -> tuple[Curve, ...]:
    """What a profile measured, as curves: on its most threads, behind its middle context."""
    curves = []
    for stage in profile.stages:
        if stage.stage.is_emulated:
            continue
        measured = max(stage.curves, key=lambda each: each.threads).verify
        contexts = sorted({point.context for point in measured})
        context = contexts[len(contexts) // 2]
        rate = next((each.rate for each in profile.agreement if each.drafter == stage.name), None)
        curves.append(
            Curve(
                model=stage.stage.model,
                dtype=stage.stage.dtype,
                ms={point.tokens: 1e3 * point.seconds for point in measured if point.context == context},
                agreement=rate,
                interpolate=True,
                source=source,
            )
        )
    return tuple(curves)


def known_agreement(placement: Placement) -> dict[str, float]:
    """Agreement with the target that came with the hardware's curves, by drafter."""
    from autopipe.core.placement.latency import find_curve

    found = {}
    for stage in placement.stages[:-1]:
        curve = find_curve(placement.hardware.curves, stage.candidate.sizes.name, stage.candidate.dtype)
        if curve is not None and curve.agreement is not None:
            found[stage.name] = curve.agreement
    return found


def _sim_stages(placement: Placement, agreement: Mapping[str, float]) -> list[SimStage]:
    stages = []
    for index, stage in enumerate(placement.stages):
        latency = placement.latency(stage)
        is_target = index + 1 == len(placement.stages)
        rate = 1.0 if is_target else agreement.get(stage.name, ASSUMED_AGREEMENT)
        if not 0 <= rate <= 1:
            raise ConfigError("--agreement", rate, "0 to 1")
        stages.append(SimStage(LatencyCurve(latency.seconds, latency.interpolate), agreement=rate, name=stage.name))
    return stages


def _best(
    placement: Placement,
    stages: list[SimStage],
    members: tuple[int, ...],
    mode: Mode,
    request: SimRequest,
    seed: int,
    agreement: Mapping[str, float],
    quick: bool = False,
) -> Prediction:
    """The fastest settings of a grid; the whole device is the stage's own where stages take turns."""
    matrix = None
    if mode is Mode.ASYNC:
        whole = placement.contention()
        matrix = [[whole[i][j] for j in members] for i in members]
    best: tuple[float, Settings, float] | None = None
    for settings in _grid(len(members) - 1, mode, quick):
        chain = SimChain(_configured([stages[i] for i in members], settings), mode, contention=matrix)
        result = simulate(chain, [request], seed=seed)
        ms = 1e3 * result.total_s / result.tokens
        if best is None or ms < best[0]:
            best = (ms, settings, result.tokens / max(1, result.stages[-1].forwards - 1))
    assert best is not None
    measured = all(not placement.latency(placement.stages[i]).estimated for i in members)
    known = all(placement.stages[i].name in agreement for i in members[:-1])
    names = tuple(stages[i].name for i in members)
    return Prediction(mode, names, best[1], best[0], 1.0, best[2], not (measured and known))


def _configured(stages: list[SimStage], settings: Settings) -> tuple[SimStage, ...]:
    last = len(stages) - 1
    return tuple(
        replace(stage, min_drafts=settings.min_drafts, step_alone=settings.when_short is WhenShort.STEP)
        if index == last
        else replace(stage, window=settings.windows[index], min_drafts=0 if index else 1)
        for index, stage in enumerate(stages)
    )


def _grid(num_drafters: int, mode: Mode, quick: bool) -> Iterator[Settings]:
    if num_drafters == 0:
        yield Settings()
    elif mode is Mode.LOCKSTEP:
        for windows in itertools.combinations_with_replacement(_LOCKSTEP_WINDOWS, num_drafters):
            yield Settings(windows)
    else:
        wide = (64,) if quick else (16, 64)
        firsts = (8,) if quick else _WINDOWS
        for window, last in itertools.product(firsts if num_drafters > 1 else (64,), wide):
            windows = (*[window] * (num_drafters - 1), last)
            for wanted, short in itertools.product(_MIN_DRAFTS[::3] if quick else _MIN_DRAFTS, WhenShort):
                if wanted <= last:
                    yield Settings(windows, wanted, short)


def resolved_dtype(dtype: Dtype) -> Dtype:
    """What `auto` means where no weights are at hand: 16 bits. Fewer are never chosen for the user."""
    return Dtype.BF16 if dtype is Dtype.AUTO else dtype
