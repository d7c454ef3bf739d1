"""What is known of the stages without a profile: times that the engine measured when it loaded them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopipe.core.live_engine import LiveEngine
from autopipe.core.plan import StagePlan
from autopipe.envs.menu import ActionCodec, PlanMenu
from autopipe.envs.scenario import PipelineModel

_NGRAM_MS = 0.05
_ASSUMED_TARGET_MS = 10.0
_ASSUMED_SHARE = 0.25
"""A drafter's time relative to the next stage's, where nothing is known: the rule of three to five times apart."""
_AGREEMENT = 0.6


def live_profile(engine: LiveEngine, menu: PlanMenu, names: Sequence[str]) -> PipelineModel:
    """The menu as a pipeline, with times as the engine knows them. Agreement is a guess."""
    target = _measured(menu.target, engine, engine.plan.names()[-1])
    return _assembled(
        menu, names, target, [_measured(o.stage, engine, n) for o, n in zip(menu.drafters, names, strict=True)]
    )


def assumed_profile(codec: ActionCodec) -> PipelineModel:
    """The menu as a pipeline with guessed times: each stage four times as fast as the next."""
    menu = codec.menu
    return _assembled(menu, codec.slot_names(), _emulated(menu.target), [_emulated(o.stage) for o in menu.drafters])


def _assembled(
    menu: PlanMenu, names: Sequence[str], target: dict[int, float] | None, drafters: Sequence[dict[int, float] | None]
) -> PipelineModel:
    target_ms = target or {1: _ASSUMED_TARGET_MS, 8: 1.4 * _ASSUMED_TARGET_MS}
    single_ms = target_ms[min(target_ms)]
    entries: list[dict[str, Any]] = []
    for index, (option, name, known) in enumerate(zip(menu.drafters, names, drafters, strict=True)):
        assumed_ms = single_ms * _ASSUMED_SHARE ** (len(menu.drafters) - index)
        ngram = option.stage.is_ngram
        entries.append(
            {
                "name": name,
                "ngram": ngram,
                "ms": {1: _NGRAM_MS} if ngram else known or {1: assumed_ms, 8: 1.4 * assumed_ms},
                "agreement": {"other": 0.3 if ngram else _AGREEMENT},
                "adapters": {adapter: {"other": _AGREEMENT} for adapter in option.adapters},
            }
        )
    if not entries:  # a pipeline needs a drafter; the codec's menu has none, so it is never chosen
        entries = [{"name": "none", "ngram": True, "ms": {1: _NGRAM_MS}, "agreement": {"other": 0.0}}]
    return PipelineModel.parse({"target": {"ms": target_ms}, "drafters": entries})


def _measured(stage: StagePlan, engine: LiveEngine, name: str) -> dict[int, float] | None:
    if stage.is_ngram or stage.emulated is not None:
        return _emulated(stage)
    found = {int(rows): float(ms) for rows, ms in engine.facts(name).get("step_ms", {}).items() if float(ms) > 0}
    return found or None


def _emulated(stage: StagePlan) -> dict[int, float] | None:
    if stage.emulated is None:
        return None
    return {rows: max(ms, 1e-3) for rows, ms in stage.emulated.ms.items()}
