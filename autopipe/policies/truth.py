"""How a simulated pipeline really is, as `Predictor.seconds_per_token` takes it: for the oracle and for teaching."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.menu import ActionCodec
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.scenario import PipelineModel
from autopipe.envs.world import SimWorld

Floats = NDArray[np.float64]


def true_agreement(
    pipeline: PipelineModel, codec: ActionCodec, kind: PromptKind, factors: Mapping[str, float] | None = None
) -> Floats:
    """Agreement on a kind of prompt, [adapters + 1, slots]; 0.5 in slots that the pipeline does not fill.

    Args:
        factors: on a drafter's agreement, by name; None: no event has changed any.
    """
    adapters = ("", *codec.menu.adapters)
    agreement = np.full((len(adapters), codec.num_slots), 0.5)
    for slot, drafter in enumerate(pipeline.drafters):
        factor = 1.0 if factors is None else factors[drafter.name]
        for index, name in enumerate(adapters):
            agreement[index, slot] = min(drafter.agreement_on(kind, name) * factor, 0.995)
    return agreement


def true_state(world: SimWorld, codec: ActionCodec) -> tuple[Floats, Floats]:
    """Agreement on the kind of text to come, and factors on the times by slot, the target's last, [slots + 1]."""
    pipeline, conditions = world.scenario.pipeline, world.conditions
    slow_down = np.ones(codec.num_slots + 1)
    for slot, drafter in enumerate(pipeline.drafters):
        slow_down[slot] = conditions.slow_down[drafter.name]
    slow_down[-1] = conditions.slow_down["target"]
    return true_agreement(pipeline, codec, world.upcoming_kind, conditions.agreement), slow_down
