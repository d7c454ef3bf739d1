"""The rules of thumb of the PipeSpec document, as it states them, each of which can be switched off."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from autopipe.core.config import UserModel
from autopipe.core.plan import WarmupKind
from autopipe.envs.menu import OFF, Action, slots_of
from autopipe.envs.observation import Observation
from autopipe.policies.base import Info, Policy, Reason, Situation, info_mask, is_allowed

INITIAL_WINDOWS = (8, 4, 2)
"""Half of what a stage drafts in a step of its consumer, in the document's example: by place in the chain."""


class RulesConfig(UserModel):
    """Which rules are in force, and their figures.

    Attributes:
        initial_windows: windows start at 8, 4, 2 by place in the chain; off: at the middle level.
        elastic_windows: a window grows a level while acceptance is above `grow_above`, shrinks below `shrink_below`.
        shrink_on_rollbacks: `rollbacks_in_a_row` intervals in a row in which most of a stage's offers were rolled
            back shrink its window a level (an interval is what a controller can see of "one position").
        conservative_start: small windows for the first 5% of a request's tokens.
        progressive_windows: requests of `long_tokens` and more open their windows step by step instead.
        min_acceptance: a stage whose acceptance stays below `acceptance_floor` for `patience_intervals` leaves the
            chain, and is tried again after `retry_intervals`, each time later.
        speed_ratio: adjacent stages are `least_ratio` to `most_ratio` times apart in speed: a stage that is less than
            that faster than the next one is left out, and so is one more than that faster while another would fit
            better. An n-gram drafter takes no time and is exempt.
        memory_limit: models take at most `memory_share` of the device's memory.
        off_arm: plain decoding when goodput stays below `off_below` of it for `off_patience` intervals; back after
            `retry_intervals`, each time later.
    """

    initial_windows: bool = True
    elastic_windows: bool = True
    shrink_on_rollbacks: bool = True
    conservative_start: bool = True
    progressive_windows: bool = True
    min_acceptance: bool = True
    speed_ratio: bool = True
    memory_limit: bool = True
    off_arm: bool = True
    grow_above: float = Field(default=0.8, ge=0, le=1)
    shrink_below: float = Field(default=0.5, ge=0, le=1)
    rollbacks_in_a_row: int = Field(default=3, ge=1)
    long_tokens: int = Field(default=1024, ge=1)
    acceptance_floor: float = Field(default=0.6, ge=0, le=1)
    patience_intervals: int = Field(default=4, ge=1)
    retry_intervals: int = Field(default=48, ge=1)
    least_ratio: float = Field(default=3.0, ge=1)
    most_ratio: float = Field(default=5.0, ge=1)
    memory_share: float = Field(default=0.8, gt=0, le=1)
    off_below: float = Field(default=1.0, ge=0)
    off_patience: int = Field(default=2, ge=1)


