"""The plans a policy may choose from, as actions: vectors of small whole numbers.

An action is `[chain, window of slot 0, window of slot 1, ..., min_drafts, mode, warmup, adapter]`, each an index.
`chain` is a bit mask over drafter slots (bit i: slot i drafts), so 0 is `off`, plain decoding, and the same number
means the same kind of chain whatever the models are: slot 0 is the cheapest drafter, and the only one that may be an
n-gram.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError
from autopipe.core.plan import Mode, Plan, StagePlan, Verification, Warmup
from autopipe.envs.config import SpaceConfig

OFF = 0
NO_ADAPTER = 0
_MASKS_KEPT = 256

Action = NDArray[np.int64]
Mask = NDArray[np.bool_]


class DrafterOption(UserModel):
    """A drafter that a policy may take into the chain.

    Attributes:
        stage: the stage; its window is set by the action.
        memory_bytes: memory it takes; None: not known, and never a reason to mask it.
        adapters: adapter by the name the menu gives it; the drafter ignores names it does not list.
    """

    stage: StagePlan
    memory_bytes: int | None = Field(default=None, ge=0)
    adapters: dict[str, str] = Field(default_factory=dict)


class PlanMenu(UserModel):
    """All plans with one target.

    Attributes:
        target: the target's stage.
        drafters: cheapest first; slot i of the spaces is drafters[i].
        adapters: names behind the adapter numbers 1, 2, ...; 0 is none.
        chains: bit masks on offer; None: all. `off` is always on offer.
        target_memory_bytes: memory the target takes.
        device_memory_bytes: memory of the device; None: not known.
    """

    target: StagePlan
    drafters: tuple[DrafterOption, ...] = Field(default=(), max_length=4)
    adapters: tuple[str, ...] = ()
    chains: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    target_memory_bytes: int | None = Field(default=None, ge=0)
    device_memory_bytes: int | None = Field(default=None, gt=0)
    exact: bool = True
    verification: Verification = Verification.EQUALITY

    @model_validator(mode="after")
    def _chains_exist(self) -> PlanMenu:
        for index, option in enumerate(self.drafters):
            if option.stage.is_ngram and index > 0:
                raise ConfigError(f"drafters.{index}.stage.model", option.stage.model, "`ngram` only in the first slot")
            for name in option.adapters:
                if name not in self.adapters:
                    raise ConfigError(f"drafters.{index}.adapters", name, f"names in adapters ({list(self.adapters)})")
        for chain in self.chains or ():
            if chain >= 1 << len(self.drafters):
                raise ConfigError("chains", chain, f"bit masks from 0 to {(1 << len(self.drafters)) - 1}")
        return self

    @classmethod
    def from_plan(cls, plan: Plan) -> PlanMenu:
        """A menu of a plan's own drafters and target."""
        return cls(
            target=plan.target,
            drafters=tuple(DrafterOption(stage=stage) for stage in plan.drafters),
            exact=plan.exact,
            verification=plan.verification,
        )

    def memory_bytes(self, chain: int) -> int:
        """Known memory of the target and the drafters of `chain`."""
        drafters = sum(self.drafters[slot].memory_bytes or 0 for slot in slots_of(chain))
        return (self.target_memory_bytes or 0) + drafters


def slots_of(chain: int) -> list[int]:
    """Drafter slots of a chain's bit mask, cheapest first."""
    return [slot for slot in range(chain.bit_length()) if chain >> slot & 1]


