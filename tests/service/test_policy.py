"""A policy at work: it changes plans, says why, and changes no answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopipe.core.errors import ConfigError
from autopipe.policies.base import Policy, Reason, Situation
from autopipe.policies.static import OffPolicy, full_chain
from autopipe.service import policy as service_policy
from tests.service.serving import ALIAS, Running, serving, tiny_plan, until
from tests.service.test_metrics import value
from tests.service.test_refusals import send

PLAN = "/v1/autopipe/plan"


class Restless(OffPolicy):
    """Switches between plain decoding and all drafters, again and again."""

    name = "restless"

    def reset(self, situation: Situation, seed: int = 0) -> None:
        super().reset(situation, seed)
        self._plans = [full_chain(situation.codec), situation.codec.off()]
        self._turn = 0

    def act(self, observation: Any, info: Any) -> Any:
        self._turn += 1
        return self._plans[self._turn // 4 % 2]

    def explain(self) -> Reason:
        return Reason("restless", 0.25)


@pytest.fixture(scope="module")
def governed(tiny_folder: Path) -> Iterator[Running]:
    from autopipe.policies import attach

    def make(name: str, *_: Any, **__: Any) -> Policy:
        return Restless() if name == "bandit" else OffPolicy()

    patch = pytest.MonkeyPatch()
    patch.setattr(attach, "make_policy", make)
    with serving(tiny_plan(tiny_folder), policy="bandit", control_interval_s=0.1) as running:
        yield running
    patch.undo()


def complete(running: Running, seed: int = 1) -> Any:
    body = {"model": ALIAS, "prompt": "abcabc", "max_tokens": 300, "seed": seed, "logit_bias": {"257": -100}}
    return send(running, "/v1/completions", body)[1]["choices"]


def changes(running: Running) -> list[dict[str, Any]]:
    return [event.data for event in running.service.events.recent() if event.kind == "plan"]


def test_changes_tell_reason_plans_and_gain_and_leave_the_answer_as_it_is(governed: Running, running: Running) -> None:
    expected = complete(running)
    deadline = iter(range(40))
    while not any(change["reason"] == "restless" for change in changes(governed)):
        assert complete(governed) == expected
        next(deadline)
    change = next(change for change in changes(governed) if change["reason"] == "restless")
    assert change["source"] == "policy"
    assert change["predicted_gain"] == 0.25
    assert change["old"] != change["new"]
    assert value(governed, "plan_changes_total", source="policy") >= 1
    assert send(governed, PLAN)[1]["policy"] == "bandit"


def test_a_pin_keeps_the_policy_out_until_it_is_released(governed: Running) -> None:
    pin = {"pinned": True, "plan": {"drafters": [{"stage": "ngram", "window": 2}]}}
    assert send(governed, PLAN, pin, method="PUT")[1]["pinned"] is True
    before = len(changes(governed))
    for _ in range(4):
        complete(governed)
    assert send(governed, PLAN)[1]["description"] == "ngram(2) > target, lockstep"
    assert all(change["source"] == "pin" for change in changes(governed)[before:])
    assert send(governed, PLAN, {"pinned": False}, method="PUT")[1]["pinned"] is False
    until(lambda: send(governed, PLAN)[1]["description"] != "ngram(2) > target, lockstep")


def test_a_policy_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch, running: Running) -> None:
    from autopipe.policies import attach
    from autopipe.service.config import ServiceConfig

    def missing(*_: Any, **__: Any) -> Policy:
        raise ImportError("No module named 'gymnasium'")

    monkeypatch.setattr(attach, "make_policy", missing)
    config = ServiceConfig.parse({"policy": "rl"})
    with pytest.raises(ConfigError) as caught:
        service_policy.start_policy(config, running.service.ready(), None, lambda _: None)  # type: ignore[arg-type]
    assert caught.value.key == "policy"
