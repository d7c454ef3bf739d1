"""Policies that do not learn: plain decoding, and one plan for good."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.envs.menu import Action, ActionCodec
from autopipe.envs.observation import Observation
from autopipe.policies.base import Info, Policy, Reason, Situation, info_mask, is_allowed


class OffPolicy(Policy):
    """Plain decoding."""

    name = "off"

    def reset(self, situation: Situation, seed: int = 0) -> None:
        self._off = situation.codec.off()

    def act(self, observation: Observation, info: Info) -> Action:
        return self._off

    def explain(self) -> Reason:
        return Reason("plain decoding, always")


class StaticPolicy(Policy):
    """One plan, and plain decoding while the mask forbids it.

    Args:
        action: the plan; None: all of the menu's drafters in lockstep, with middling windows.
    """

    name = "static"

    def __init__(self, action: Sequence[int] | Action | None = None) -> None:
        self._wanted = action

    def reset(self, situation: Situation, seed: int = 0) -> None:
        codec = situation.codec
        self._codec = codec
        self._action = codec.canonical(full_chain(codec) if self._wanted is None else self._wanted)
        self._forbidden = False

    def act(self, observation: Observation, info: Info) -> Action:
        self._forbidden = not is_allowed(self._action, info_mask(info, self._codec), self._codec.sizes)
        return self._codec.off() if self._forbidden else self._action

    def explain(self) -> Reason:
        return Reason("the plan is not possible now: plain decoding" if self._forbidden else "one plan, always")


def full_chain(codec: ActionCodec) -> Action:
    """All drafters of the menu, with middling windows, in the first mode of the spaces."""
    action = codec.off()
    action[0] = (1 << len(codec.menu.drafters)) - 1
    return action
