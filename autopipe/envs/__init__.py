"""Environments in which a policy reconfigures a pipeline, and the simulator under one of them.

`import autopipe.envs` is cheap: names load on first use. It registers `AutoPipe/PipelineSim-v0` and
`AutoPipe/Pipeline-v0` with Gymnasium, at once or as soon as Gymnasium is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopipe.envs.registration import register_envs, register_when_imported

if TYPE_CHECKING:
    from autopipe.envs.base import PipelineEnv
    from autopipe.envs.config import EnvConfig, LatencyTargets, RewardWeights, SpaceConfig
    from autopipe.envs.live_prompts import LivePrompt
    from autopipe.envs.measured import StageFacts, pipeline_from_stages
    from autopipe.envs.menu import ActionCodec, DrafterOption, PlanMenu
    from autopipe.envs.pipeline_live import PipelineLiveEnv
    from autopipe.envs.pipeline_sim import PipelineSimEnv
    from autopipe.envs.prompt_kinds import PromptKind, prompt_kind
    from autopipe.envs.randomise import Randomisation
    from autopipe.envs.scenario import Scenario, load_scenario, scenario_names
    from autopipe.envs.wrappers import flatten, normalise, stack_history

_HOME = {
    "ActionCodec": "menu",
    "DrafterOption": "menu",
    "EnvConfig": "config",
    "LatencyTargets": "config",
    "LivePrompt": "live_prompts",
    "PipelineEnv": "base",
    "PipelineLiveEnv": "pipeline_live",
    "PipelineSimEnv": "pipeline_sim",
    "PlanMenu": "menu",
    "PromptKind": "prompt_kinds",
    "Randomisation": "randomise",
    "RewardWeights": "config",
    "Scenario": "scenario",
    "SpaceConfig": "config",
    "StageFacts": "measured",
    "flatten": "wrappers",
    "load_scenario": "scenario",
    "normalise": "wrappers",
    "pipeline_from_stages": "measured",
    "prompt_kind": "prompt_kinds",
    "scenario_names": "scenario",
    "stack_history": "wrappers",
}

__all__ = [
    "ActionCodec",
    "DrafterOption",
    "EnvConfig",
    "LatencyTargets",
    "LivePrompt",
    "PipelineEnv",
    "PipelineLiveEnv",
    "PipelineSimEnv",
    "PlanMenu",
    "PromptKind",
    "Randomisation",
    "RewardWeights",
    "Scenario",
    "SpaceConfig",
    "StageFacts",
    "flatten",
    "load_scenario",
    "normalise",
    "pipeline_from_stages",
    "prompt_kind",
    "register_envs",
    "scenario_names",
    "stack_history",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


register_when_imported()
