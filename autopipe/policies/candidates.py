"""The plans that policies compare: every chain and mode of a menu, with windows on a coarse grid."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.core.plan import Mode
from autopipe.envs.menu import NO_ADAPTER, OFF, Action, ActionCodec, Mask, slots_of

MAX_CANDIDATES = 600
"""More are thinned out: a decision has to compare all of them in well under a millisecond."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Canonical actions and their settings as arrays over them, so that all can be judged at once.

    Attributes:
        actions: int64 [n, len(nvec)]; the first is `off`.
        member: whether a slot drafts, bool [slots, n].
        window: int64 [slots, n].
        min_drafts: int64 [n].
        is_async: bool [n].
        adapter: 0 none, int64 [n].
    """

    actions: NDArray[np.int64]
    member: NDArray[np.bool_]
    window: NDArray[np.int64]
    min_drafts: NDArray[np.int64]
    is_async: NDArray[np.bool_]
    adapter: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.actions)

    def allowed(self, mask: Mask) -> NDArray[np.bool_]:
        """Which of them `info["action_mask"]` allows, bool [n]."""
        chains: NDArray[np.bool_] = mask[self.actions[:, 0]]
        return chains

    def index(self, action: Action) -> int | None:
        """Place of a canonical action; None: it is not among them."""
        found = np.flatnonzero((self.actions == action).all(axis=1))
        return int(found[0]) if len(found) else None


def candidates(codec: ActionCodec) -> Candidates:
    """All chains of a codec's menu, in every mode, without warm-up."""
    actions = [codec.off()]
    for chain in range(1, 1 << len(codec.menu.drafters)):
        if codec.menu.chains is not None and chain not in codec.menu.chains:
            continue
        actions += _chain_actions(codec, chain)
    unique = np.unique(np.array([codec.canonical(action) for action in actions]), axis=0)
    first_off = np.flatnonzero(unique[:, 0] == OFF)
    rest = unique[unique[:, 0] != OFF]
    if len(rest) >= MAX_CANDIDATES:
        rest = rest[np.linspace(0, len(rest) - 1, MAX_CANDIDATES - 1).astype(np.int64)]
    return as_candidates(codec, np.concatenate([unique[first_off[:1]], rest]))


def as_candidates(codec: ActionCodec, actions: NDArray[np.int64]) -> Candidates:
    """Actions with their settings as arrays."""
    slots, levels = codec.num_slots, np.array(codec.spaces.windows)
    modes = np.array([mode is Mode.ASYNC for mode in codec.spaces.modes])
    return Candidates(
        actions=actions,
        member=np.array([(actions[:, 0] >> slot & 1).astype(bool) for slot in range(slots)]),
        window=np.array([levels[actions[:, 1 + slot]] for slot in range(slots)]),
        min_drafts=np.array(codec.spaces.min_drafts)[actions[:, -4]],
        is_async=modes[actions[:, -3]] & (actions[:, 0] != OFF),
        adapter=actions[:, -1],
    )


def _chain_actions(codec: ActionCodec, chain: int) -> list[Action]:
    """A chain's plans: all windows for one drafter, every other one where there are several."""
    spaces, slots = codec.spaces, slots_of(chain)
    neural = [slot for slot in slots if not codec.menu.drafters[slot].stage.is_ngram]
    levels = range(len(spaces.windows))
    fewer = [level for level in levels if 2 <= spaces.windows[level] <= 8] or list(levels)
    choices = [list(levels) if len(slots) == 1 else fewer if slot in neural else fewer[-1:] for slot in slots]
    adapters = [NO_ADAPTER] + [
        1 + index
        for index, name in enumerate(codec.menu.adapters)
        if any(name in codec.menu.drafters[slot].adapters for slot in slots)
    ]
    found = []
    for mode, adapter in itertools.product(range(len(spaces.modes)), adapters):
        mins = range(len(spaces.min_drafts)) if spaces.modes[mode] is Mode.ASYNC else [0]
        if len(slots) > 1:
            mins = list(mins)[:: max(len(mins) - 1, 1)]
        for windows in itertools.product(*choices):
            for fewest in mins:
                action = codec.off()
                action[0], action[-1], action[-3], action[-4] = chain, adapter, mode, fewest
                for slot, level in zip(slots, windows, strict=True):
                    action[1 + slot] = level
                found.append(action)
    return found
