"""Which plan is in force while drafters are loaded, refused, lost and given up: the conductor with a worker made of
messages."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from autopipe.core.channel import Message
from autopipe.core.errors import AutoPipeError, ModelLoadError, TargetDiedError
from autopipe.core.plan import Plan, StagePlan
from autopipe.core.processes import WorkerState
from autopipe.core.shared.conductor import SharedConductor
from autopipe.core.shared.drafting import neural_drafters
from autopipe.core.shared.options import SharingOptions


def plan(*names: str, mode: str = "lockstep") -> Plan:
    """A target behind drafters of these names, each another model."""

    def stage(name: str) -> dict[str, Any]:
        return {"model": "emulated", "name": name, "emulated": {"ms": {1: 1}, "seed": sum(map(ord, name))}}

    return Plan.parse({"chain": [stage(name) for name in (*names, "target")], "mode": mode})


class Worker:
    """A worker's process as the conductor sees it, and its keeper."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.sent: list[Message] = []
        self.number_of_loads = 0

    @property
    def ready(self) -> bool:
        return self.worker is not None and self.worker.state is WorkerState.READY

    @property
    def loading(self) -> bool:
        return self.worker is not None and not self.ready

    def load(self, wanted: Plan, drafters: Sequence[StagePlan]) -> None:
        if self.worker is None:
            self.number_of_loads += 1
            self.worker = type("Process", (), {"state": WorkerState.LOADING, "facts": {}, "slot": None})()

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def end(self) -> None:
        self.worker = None

    def close(self) -> None:
        self.worker = None


class Scene:
    """A conductor, and what its worker says to it."""

    def __init__(self, first: Plan) -> None:
        self.conductor = SharedConductor(first, SharingOptions(), 600.0)
        self.conductor.keeper.close()
        self.worker = Worker()
        self.conductor.keeper = self.worker  # type: ignore[assignment]
        self.plans = {name: drafter.key for drafter in neural_drafters(plan("a", "b", "c")) for name in [drafter.name]}
        self.first = self.apply(first)

    def apply(self, wanted: Plan) -> Future[None]:
        done: Future[None] = Future()
        self.conductor.start_plan(wanted, done)
        return done

    def say(self, kind: str, **more: Any) -> None:
        self.conductor._obey({"type": kind, **more})

    def target_ready(self) -> None:
        self.say("ready", step_ms={"1": 1.0}, vocab_size=64)

    def ready(self, name: str, number: int | None = None) -> None:
        self.say("drafter-ready", key=self.plans[name], name=name, facts={"of": name}, number=self._number(number))

    def failed(self, name: str, kind: str = "drafter-failed", number: int | None = None) -> None:
        error = {"error": "ModelLoadError", "message": f"{name} is broken"}
        self.say(kind, key=self.plans[name], name=name, number=self._number(number), **error)

    def _number(self, number: int | None) -> int:
        return self.configured["number"] if number is None else number

    @property
    def configured(self) -> Message:
        """What the worker was told last."""
        return next(message for message in reversed(self.worker.sent) if message["type"] == "configure")

    def names(self, key: str) -> set[str]:
        known = {value: name for name, value in self.plans.items()}
        return {known[item["key"] if isinstance(item, dict) else item] for item in self.configured[key]}

    @property
    def in_force(self) -> list[str]:
        return self.conductor.plan.names()[:-1]

    @property
    def drafting(self) -> list[str]:
        return [drafter["name"] for drafter in self.configured["drafting"]["neural"]]


@pytest.fixture
def scene() -> Scene:
    """The plan with drafter `a` in force."""
    scene = Scene(plan("a"))
    scene.target_ready()
    scene.ready("a")
    assert scene.first.done()
    return scene


def test_the_first_plan_is_in_force_once_its_drafters_are_loaded() -> None:
    scene = Scene(plan("a", "b"))
    scene.target_ready()
    scene.ready("b")
    assert not scene.first.done()
    scene.ready("a")
    assert scene.first.result(0) is None


