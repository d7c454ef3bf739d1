"""Plans as clients see and set them: by the names of stages the service was started with, never by paths."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from autopipe.core.errors import ConfigError
from autopipe.core.plan import MAX_STAGES, MAX_WINDOW, Plan
from autopipe.service.schemas import ApiModel


class PinnedDrafter(ApiModel):
    """A drafter of the service's own plan, by its name; `window` None: as it was started with."""

    stage: Annotated[str, Field(min_length=1, max_length=200)]
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] | None = None
    min_drafts: Annotated[int, Field(ge=0, le=MAX_WINDOW)] | None = None


class PinnedPlan(ApiModel):
    """Which of the service's drafters run ahead, cheapest first, and how; the target is always the last stage."""

    mode: Literal["plain", "lockstep", "async"] = "lockstep"
    drafters: Annotated[list[PinnedDrafter], Field(max_length=MAX_STAGES - 1)] = Field(default_factory=list)
    warmup: Literal["none", "conservative", "progressive"] = "none"


class PlanChange(ApiModel):
    """`PUT /v1/autopipe/plan`: pin a plan (or, without one, the plan in force), or release it."""

    pinned: bool
    plan: PinnedPlan | None = None


def pinned_plan(wanted: PinnedPlan, home: Plan) -> Plan:
    """The plan that `wanted` describes.

    Args:
        home: the plan with all stages that the service may use.

    Raises:
        ConfigError: no such stage, or they do not fit together.
    """
    own = dict(zip(home.names(), home.chain, strict=True))
    drafters = {name: stage for name, stage in own.items() if stage is not home.target}
    chain = []
    for index, item in enumerate(wanted.drafters):
        if item.stage not in drafters:
            allowed = ", ".join(drafters) or "none: this service has no drafter"
            raise ConfigError(f"plan.drafters.{index}.stage", item.stage, f"one of {allowed}")
        stage = drafters[item.stage]
        changes: dict[str, Any] = {"name": item.stage}
        if item.window is not None:
            changes["window"] = item.window
        if item.min_drafts is not None:
            changes["min_drafts"] = item.min_drafts
        chain.append(stage.replace(**changes))
    target = home.target
    if chain and target.min_drafts > chain[-1].window:
        target = target.replace(min_drafts=chain[-1].window)
    warmup = {**home.warmup.model_dump(), "kind": wanted.warmup}
    try:
        return Plan.parse({**home.model_dump(), "mode": wanted.mode, "chain": [*chain, target], "warmup": warmup})
    except ConfigError as error:
        raise ConfigError(f"plan.{error.key}", error.value, error.allowed) from None


def plan_data(plan: Plan) -> dict[str, Any]:
    """A plan without what only its owner should know (paths, devices)."""
    names = plan.names()
    return {
        "mode": plan.mode.value,
        "verification": plan.verification.value,
        "exact": plan.exact,
        "warmup": plan.warmup.kind.value,
        "drafters": [
            {"stage": name, "window": stage.window, "min_drafts": stage.min_drafts}
            for name, stage in zip(names, plan.drafters, strict=False)
        ],
        "target": names[-1],
    }


def describe(plan: Plan) -> str:
    """One line: `ngram(7) > smollm2-135m, lockstep`."""
    names = plan.names()
    if not plan.drafters:
        return f"{names[-1]} alone"
    drafters = [f"{name}({stage.window})" for name, stage in zip(names, plan.drafters, strict=False)]
    return f"{' > '.join([*drafters, names[-1]])}, {plan.mode.value}"
