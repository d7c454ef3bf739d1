"""The safety layer: whatever a policy does, the plan is allowed, and not slower than plain decoding for long."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from pydantic import Field

from autopipe.core.config import UserModel
from autopipe.envs.menu import OFF, Action
from autopipe.envs.observation import Observation
from autopipe.policies.base import Info, Policy, Reason, Situation, info_mask, is_allowed, is_switch

_log = logging.getLogger(__name__)


class SafetyConfig(UserModel):
    """Settings of the safety layer.

    Attributes:
        dwell_intervals: intervals that a chain stays before another may replace it, unless it is forbidden or slower
            than the floor; settings within a chain may change at any time.
        min_gain: a change for which the policy predicts less than this is not made.
        floor: least goodput, relative to plain decoding, over `floor_intervals`; below it the last good plan returns.
        floor_intervals: intervals over which goodput is judged; half as many where it is `far_below` under the floor.
        cool_down: intervals of plain decoding when there is no good plan to go back to; doubles each time.
        ban_intervals: intervals for which a plan that broke the floor is not tried again; doubles each time.
    """

    dwell_intervals: int = Field(default=2, ge=0)
    min_gain: float = Field(default=0.0, ge=0)
    floor: float = Field(default=0.97, ge=0)
    floor_intervals: int = Field(default=4, ge=1)
    ban_intervals: int = Field(default=32, ge=1)
    far_below: float = Field(default=0.12, ge=0)
    cool_down: int = Field(default=8, ge=0)


@dataclass(slots=True)
class SafetyStats:
    """What the safety layer has done.

    Attributes:
        clamped: actions out of range; masked: forbidden; held: changes that came too early or promised too little;
        banned: plans refused because they broke the floor before.
        floor_breaks: times goodput fell below the floor.
        errors: what the policy raised, in words; replaced_by: the policy that took its place.
        notes: in words, the newest last; num_notes: how many there have been.
    """

    clamped: int = 0
    masked: int = 0
    held: int = 0
    banned: int = 0
    floor_breaks: int = 0
    errors: list[str] = field(default_factory=list)
    replaced_by: str | None = None
    notes: list[str] = field(default_factory=list)
    num_notes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class SafePolicy(Policy):
    """A policy behind the safety layer.

    Args:
        fallback: makes the policy that replaces one that raises.
    """

    name = "safe"
    _NOTES_KEPT = 50

    def __init__(self, policy: Policy, config: SafetyConfig | None = None, *, fallback: Callable[[], Policy]) -> None:
        self._policy = policy
        self._config = config or SafetyConfig()
        self._fallback = fallback
        self.stats = SafetyStats()

    @property
    def policy(self) -> Policy:
        """The policy at work: the one given, or what replaced it."""
        return self._policy

    def reset(self, situation: Situation, seed: int = 0) -> None:
        self._situation, self._seed = situation, seed
        self._codec = situation.codec
        self.stats = SafetyStats()
        self._action = self._last_good = situation.codec.off()
        self._since_change = 0
        self._interval = 0
        self._window: list[tuple[float, float]] = []  # seconds of plain decoding and measured, under this plan
        self._hold_until = 0
        self._banned: dict[bytes, int] = {}  # plan -> interval at which it may come back
        self._breaks: Counter[bytes] = Counter()
        self._disturbed = False
        self._reason = Reason("start")
        self._guarded(lambda: self._policy.reset(situation, seed))

    def act(self, observation: Observation, info: Info) -> Action:
        self._interval += 1
        self._since_change += 1
        self._judge(info)
        wanted = self._guarded(lambda: self._checked(self._policy.act(observation, info)))
        reason = self._guarded(self._policy.explain)
        action, why = self._settle(wanted, reason, info)
        if not np.array_equal(action, self._action):
            if is_switch(self._action, action):
                self._since_change = 0
            self._window.clear()
            self._action = action
        self._reason = reason if why is None else Reason(why)
        return action.copy()

    def explain(self) -> Reason:
        return self._reason

    def close(self) -> None:
        self._policy.close()

    # -- what the policy wants ------------------------------------------------------------------------------

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Call the policy; put the fallback in its place if it raises, and call that."""
        try:
            return call()
        except Exception as error:
            if self.stats.replaced_by is not None:
                raise
            failure = f"{type(error).__name__}: {error}"
            _log.warning("policy %s failed and is replaced: %s", self._policy.name, failure, exc_info=error)
            self.stats.errors.append(failure)
            self._policy.close()
            failed, self._policy = self._policy.name, self._fallback()
            self.stats.replaced_by = self._policy.name
            self._note(f"{failed} failed ({failure}); {self._policy.name} takes over")
            self._policy.reset(self._situation, self._seed)
            return call()

    def _checked(self, wanted: Any) -> Action:
        """The policy's action as canonical whole numbers.

        Raises:
            ValueError: NaN or infinite numbers, or not as many as an action has.
        """
        numbers = np.asarray(wanted, dtype=np.float64).reshape(-1)
        if numbers.shape != (len(self._codec.sizes),):
            raise ValueError(f"an action of {numbers.size} numbers instead of {len(self._codec.sizes)}")
        if not np.isfinite(numbers).all():
            raise ValueError(f"an action with NaN or infinite numbers: {numbers.tolist()}")
        clamped = np.clip(np.rint(numbers), 0, np.array(self._codec.sizes) - 1).astype(np.int64)
        if not np.array_equal(clamped, numbers):
            self.stats.clamped += 1
        return self._codec.canonical(clamped)

    def _settle(self, wanted: Action, reason: Reason, info: Info) -> tuple[Action, str | None]:
        """The action to put in force, and why it is not the policy's."""
        mask, config = info_mask(info, self._codec), self._config
        keep_possible = is_allowed(self._action, mask, self._codec.sizes)
        keep = self._action if keep_possible else self._codec.off()
        if not is_allowed(wanted, mask, self._codec.sizes):
            self.stats.masked += 1
            return keep, "the plan wanted is not possible now"
        if self._interval < self._hold_until:
            self.stats.held += 1
            return self._codec.off(), "plain decoding for a while, after a plan fell below the floor"
        if self._banned.get(wanted.tobytes(), 0) > self._interval:
            self.stats.banned += 1
            return (self._codec.off() if np.array_equal(keep, wanted) else keep), "the plan wanted broke the floor"
        if not keep_possible or np.array_equal(wanted, self._action):
            return wanted, None
        escaping = self._banned.get(self._action.tobytes(), 0) > self._interval
        too_early = is_switch(self._action, wanted) and self._since_change <= config.dwell_intervals and not escaping
        too_little = reason.predicted_gain is not None and reason.predicted_gain < config.min_gain and not escaping
        if self._interval > 1 and (too_early or too_little):
            self.stats.held += 1
            return keep, "the change comes too early" if too_early else "the change promises too little"
        return wanted, None

    # -- the floor ------------------------------------------------------------------------------------------

    def _judge(self, info: Info) -> None:
        """Compare what the plan in force has yielded with plain decoding; ban it where it is below the floor."""
        plain_s, decode_s = float(info.get("plain_s", 0.0)), float(info.get("decode_s", 0.0))
        in_force = info.get("action_in_force", self._action)
        disturbed, self._disturbed = self._disturbed, self._policy.disturbs
        if disturbed or self._disturbed:  # at the beginning or the end of the interval
            return
        if decode_s <= 0 or plain_s <= 0 or self._action[0] == OFF or not np.array_equal(in_force, self._action):
            return
        self._window.append((plain_s, decode_s))
        del self._window[: -self._config.floor_intervals]
        config, count = self._config, len(self._window)
        goodput = sum(plain for plain, _ in self._window) / sum(measured for _, measured in self._window)
        far_below = goodput < config.floor - config.far_below and 2 * count >= config.floor_intervals
        if count < config.floor_intervals and not far_below:
            return
        if goodput >= config.floor:
            self._last_good = self._action
            return
        key = self._action.tobytes()
        self._banned[key] = self._interval + (self._config.ban_intervals << min(self._breaks[key], 4))
        self._breaks[key] += 1
        self.stats.floor_breaks += 1
        broken = self._codec.describe(self._action)
        self._go_back(f"{broken} reached {goodput:.2f} of plain decoding (floor {self._config.floor:g})")

    def _go_back(self, why: str) -> None:
        back = self._last_good
        if np.array_equal(back, self._action) or self._banned.get(back.tobytes(), 0) > self._interval:
            back = self._codec.off()
        if back[0] == OFF:
            self._hold_until = self._interval + (self._config.cool_down << min(self.stats.floor_breaks - 1, 4))
        self._note(f"{why}; back to {self._codec.describe(back)}")
        self._action, self._last_good = back, self._codec.off()
        self._window.clear()
        self._since_change = 0

    def _note(self, text: str) -> None:
        _log.info("%s", text)
        self.stats.notes.append(text)
        self.stats.num_notes += 1
        del self.stats.notes[: -self._NOTES_KEPT]
