"""What the engine knows of the neural drafters in its worker."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.chain import default_threads
from autopipe.core.channel import Message
from autopipe.core.plan import Plan
from autopipe.core.shared.drafting import DraftingConfig, NeuralDrafting, neural_drafters
from autopipe.core.shared.keeper import threads_of


class DrafterBook:
    """Written by the engine's thread; may be read from anywhere.

    Attributes:
        kept: plans whose drafters stay loaded while no plan in force uses them.
    """

    def __init__(self) -> None:
        self.kept: Sequence[Plan] = ()
        self._loaded: dict[str, Message] = {}  # key -> what it said when it was ready
        self._number = 0  # of the last configuration
        self._named: set[str] = set()  # keys that it named
        self._dropped: dict[str, int] = {}  # key -> the configuration that named it no more

    def has_all(self, plan: Plan) -> bool:
        """Whether all drafters of a plan are loaded."""
        return all(drafter.key in self._loaded for drafter in neural_drafters(plan))

    def names(self, plan: Plan) -> list[str]:
        """Names of the drafters that are loaded, as `plan` and the plans that are kept call them."""
        return list({each.key: each.name for each in self._known(plan) if each.key in self._loaded}.values())

    def facts(self, plan: Plan, name: str) -> Message:
        """What a drafter said when it was ready; {} where it is not loaded."""
        return next((dict(self._loaded.get(each.key, {})) for each in self._known(plan)[::-1] if each.name == name), {})

    def _known(self, plan: Plan) -> list[NeuralDrafting]:
        """Drafters by any name, those of `plan` last."""
        return [drafter for known in (*self.kept, plan) for drafter in neural_drafters(known)]

    def configuration(self, plan: Plan, pending: Plan | None, again: Sequence[str] = ()) -> Message:
        """What the worker is told: what to draft with, which drafters to load, and which to keep.

        Args:
            plan: in force.
            pending: to be in force once its drafters are loaded.
            again: keys of drafters to load although they have failed before.
        """
        plans = [plan] if pending is None else [pending, plan]
        wanted = {drafter.key: drafter for each in plans for drafter in neural_drafters(each)}
        kept = {drafter.key for each in (*plans, *self.kept) for drafter in neural_drafters(each)}
        self._number += 1
        self._dropped |= dict.fromkeys(self._named - kept, self._number)
        self._named = kept
        self._loaded = {key: facts for key, facts in self._loaded.items() if key in kept}
        return {
            "type": "configure",
            "number": self._number,
            "drafting": DraftingConfig.of(plan).model_dump(mode="json"),
            "wanted": [drafter.model_dump(mode="json") for drafter in wanted.values()],
            "kept": sorted(kept),
            "again": list(again),
            "threads": threads_of(plan),
            "drafter_threads": default_threads(plan),
        }

    def is_current(self, message: Message) -> bool:
        """Whether what the worker says of a drafter was said after it was last told to give that one up."""
        return bool(message["number"] >= self._dropped.get(message["key"], 0))

    def enter(self, message: Message) -> None:
        """A drafter is loaded."""
        self._loaded[message["key"]] = message["facts"]

    def strike(self, key: str) -> None:
        """A drafter is gone."""
        self._loaded.pop(key, None)

    def clear(self) -> None:
        """All are: the worker is gone."""
        self._loaded.clear()
