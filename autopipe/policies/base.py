"""The one interface of all policies: observation and info in, action out; the same in simulation and in the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from autopipe.envs.config import EnvConfig
from autopipe.envs.menu import Action, ActionCodec, Mask
from autopipe.envs.observation import Observation
from autopipe.envs.scenario import PipelineModel

Info = Mapping[str, Any]
"""What an environment's `info` says, see docs/envs.md. Keys that are missing are not known."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy is told when it begins.

    Attributes:
        config: interval, spaces, averages.
        codec: the menu, and what actions mean on it.
        profile: what was measured of the stages beforehand; None: nothing. It may be wrong, and become so.
    """

    config: EnvConfig
    codec: ActionCodec
    profile: PipelineModel | None = None


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the last action was chosen.

    Attributes:
        text: in words, for people.
        predicted_gain: goodput expected of the action, relative to that of the action before it, minus 1; None: the
            policy predicts nothing.
    """

    text: str
    predicted_gain: float | None = None


class Policy(ABC):
    """Chooses a plan, control interval by control interval.

    `reset` comes first, then `act` once per interval. `act` takes less than a millisecond, keeps what it is given
    unchanged and returns an action that `info["action_mask"]` allows; whatever does neither is caught by the safety
    layer (`SafePolicy`). One thread at a time uses a policy.

    Attributes:
        name: as `--policy` and the tables of `autopipe policy eval` have it.
    """

    name: ClassVar[str] = "policy"

    @abstractmethod
    def reset(self, situation: Situation, seed: int = 0) -> None:
        """Begin anew; all randomness comes from `seed`."""

    @abstractmethod
    def act(self, observation: Observation, info: Info) -> Action:
        """The action for the next interval, int64 [len(nvec)].

        Args:
            observation: as the environments give it, see `PipelineSimEnv`.
            info: the environments' info of the interval that has just ended.
        """

    def explain(self) -> Reason:
        """Why the last action was chosen."""
        return Reason(self.name)

    @property
    def disturbs(self) -> bool:
        """Whether work of the policy's own takes time from the generation that is measured meanwhile."""
        return False

    def close(self) -> None:  # noqa: B027 - optional hook
        """Give back what the policy holds (processes); it is not used again."""


def is_allowed(action: Action, mask: Mask, sizes: list[int]) -> bool:
    """Whether a mask (bool [sum(sizes)]) allows every number of an action."""
    if action.shape != (len(sizes),) or (action < 0).any() or (action >= np.array(sizes)).any():
        return False
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    return bool(mask[starts + action].all())


def is_switch(old: Action, new: Action) -> bool:
    """Whether another chain or adapter drafts under `new`, not the same one with other settings."""
    return bool(old[0] != new[0] or old[-1] != new[-1])


def info_mask(info: Info, codec: ActionCodec) -> Mask:
    """The mask in `info`; where there is none, everything on the menu is allowed."""
    mask: Mask | None = info.get("action_mask")
    return codec.masks(None, 0, 1.0) if mask is None else mask