def test_while_a_plan_is_being_loaded_the_one_before_drafts(scene: Scene) -> None:
    done = scene.apply(plan("b"))
    assert (scene.in_force, scene.drafting) == (["a"], ["a"])
    assert scene.names("wanted") == scene.names("kept") == {"a", "b"}
    scene.ready("b")
    assert done.result(0) is None
    assert (scene.in_force, scene.drafting) == (["b"], ["b"])
    assert scene.names("kept") == {"b"}


def test_a_refused_plan_leaves_the_one_before_with_its_drafters(scene: Scene) -> None:
    done = scene.apply(plan("b"))
    scene.failed("b")
    with pytest.raises(ModelLoadError, match="b is broken"):
        done.result(0)
    assert (scene.in_force, scene.drafting, scene.names("kept")) == (["a"], ["a"], {"a"})


def test_a_plan_that_overtakes_another_and_is_refused_leaves_neither(scene: Scene) -> None:
    first, second = scene.apply(plan("b")), scene.apply(plan("c"))
    with pytest.raises(AutoPipeError, match="another plan"):
        first.result(0)
    scene.failed("c")
    with pytest.raises(ModelLoadError, match="c is broken"):
        second.result(0)
    assert scene.in_force == ["a"]


def test_a_plan_nobody_waits_for_any_more_is_given_up(scene: Scene) -> None:
    done = scene.apply(plan("b"))
    scene.conductor.withdraw_plan(done)
    scene.ready("b", number=scene.configured["number"] - 1)
    assert (scene.in_force, scene.names("kept")) == (["a"], {"a"})
    assert not scene.conductor.drafters.has_all(plan("b"))


def test_what_became_ready_for_a_plan_given_up_does_not_count_for_a_later_one(scene: Scene) -> None:
    scene.apply(plan("b"))
    number = scene.configured["number"]
    scene.apply(plan("a"))
    done = scene.apply(plan("b"))
    scene.ready("b", number=number)  # said before the worker was told to unload it
    assert not done.done()
    scene.ready("b")
    assert done.done()


def test_a_drafter_lost_while_another_is_loaded_refuses_the_plan_that_needs_both(scene: Scene) -> None:
    done = scene.apply(plan("a", "b"))
    scene.failed("a", "drafter-lost")
    with pytest.raises(AutoPipeError, match="a is broken"):
        done.result(0)
    assert any("'a'" in note for note in scene.conductor.fallbacks)


def test_a_lost_drafter_is_loaded_again_when_its_plan_is_applied(scene: Scene) -> None:
    scene.failed("a", "drafter-lost")
    done = scene.apply(scene.conductor.plan)
    assert scene.configured["again"] == [scene.plans["a"]]
    assert not done.done()
    scene.ready("a")
    assert done.done()


def test_what_is_kept_is_not_loaded_for_that(scene: Scene) -> None:
    scene.conductor.keep_loaded([plan("a", "b")])
    assert scene.names("wanted") == {"a"}
    assert scene.names("kept") == {"a", "b"}
    assert scene.apply(plan("c", mode="plain")).done() is False
    assert scene.names("kept") == {"a", "b", "c"}


def test_a_drafter_whose_loading_ends_the_process_refuses_its_plan(scene: Scene) -> None:
    done = scene.apply(plan("b"))
    scene.conductor._lose("it ended")
    with pytest.raises(TargetDiedError):
        done.result(0)
    assert scene.in_force == ["a"]
    scene.target_ready()
    assert scene.names("wanted") == {"a"}


def test_an_engine_whose_drafters_end_every_process_gives_up() -> None:
    scene = Scene(plan("a"))
    for _ in range(10):
        if scene.first.done():
            break
        scene.target_ready()
        scene.conductor._lose("it ended")
    with pytest.raises(AutoPipeError):
        scene.first.result(0)
    assert scene.worker.number_of_loads < 6


def test_drafters_are_called_what_the_plan_in_force_calls_them(scene: Scene) -> None:
    book, renamed = scene.conductor.drafters, plan("a").model_dump(mode="json")
    renamed["chain"][0]["name"] = "again"
    other = Plan.parse(renamed)
    assert book.names(plan("a")) == ["a"]
    assert book.names(other) == ["again"]
    assert book.facts(other, "again") == {"of": "a"}
    assert book.facts(other, "a") == {}
