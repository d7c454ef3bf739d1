"""What a policy believes of the machine and the text, kept current from every interval: the living profile."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.core.plan import Mode
from autopipe.envs.menu import NO_ADAPTER, Action, slots_of
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.scenario import PipelineModel
from autopipe.policies.base import Info, Situation
from autopipe.policies.predict import Machine

Floats = NDArray[np.float64]
_KINDS = tuple(PromptKind)

PRIOR_TOKENS = 24.0
"""Positions that a profiled agreement is worth; one that was never measured is worth `UNKNOWN_TOKENS`."""
UNKNOWN_TOKENS = 4.0
UNKNOWN_AGREEMENT = 0.6
HALF_LIFE_TOKENS = 320.0
"""Positions after which what was seen of a drafter counts half."""
_SPEED_KEEP = 0.5
_IDLE_HALF_LIFE, _LONGEST_HALF_LIFE = 10.0, 80.0
"""Intervals after which a drafter that does not run is believed half-way back at its profiled speed: a neighbour that
slowed it down may be gone. Longer each time that it proves to be slow still."""
_SLOW = 1.3
_UNSCORED_HALF_LIFE = 64.0
"""Intervals after which what was seen of a drafter that nobody scores counts half."""
_SURPRISE = 3.0
"""Standard errors between an interval and the belief at which old counts are cut: the text has changed."""


class Beliefs:
    """Agreement by adapter, drafter and kind of prompt, and how much slower than profiled each stage is.

    Agreement is counted at every position at which it is known: all drafters where the environment scores all of them
    (full information), otherwise those that drafted. Counts fade, and faster where an interval contradicts them.

    Attributes:
        slow_down: factor on the profiled times, by slot, the target's last, [slots + 1].
        kind: of the last interval.
    """

    def __init__(self, situation: Situation, machine: Machine) -> None:
        self._codec = situation.codec
        self._machine = machine
        self._names = situation.codec.slot_names()
        slots, adapters = situation.codec.num_slots, len(situation.codec.menu.adapters)
        prior, worth = _priors(situation.profile, self._codec.menu.adapters, slots)
        self._prior, self._worth = prior, worth  # [kinds, adapters + 1, slots]
        self._right = prior * worth
        self._judged = np.broadcast_to(worth, prior.shape).copy()
        self._seen = np.zeros((len(_KINDS), adapters + 1, slots))
        self._idle_half_life = np.full(slots, _IDLE_HALF_LIFE)
        self._was_slow = np.zeros(slots, dtype=np.bool_)
        self.slow_down = np.ones(slots + 1)
        self.kind = PromptKind.OTHER

    def agreement(self, kind: PromptKind | None = None) -> Floats:
        """Believed agreement on a kind of prompt, [adapters + 1, slots]."""
        at = _KINDS.index(self.kind if kind is None else kind)
        shares: Floats = np.clip(self._right[at] / self._judged[at], 0.005, 0.995)
        return shares

    def evidence(self, kind: PromptKind | None = None) -> Floats:
        """Positions that the belief rests on, prior included, [adapters + 1, slots]."""
        judged: Floats = self._judged[_KINDS.index(self.kind if kind is None else kind)]
        return judged

    def tokens_seen(self, kind: PromptKind | None = None) -> Floats:
        """Positions judged so far, faded, without the prior, [adapters + 1, slots]."""
        seen: Floats = self._seen[_KINDS.index(self.kind if kind is None else kind)]
        return seen

    def update(self, info: Info, action: Action) -> None:
        """Take in the interval that `info` describes, during which `action` was in force."""
        self.kind = PromptKind(info.get("kind", PromptKind.OTHER))
        tokens = int(info.get("decode_tokens", 0))
        if tokens <= 0:
            return
        at, adapter = _KINDS.index(self.kind), int(action[-1])
        scored: dict[str, float] = info.get("agreement") or {}
        counted = np.zeros(self._right.shape[1:], dtype=np.bool_)  # [adapters + 1, slots]
        for slot, name in enumerate(self._names):
            if name in scored:
                self._count(at, NO_ADAPTER, slot, scored[name] * tokens, float(tokens))
                counted[NO_ADAPTER, slot] = True
        for slot in slots_of(int(action[0])):
            with_adapter = self._has_adapter(slot, adapter)
            if with_adapter or self._names[slot] not in scored:
                found = self._from_drafts(info, action, slot)
                if found is not None:
                    self._count(at, adapter if with_adapter else NO_ADAPTER, slot, *found)
                    counted[adapter if with_adapter else NO_ADAPTER, slot] = True
        self._forget(at, ~counted)
        self._time(info, action)

    # -- agreement ------------------------------------------------------------------------------------------

    def _has_adapter(self, slot: int, adapter: int) -> bool:
        if adapter == NO_ADAPTER or slot >= len(self._codec.menu.drafters):
            return False
        return self._codec.menu.adapters[adapter - 1] in self._codec.menu.drafters[slot].adapters

    def _count(self, at: int, adapter: int, slot: int, right: float, judged: float) -> None:
        """Add positions; old ones fade, and are cut when these contradict them."""
        if judged <= 0:
            return
        place = (at, adapter, slot)
        old, worth = self._judged[place], float(self._worth[place])
        share = self._right[place] / old
        error = np.sqrt(max(share * (1 - share), 0.02) * (1 / judged + 1 / old))
        keep = 0.5 ** (judged / HALF_LIFE_TOKENS)
        if old > worth and abs(right / judged - share) > _SURPRISE * error:
            keep *= 0.15
        self._right[place] = keep * self._right[place] + right
        self._judged[place] = keep * old + judged
        self._seen[place] = keep * self._seen[place] + judged

    def _forget(self, at: int, places: NDArray[np.bool_]) -> None:
        """Let beliefs that nothing has confirmed return to what they were at first."""
        keep = np.where(places, 0.5 ** (1 / _UNSCORED_HALF_LIFE), 1.0)
        first = self._prior[at] * self._worth[at]
        self._right[at] = first + keep * (self._right[at] - first)
        self._judged[at] = self._worth[at] + keep * (self._judged[at] - self._worth[at])
        self._seen[at] *= keep

    def _from_drafts(self, info: Info, action: Action, slot: int) -> tuple[float, float] | None:
        """Right positions, and positions judged, from what a consumer made of a slot's drafts.

        Drafts behind the first wrong one are proposed, but nobody judges them. With n drafts a verification and m of
        them accepted on average, agreement a solves m = a + a^2 + ... + a^n.
        """
        proposed, accepted, room = (float(info[key][slot]) for key in ("proposed", "accepted", "room"))
        window = self._codec.spaces.windows[int(action[1 + slot])]
        verifications = room / window
        if proposed <= 0 or verifications <= 0:
            return None
        share = agreement_from_counts(accepted / verifications, max(proposed / verifications, 1.0))
        judged = accepted / share if share > 0.02 else min(verifications, proposed)
        return share * judged, judged

    # -- times ----------------------------------------------------------------------------------------------

    def _time(self, info: Info, action: Action) -> None:
        """Compare times of steps with the profile's."""
        measured = info.get("step_s")
        if measured is None:
            return
        chain = slots_of(int(action[0]))
        neural = [slot for slot in chain if not self._machine.is_ngram[slot]]
        producer: int | None = None
        idle = [slot for slot in range(self._codec.num_slots) if float(measured[slot]) <= 0]
        self.slow_down[idle] **= 0.5 ** (1 / self._idle_half_life[idle])
        busy = self._is_async(action) and len(neural) > 0
        for slot in [*chain, self._codec.num_slots]:
            seconds = float(measured[slot])
            if seconds > 0 and not (slot < len(self._machine.is_ngram) and self._machine.is_ngram[slot]):
                rows = 1.0 if producer is None else 1 + self._drafts_per_step(info, action, producer)
                expected = self._machine.rows_s(slot, rows)
                if busy:  # somewhere between alone and hindered all the time
                    expected *= 1 + 0.5 * (self._machine.contention - 1)
                if math.isfinite(expected) and expected > 0:
                    ratio = min(max(seconds / expected, 0.05), 50.0)
                    old = float(self.slow_down[slot])
                    keep = 0.0 if abs(math.log(ratio / old)) > 0.25 else _SPEED_KEEP
                    if slot < self._codec.num_slots:
                        longer = min(2 * self._idle_half_life[slot], _LONGEST_HALF_LIFE)
                        if ratio <= _SLOW:
                            self._idle_half_life[slot] = _IDLE_HALF_LIFE
                        elif self._was_slow[slot] and ratio > 1.25 * old:  # tried again, and still slow
                            self._idle_half_life[slot] = longer
                        self._was_slow[slot] = ratio > _SLOW
                    self.slow_down[slot] = keep * old + (1 - keep) * ratio
            producer = slot

    def _drafts_per_step(self, info: Info, action: Action, producer: int) -> float:
        room, proposed = float(info["room"][producer]), float(info["proposed"][producer])
        window = self._codec.spaces.windows[int(action[1 + producer])]
        return proposed / (room / window) if room > 0 else 0.0

    def _is_async(self, action: Action) -> bool:
        return self._codec.spaces.modes[int(action[-3])] is Mode.ASYNC


