import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autopipe.core.engine import Engine
from autopipe.core.errors import ConfigError
from autopipe.core.sampling import SamplingParams
from autopipe.envs.menu import PlanMenu
from autopipe.policies import EventKind, Policy, PolicyEvent, RuntimeController, SafetyConfig, make_policy
from tests.envs.scenes import emulated_plan, emulated_stage
from tests.policies.helpers import Scripted, action

PROMPT = [1, 2, 3]
ONE, BOTH = action(1, (2, 2, 2)), action(3, (2, 2, 2))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(
        emulated_plan(
            emulated_stage("small", 0.8, ms=0.1),
            emulated_stage("medium", 0.9, ms=0.3),
            emulated_stage("target", ms=1.0),
        )
    ) as made:
        yield made


def generate(engine: Engine, tokens: int = 400) -> list[int]:
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=tokens))
    return [token for block in handle for token in block.token_ids]


def until(true: Callable[[], bool], engine: Engine, requests: int = 40) -> None:
    """Generate until something holds."""
    for _ in range(requests):
        if true():
            return
        generate(engine, 200)
    assert true()


def controlled(engine: Engine, policy: Policy, **options: Any) -> RuntimeController:
    """A controller that does what the policy says, however slow it is here: no test depends on times."""
    free = SafetyConfig(floor=0, dwell_intervals=0)
    return RuntimeController(engine, policy, telemetry=False, interval_tokens=8, safety=free, **options)


def kinds(controller: RuntimeController) -> list[str]:
    return [event.kind.value for event in controller.events]


def test_output_is_that_of_plain_decoding_while_plans_change(engine: Engine) -> None:
    plain = generate(engine)
    changing = Scripted(*[ONE, BOTH, action(0), action(2, mode=1)] * 40)
    with controlled(engine, changing) as controller:
        outputs = [generate(engine) for _ in range(4)]
        assert all(output == plain for output in outputs)
        assert controller.status()["intervals"] > 3
        assert EventKind.PLAN in [event.kind for event in controller.events]


def test_plain_decoding_is_measured_first_then_the_policys_plan_comes_into_force(engine: Engine) -> None:
    with controlled(engine, Scripted(BOTH)) as controller:
        until(lambda: "outcome" in kinds(controller), engine)
        assert kinds(controller)[:2] == ["calibrated", "plan"]
        assert [stage.name for stage in engine.plan.chain] == ["small", "medium", "target"]
        assert controller.status()["plan"].startswith("small(4) > medium(4) > target")


def test_an_event_says_why_from_what_to_what_and_what_came_of_it(engine: Engine) -> None:
    heard: list[PolicyEvent] = []
    policy = Scripted(BOTH, gain=0.5)
    with controlled(engine, policy, on_event=heard.append) as controller:
        until(lambda: "outcome" in kinds(controller), engine)
    plan = next(event for event in heard if event.kind is EventKind.PLAN)
    outcome = next(event for event in heard if event.kind is EventKind.OUTCOME)
    assert (plan.reason, plan.old_plan, plan.predicted_gain) == ("as the script says", "off", 0.5)
    assert plan.new_plan.startswith("small(4) > medium(4)")
    assert outcome.number == plan.number
    assert outcome.observed_gain is not None
    assert set(outcome.to_dict()) >= {"kind", "reason", "old_plan", "new_plan", "predicted_gain", "observed_gain"}


def test_all_drafters_stay_loaded_when_a_plan_uses_one(engine: Engine) -> None:
    with controlled(engine, Scripted(ONE)) as controller:
        before = dict(engine.worker_ids)
        until(lambda: "plan" in kinds(controller), engine)
        assert [stage.name for stage in engine.plan.chain] == ["small", "target"]
        assert dict(engine.worker_ids) == before


def test_a_policy_that_raises_is_replaced_by_the_rules_and_the_stream_goes_on(engine: Engine) -> None:
    with controlled(engine, Scripted(RuntimeError("broken"))) as controller:
        until(lambda: "policy-failed" in kinds(controller), engine)
        assert controller.status()["policy"] == "rules"
        assert controller.status()["guard"]["errors"] == ["RuntimeError: broken"]
        assert len(generate(engine, 50)) == 50


def test_a_paused_controller_leaves_the_plan_alone(engine: Engine) -> None:
    with controlled(engine, Scripted(BOTH)) as controller:
        controller.pause()
        for _ in range(3):
            generate(engine, 100)
        assert "plan" not in kinds(controller)
        controller.resume()
        until(lambda: "plan" in kinds(controller), engine)


def test_what_on_event_raises_does_not_end_it(engine: Engine) -> None:
    def broken(event: PolicyEvent) -> None:
        raise ValueError("listener")

    with controlled(engine, Scripted(BOTH), on_event=broken) as controller:
        until(lambda: "outcome" in kinds(controller), engine)


def test_stop_may_be_called_twice_and_before_start(engine: Engine) -> None:
    controller = RuntimeController(engine, "off", telemetry=False)
    controller.stop()
    controller.stop()
    assert not controller.status()["active"]


def test_it_ends_with_the_engine() -> None:
    engine = Engine(emulated_plan())
    controller = RuntimeController(engine, "off", telemetry=False).start()
    engine.close()
    deadline = time.monotonic() + 10
    while controller.status()["active"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not controller.status()["active"]
    controller.stop()


@pytest.mark.parametrize("name", ["rules", "bandit", "rl"])
def test_shipped_policies_turn_drafting_on_with_good_drafters(name: str) -> None:
    # Eight times apart: a busy machine's delays come on top, and `rules` leaves out what is less than 3x faster.
    chain = emulated_stage("small", 0.8, ms=0.06), emulated_stage("medium", 0.9, ms=0.5), emulated_stage("target", ms=4)
    with Engine(emulated_plan(*chain)) as engine, controlled(engine, make_policy(name)) as controller:
        until(lambda: "plan" in kinds(controller), engine)
        first = next(event for event in controller.events if event.kind is EventKind.PLAN)
        assert first.new_plan != "off"
        assert controller.status()["guard"]["errors"] == []


def test_a_menu_for_another_target_is_refused(engine: Engine) -> None:
    other = PlanMenu.from_plan(emulated_plan(emulated_stage("small", 0.5), emulated_stage("target", ms=9.0)))
    with pytest.raises(ConfigError, match=r"menu\.target"):
        RuntimeController(engine, "off", menu=other, telemetry=False)


def test_an_unknown_policy_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="bandit"):
        RuntimeController(engine, "clever", telemetry=False)
