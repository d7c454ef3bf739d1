"""Which drafters a worker loads, keeps and gives up, as the engine tells it."""

from __future__ import annotations

from typing import Any

from autopipe.core.backends.emulated_batch import EmulatedBatchRunner
from autopipe.core.channel import Message
from autopipe.core.gating import StepCosts
from autopipe.core.plan import StagePlan
from autopipe.core.shared.draft_maker import DraftMaker
from autopipe.core.shared.drafter_keeper import DrafterKeeper
from autopipe.core.shared.drafter_loading import LoadedDrafter
from autopipe.core.shared.drafting import NeuralDrafting
from autopipe.core.shared.neural import SharedDrafter
from autopipe.core.shared.options import SharingOptions
from tests.core.shared.neural_scenes import SLOTS, spec


class Loader:
    """Says what it is asked to load, and gives what a test has put there."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.done: list[LoadedDrafter] = []

    def load(self, drafting: NeuralDrafting, threads: int) -> None:
        self.asked.append(drafting.key)

    def take(self, nobody_computes: Any, kept: Any) -> LoadedDrafter | None:
        return self.done.pop(0) if self.done else None


class Scene:
    def __init__(self) -> None:
        self.loader, self.said = Loader(), list[Message]()
        self.maker = DraftMaker(512, SharingOptions(), StepCosts())
        loader: Any = self.loader
        self.keeper = DrafterKeeper(self.maker, loader, self.said.append, lambda num_rows: None)
        self._number = 0

    def configure(self, *wanted: str, kept: tuple[str, ...] = (), again: tuple[str, ...] = ()) -> None:
        self._number += 1
        stages = [_drafting(key).model_dump(mode="json") for key in wanted]
        self.keeper.configure(
            {"number": self._number, "wanted": stages, "kept": [*wanted, *kept], "again": again, "drafter_threads": 1}
        )

    def loaded(self, key: str) -> SharedDrafter:
        drafter = SharedDrafter(key, EmulatedBatchRunner(spec(), SLOTS), SharingOptions())
        self.loader.done.append(LoadedDrafter(_drafting(key), drafter, {"of": key}))
        self.keeper.take_loaded()
        return drafter


def _drafting(key: str) -> NeuralDrafting:
    return NeuralDrafting(key=key, name=key, stage=StagePlan(model="any"))


def test_what_is_wanted_is_loaded_and_told_of_with_the_number_of_the_configuration() -> None:
    scene = Scene()
    scene.configure("a")
    scene.configure("a", "b")
    scene.loaded("a")
    assert list(scene.maker.drafters) == ["a"]
    assert scene.said == [{"type": "drafter-ready", "key": "a", "name": "a", "number": 2, "facts": {"of": "a"}}]


def test_what_is_kept_stays_and_is_not_loaded_for_that() -> None:
    scene = Scene()
    scene.configure("a")
    scene.loaded("a")
    scene.configure(kept=("a", "b"))
    assert list(scene.maker.drafters) == ["a"]
    assert scene.loader.asked == ["a"]
    scene.configure()
    assert not scene.maker.drafters


def test_what_is_loaded_too_late_is_not_used_and_not_told_of() -> None:
    scene = Scene()
    scene.configure("a")
    scene.configure()
    scene.loaded("a")
    assert not scene.maker.drafters
    assert not scene.said


def test_what_has_failed_is_loaded_again_only_when_asked_for() -> None:
    scene = Scene()
    scene.configure("a")
    scene.loader.done.append(LoadedDrafter(_drafting("a"), error=ValueError("broken")))
    scene.keeper.take_loaded()
    assert scene.said[-1]["type"] == "drafter-failed"
    scene.configure("a")
    assert scene.loader.asked == ["a"]
    scene.configure("a", again=("a",))
    assert scene.loader.asked == ["a", "a"]


def test_a_drafter_that_raises_or_is_short_of_memory_is_told_of() -> None:
    scene = Scene()
    scene.configure("a")
    scene.loaded("a").fell_short()
    assert (scene.said[-1]["type"], "KV memory" in scene.said[-1]["text"]) == ("note", True)
    scene.maker.failed("a", "a", ValueError("broken"))
    assert (scene.said[-1]["type"], scene.said[-1]["error"]) == ("drafter-lost", "ValueError")
