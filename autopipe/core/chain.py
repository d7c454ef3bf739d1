"""From a plan to what each stage's process is told: pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping

from autopipe.core.affinity import usable_cores
from autopipe.core.config import UserModel
from autopipe.core.isolation import cores_of
from autopipe.core.plan import Mode, NgramOptions, Plan, StagePlan, Warmup, WhenShort
from autopipe.core.stats import NGRAM


class StageConfig(UserModel):
    """A stage's place in the chain and its settings, as the engine derives them from a plan.

    Attributes:
        active: whether the stage takes part.
        producer: slot of the stage before it, or None.
        consumer: slot of the stage after it; None for the target.
        producer_name: what stats call the stage before it (`ngram` for an n-gram drafter); empty without one.
        ngram: options of an n-gram drafter in front of this stage, or None.
        window: tokens the producer may be ahead of this stage.
        adapter: which of the stage's loaded adapters it uses; None: it has but one, or none.
        device_map: where its layers are to be; None: where they were loaded.
    """

    active: bool = True
    producer: int | None = None
    consumer: int | None = None
    producer_name: str = ""
    ngram: NgramOptions | None = None
    mode: Mode = Mode.LOCKSTEP
    window: int = 4
    min_drafts: int = 1
    when_short: WhenShort = WhenShort.WAIT
    verify_cap: int = 128
    warmup: Warmup = Warmup()
    threads: int | None = None
    cores: tuple[int, ...] | None = None
    adapter: str | None = None
    device_map: dict[str, int | str] | None = None


def stage_keys(plan: Plan) -> list[str]:
    """A key for each neural stage of the chain, equal when two stages can share a loaded model.

    Two alike stages of one chain get different keys: each needs a cache of its own.
    """
    keys: list[str] = []
    for stage in reversed(neural_stages(plan)):  # numbered from the target, whose key no drafter may change
        base = json.dumps({**stage.identity(), "exact": plan.exact}, sort_keys=True)
        keys.append(f"{base}#{sum(key.startswith(base + '#') for key in keys)}")
    return keys[::-1]


def neural_names(plan: Plan) -> list[str]:
    """Their names."""
    return [name for name, stage in zip(plan.names(), plan.chain, strict=True) if not stage.is_ngram]


def neural_stages(plan: Plan) -> list[StagePlan]:
    """Stages with a process of their own, in chain order."""
    return [stage for stage in plan.chain if not stage.is_ngram]


def default_threads(plan: Plan) -> int:
    """Threads of a stage that does not say: all cores where stages take turns, else an equal share."""
    cores = usable_cores()
    if plan.mode is not Mode.ASYNC:
        return cores
    return max(1, cores // len(neural_stages(plan)))


def bound_cores(stage: StagePlan) -> tuple[int, ...] | None:
    """The cores a stage's process is bound to: its own, else those of its NUMA node; None: any."""
    if stage.cores is None and stage.numa is not None:
        return cores_of(stage.numa)
    return stage.cores


def configure_chain(plan: Plan, slots: Mapping[str, int]) -> dict[str, StageConfig]:
    """What each stage key with a slot is told; stages without a slot (dead, still loading) are bridged over.

    Args:
        slots: stage key -> slot on the board, of the stages that can run; the target must be among them.
    """
    keys = stage_keys(plan)
    stages = dict(zip(keys, neural_stages(plan), strict=True))
    names = dict(zip(keys, neural_names(plan), strict=True))
    target = keys[-1]
    running = [key for key in keys if key in slots and (plan.mode is not Mode.PLAIN or key == target)]
    ngram = next((stage for stage in plan.chain if stage.is_ngram), None)
    configs = {key: StageConfig(active=False) for key in slots}
    for index, key in enumerate(running):
        stage = stages[key]
        producer = running[index - 1] if index else None
        upstream = stages[producer] if producer else ngram if plan.mode is not Mode.PLAIN else None
        configs[key] = StageConfig(
            producer=slots[producer] if producer else None,
            consumer=slots[running[index + 1]] if key != target else None,
            producer_name=names[producer] if producer else NGRAM if upstream is not None else "",
            ngram=ngram.ngram_options() if ngram is not None and upstream is ngram else None,
            mode=plan.mode,
            window=upstream.window if upstream else 1,
            min_drafts=min(stage.min_drafts, upstream.window) if upstream else 0,
            when_short=stage.when_short,
            verify_cap=stage.verify_cap,
            warmup=plan.warmup,
            threads=stage.threads or default_threads(plan),
            cores=bound_cores(stage),
            adapter=stage.adapter if stage.adapters else None,
            device_map=stage.device_map if stage.movable and isinstance(stage.device_map, dict) else None,
        )
    return configs