class RulesPolicy(Policy):
    """See `RulesConfig`."""

    name = "rules"

    def __init__(self, config: RulesConfig | None = None) -> None:
        self._rules = config or RulesConfig()

    def reset(self, situation: Situation, seed: int = 0) -> None:
        codec = situation.codec
        slots = codec.num_slots
        self._codec, self._levels = codec, np.array(codec.spaces.windows)
        self._slots = range(len(codec.menu.drafters))
        self._window = np.full(slots, len(self._levels) // 2)
        self._placed = np.full(slots, -1)  # place in the chain that a slot's first window was chosen for
        self._rolled = np.zeros(slots, dtype=np.int64)
        self._poor = np.zeros(slots, dtype=np.int64)
        self._out_until = np.zeros(slots, dtype=np.int64)
        self._times_out = np.zeros(slots, dtype=np.int64)
        self._interval = self._below = self._off_until = self._times_off = 0
        self._position = 0.0
        self._request_tokens: float | None = None
        self._chain = OFF
        self._said: list[str] = []

    def act(self, observation: Observation, info: Info) -> Action:
        self._interval += 1
        self._said = []
        in_force = info.get("action_in_force", self._codec.off())
        if in_force[0] != OFF and in_force[0] == self._chain:
            self._resize(observation, info, in_force)
            self._weed(observation, in_force)
            self._retreat(observation)
        self._measure_request(observation, info)
        chain = OFF if self._interval < self._off_until else self._pick_chain(observation, info)
        self._chain = chain
        return self._codec.canonical(self._assemble(chain))

    def explain(self) -> Reason:
        return Reason("; ".join(self._said) or "by the rules, nothing to change")

    # -- the rules ------------------------------------------------------------------------------------------

    def _resize(self, observation: Observation, info: Info, in_force: Action) -> None:
        rules, top = self._rules, len(self._levels) - 1
        acceptance, missing = observation["acceptance_fast"], observation["acceptance_missing"]
        for slot in slots_of(int(in_force[0])):
            if rules.elastic_windows and not missing[slot]:
                step = int(acceptance[slot] > rules.grow_above) - int(acceptance[slot] < rules.shrink_below)
                if step and 0 <= self._window[slot] + step <= top:
                    self._window[slot] += step
                    grown = "grows" if step > 0 else "shrinks"
                    self._say(f"acceptance of {self._name(slot)} is {acceptance[slot]:.2f}: its window {grown}")
            if rules.shrink_on_rollbacks:
                self._rolled[slot] = self._rolled[slot] + 1 if self._mostly_rolled_back(info, in_force, slot) else 0
                if self._rolled[slot] >= rules.rollbacks_in_a_row and self._window[slot] > 0:
                    self._window[slot] -= 1
                    self._rolled[slot] = 0
                    self._say(f"{self._name(slot)} was rolled back time after time: its window shrinks")

    def _mostly_rolled_back(self, info: Info, in_force: Action, slot: int) -> bool:
        if "room" not in info:
            return False
        verifications = float(info["room"][slot]) / int(self._levels[in_force[1 + slot]])
        accepted = float(info["accepted"][slot])
        return verifications > 0 and accepted < 0.5 * verifications

    def _weed(self, observation: Observation, in_force: Action) -> None:
        rules = self._rules
        if not rules.min_acceptance:
            return
        for slot in slots_of(int(in_force[0])):
            missing = bool(observation["acceptance_missing"][slot])
            poor = not missing and observation["acceptance_fast"][slot] < rules.acceptance_floor
            self._poor[slot] = self._poor[slot] + 1 if poor else 0
            if self._poor[slot] >= rules.patience_intervals:
                self._poor[slot] = 0
                self._out_until[slot] = self._interval + (rules.retry_intervals << min(int(self._times_out[slot]), 4))
                self._times_out[slot] += 1
                self._say(f"acceptance of {self._name(slot)} stays under {rules.acceptance_floor:.0%}: it leaves")

    def _retreat(self, observation: Observation) -> None:
        rules = self._rules
        if not rules.off_arm:
            return
        goodput = float(observation["goodput"][0]) * 4
        self._below = self._below + 1 if goodput < rules.off_below else 0
        if self._below >= rules.off_patience:
            self._below = 0
            self._off_until = self._interval + (rules.retry_intervals << min(self._times_off, 4))
            self._times_off += 1
            self._say(f"goodput is {goodput:.2f} of plain decoding: off")

    def _measure_request(self, observation: Observation, info: Info) -> None:
        """How long the request may become: tokens of the interval by the share of the request they were."""
        position = float(observation["position"][0])
        moved = position - self._position
        if moved > 0:
            self._request_tokens = float(info.get("num_tokens", 0)) / moved
        self._position = position

    def _pick_chain(self, observation: Observation, info: Info) -> int:
        """From the target upwards: every drafter that fits what comes behind it."""
        rules, mask = self._rules, info_mask(info, self._codec)
        chain, behind = OFF, 1.0
        for slot in reversed(self._slots):
            if rules.min_acceptance and self._interval < self._out_until[slot]:
                continue
            is_ngram = self._codec.menu.drafters[slot].stage.is_ngram
            step = float(observation["step_time"][slot])
            known = not observation["step_time_missing"][slot] and step > 0
            if rules.speed_ratio and known and not is_ngram:
                ratio = behind / step
                if ratio < rules.least_ratio or (ratio > rules.most_ratio and self._nearer(observation, slot, behind)):
                    continue
            wanted = chain | 1 << slot
            if rules.memory_limit and not self._fits(wanted):
                continue
            trial = self._codec.off()
            trial[0] = wanted
            if is_allowed(trial, mask, self._codec.sizes):
                chain = wanted
                behind = step if known and not is_ngram else behind
        return chain

    def _nearer(self, observation: Observation, slot: int, behind: float) -> bool:
        """Whether a faster drafter is no further from the stage behind than `most_ratio`: then it fits better."""
        rules = self._rules
        for other in self._slots:
            step = float(observation["step_time"][other])
            usable = other != slot and not self._codec.menu.drafters[other].stage.is_ngram and step > 0
            if usable and rules.least_ratio <= behind / step <= rules.most_ratio:
                return bool(self._interval >= self._out_until[other])
        return False

    def _fits(self, chain: int) -> bool:
        total_bytes = self._codec.menu.device_memory_bytes
        return total_bytes is None or self._codec.menu.memory_bytes(chain) <= self._rules.memory_share * total_bytes

    # -- putting it together --------------------------------------------------------------------------------

    def _assemble(self, chain: int) -> Action:
        action = self._codec.off()
        action[0] = chain
        for place, slot in enumerate(slots_of(chain)):
            if self._rules.initial_windows and self._placed[slot] != place:
                wanted = INITIAL_WINDOWS[min(place, len(INITIAL_WINDOWS) - 1)]
                self._window[slot] = int(np.abs(self._levels - wanted).argmin())
                self._placed[slot] = place
            action[1 + slot] = self._window[slot]
        action[-2] = self._warmup()
        return action

    def _warmup(self) -> int:
        """Index of the warm-up kind."""
        rules, kinds = self._rules, self._codec.spaces.warmups
        long = self._request_tokens is not None and self._request_tokens >= rules.long_tokens
        wanted = WarmupKind.NONE
        if rules.progressive_windows and long:
            wanted = WarmupKind.PROGRESSIVE
        elif rules.conservative_start:
            wanted = WarmupKind.CONSERVATIVE
        return kinds.index(wanted) if wanted in kinds else 0

    def _name(self, slot: int) -> str:
        return self._codec.slot_names()[slot]

    def _say(self, text: str) -> None:
        self._said.append(text)