class ActionCodec:
    """Actions of one space, and what they mean on one menu.

    Raises:
        ConfigError: the menu has more drafters or adapters than the spaces have slots.
    """

    def __init__(self, spaces: SpaceConfig, menu: PlanMenu) -> None:
        if len(menu.drafters) > spaces.drafter_slots:
            raise ConfigError("drafters", len(menu.drafters), f"at most spaces.drafter_slots ({spaces.drafter_slots})")
        if len(menu.adapters) > spaces.adapter_slots:
            raise ConfigError("adapters", len(menu.adapters), f"at most spaces.adapter_slots ({spaces.adapter_slots})")
        self.spaces = spaces
        self.menu = menu
        self.sizes = action_sizes(spaces)
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self._masks: dict[tuple[int | None, int, float, int], Mask] = {}

    @property
    def num_slots(self) -> int:
        return self.spaces.drafter_slots

    def off(self) -> Action:
        """Plain decoding, with middling settings for whoever changes the chain alone."""
        action = np.zeros(len(self.sizes), dtype=np.int64)
        action[1 : 1 + self.num_slots] = len(self.spaces.windows) // 2
        return action

    def one_hot(self, action: Action) -> NDArray[np.float32]:
        """The action as the observation shows it, float32 [sum(sizes)]."""
        flat = np.zeros(self._starts[-1], dtype=np.float32)
        flat[self._starts[:-1] + action] = 1.0
        return flat

    def canonical(self, action: Sequence[int] | Action) -> Action:
        """The action with everything that cannot matter set as `off` has it, so that equal plans are equal.

        Raises:
            ConfigError: wrong length, or a number outside its range.
        """
        given = np.asarray(action, dtype=np.int64).reshape(-1)
        if given.shape != (len(self.sizes),) or ((given < 0) | (given >= self.sizes)).any():
            raise ConfigError("action", np.asarray(action).tolist(), f"{len(self.sizes)} numbers below {self.sizes}")
        result, chain = given.copy(), int(given[0])
        default = self.off()
        if chain == OFF:
            return default
        for slot in range(self.num_slots):
            if not chain >> slot & 1:
                result[1 + slot] = default[1 + slot]
        if self.spaces.modes[result[-3]] is not Mode.ASYNC:
            result[-4] = default[-4]
        if not any(self._adapter_name(result) in option.adapters for option in self._options(chain)):
            result[-1] = NO_ADAPTER
        return result

    def masks(self, memory_total_bytes: int | None, memory_others_bytes: int, share: float, dead: int = 0) -> Mask:
        """What may be chosen, as sb3-contrib wants it: bool [sum(sizes)], one stretch per number of the action.

        Args:
            memory_total_bytes: of the device; None: nothing is masked for memory.
            memory_others_bytes: taken by somebody else.
            share: most of the memory that models may take.
            dead: bit mask of drafters that are not alive.
        """
        key = (memory_total_bytes, memory_others_bytes, share, dead)
        if key not in self._masks:
            if len(self._masks) >= _MASKS_KEPT:
                self._masks.clear()
            self._masks[key] = self._make_mask(*key)
        return self._masks[key].copy()

    def _make_mask(self, memory_total_bytes: int | None, memory_others_bytes: int, share: float, dead: int) -> Mask:
        mask = np.ones(self._starts[-1], dtype=np.bool_)
        for chain in range(1, self.sizes[0]):
            mask[chain] = self.allowed(chain, memory_total_bytes, memory_others_bytes, share, dead)
        adapters = self._starts[-2] + 1
        mask[adapters + len(self.menu.adapters) :] = False
        return mask

    def allowed(
        self, chain: int, memory_total_bytes: int | None, memory_others_bytes: int, share: float, dead: int = 0
    ) -> bool:
        """Whether a chain may be chosen, see `masks`."""
        if chain == OFF:
            return True
        if chain >= 1 << len(self.menu.drafters) or chain & dead:
            return False
        if self.menu.chains is not None and chain not in self.menu.chains:
            return False
        if memory_total_bytes is None:
            return True
        return self.menu.memory_bytes(chain) + memory_others_bytes <= share * memory_total_bytes

    def plan(self, action: Sequence[int] | Action, resident_chain: int = OFF) -> Plan:
        """The plan that an action stands for.

        Args:
            resident_chain: for `off`: the chain whose drafters stay loaded, idle, so that it is cheap to go back.
        """
        action = self.canonical(action)
        chain = int(action[0])
        off = chain == OFF
        slots = slots_of(resident_chain if off else chain)
        mode = Mode.PLAIN if off else self.spaces.modes[action[-3]]
        wanted = self.spaces.min_drafts[action[-4]]
        stages: list[StagePlan] = []
        for slot in slots:
            option = self.menu.drafters[slot]
            changes: dict[str, object] = {"window": self.spaces.windows[action[1 + slot]]}
            if self._adapter_name(action) in option.adapters:
                changes["adapter"] = option.adapters[self._adapter_name(action)]
            stages.append(_with(option.stage, changes, wanted, stages))
        stages.append(_with(self.menu.target, {}, wanted, stages))
        return Plan(
            chain=tuple(stages),
            mode=mode,
            warmup=Warmup(kind=self.spaces.warmups[action[-2]]),
            exact=self.menu.exact,
            verification=self.menu.verification,
        )

    def describe(self, action: Sequence[int] | Action) -> str:
        """One line: `small(8) > target, async, min 2, progressive`."""
        action = self.canonical(action)
        if action[0] == OFF:
            return "off"
        names = self.slot_names()
        chain = [f"{names[slot]}({self.spaces.windows[action[1 + slot]]})" for slot in slots_of(int(action[0]))]
        parts = [" > ".join([*chain, "target"]), self.spaces.modes[action[-3]].value]
        if self.spaces.modes[action[-3]] is Mode.ASYNC:
            parts.append(f"min {self.spaces.min_drafts[action[-4]]}")
        parts.append(f"warm-up {self.spaces.warmups[action[-2]].value}")
        if action[-1] != NO_ADAPTER:
            parts.append(f"adapter {self._adapter_name(action)}")
        return ", ".join(parts)

    def slot_names(self) -> list[str]:
        """Names of the menu's drafters, by slot."""
        return [
            option.stage.name or ("ngram" if option.stage.is_ngram else option.stage.model)
            for option in self.menu.drafters
        ]

    def settings(self, action: Action) -> Mapping[str, int]:
        """What the numbers of a canonical action index: min_drafts, mode, warmup, adapter (as indices)."""
        return {"min_drafts": int(action[-4]), "mode": int(action[-3]), "warmup": int(action[-2])}

    def _options(self, chain: int) -> list[DrafterOption]:
        return [self.menu.drafters[slot] for slot in slots_of(chain) if slot < len(self.menu.drafters)]

    def _adapter_name(self, action: Action) -> str:
        index = int(action[-1])
        return self.menu.adapters[index - 1] if 0 < index <= len(self.menu.adapters) else ""


def action_sizes(spaces: SpaceConfig) -> list[int]:
    """How many values each number of an action has (`MultiDiscrete.nvec`)."""
    return [
        1 << spaces.drafter_slots,
        *[len(spaces.windows)] * spaces.drafter_slots,
        len(spaces.min_drafts),
        len(spaces.modes),
        len(spaces.warmups),
        1 + spaces.adapter_slots,
    ]


def _with(stage: StagePlan, changes: dict[str, object], wanted: int, before: Sequence[StagePlan]) -> StagePlan:
    """A stage whose `min_drafts` fit the window of the stage before it."""
    if before:
        changes["min_drafts"] = min(wanted, before[-1].window)
    return stage.model_copy(update=changes)