def agreement_from_counts(accepted: float, drafts: float) -> float:
    """Agreement a with a + a^2 + ... + a^drafts = accepted; by bisection, to 0.001.

    Args:
        accepted: accepted drafts per verification; drafts: proposed per verification, at least 1.
    """
    low, high = 0.0, 1.0
    if accepted >= drafts:
        return 1.0
    for _ in range(10):
        middle = (low + high) / 2
        value = middle * (1 - middle**drafts) / (1 - middle)
        low, high = (middle, high) if value < accepted else (low, middle)
    return (low + high) / 2


def _priors(profile: PipelineModel | None, adapters: tuple[str, ...], slots: int) -> tuple[Floats, Any]:
    """Agreement by kind, adapter and slot, and the positions it is worth."""
    prior = np.full((len(_KINDS), len(adapters) + 1, slots), UNKNOWN_AGREEMENT)
    worth = np.full(prior.shape, UNKNOWN_TOKENS)
    for slot, drafter in enumerate(profile.drafters if profile is not None else ()):
        if not drafter.agreement:
            continue
        for at, kind in enumerate(_KINDS):
            for index, name in enumerate(("", *adapters)):
                prior[at, index, slot] = drafter.agreement_on(kind, name)
                worth[at, index, slot] = PRIOR_TOKENS
    return np.clip(prior, 0.01, 0.99), worth
