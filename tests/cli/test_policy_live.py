"""Policies against static plans on the real engine: which plans, and what there was to gain."""

from __future__ import annotations

import pytest

from autopipe import AutoPipe, Plan
from autopipe.bench.prompts import Prompt
from autopipe.cli import policy_live
from autopipe.cli.policy_live import LiveArm, headroom, live_prompts, measure, static_arms, without_gate
from autopipe.core.plan import Mode, NgramOptions
from autopipe.envs.config import EnvConfig
from autopipe.envs.menu import ActionCodec, PlanMenu

GATED = Plan.parse({"chain": [{"model": "ngram", "window": 6}, {"model": "smollm2-135m"}], "mode": "lockstep"})


def arm(name: str, chat: float, code: float, *, policy: str | None = None) -> LiveArm:
    """One that took so many milliseconds for each of 10 tokens of chat and 30 of code."""
    made = LiveArm(name, None if policy else GATED, policy)
    made.ms.update(chat=10 * chat, code=30 * code)
    made.tokens.update(chat=10, code=30)
    return made


def test_headroom_is_what_the_best_plan_of_each_kind_would_have_taken() -> None:
    arms = [arm("a", 4.0, 4.0), arm("b", 2.0, 5.0), arm("fast", 1.0, 1.0, policy="bandit")]
    assert headroom(arms) == (4.0, pytest.approx((10 * 2 + 30 * 4) / 40))


def test_there_is_none_where_one_plan_is_the_best_for_every_kind() -> None:
    best, by_kind = headroom([arm("a", 2.0, 4.0), arm("b", 3.0, 5.0)])
    assert best == pytest.approx(by_kind)


def test_every_gated_plan_has_a_fellow_with_a_fixed_window() -> None:
    codec = ActionCodec(EnvConfig().spaces, PlanMenu.from_plan(GATED))
    arms = static_arms(codec, GATED)
    chains = [each.plan.chain for each in arms if each.plan is not None and each.plan.mode is Mode.LOCKSTEP]
    gates = [(chain[0].ngram or NgramOptions()).gate for chain in chains]
    assert gates.count(True) == gates.count(False) > 1
    assert len({each.name for each in arms}) == len(arms)
    assert without_gate(Plan.parse({"chain": [{"model": "smollm2-135m"}]})) is None


def test_the_stream_has_every_kind_and_no_prompt_twice() -> None:
    stream = live_prompts(2)
    assert {kind for kind, _ in stream} == set(policy_live.KINDS)
    assert len({prompt.name for _, prompt in stream}) == len(stream) == 12


def test_arms_are_measured_by_kind_and_checked_against_plain_decoding(
    pipe: AutoPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [("chat", Prompt("one", text="The quick brown fox")), ("humaneval", Prompt("two", text="def f(x):"))]
    monkeypatch.setattr(policy_live, "live_prompts", lambda per_kind: texts)
    plan = pipe.engine.plan
    codec = ActionCodec(EnvConfig().spaces, PlanMenu.from_plan(plan))
    arms = [*static_arms(codec, plan), LiveArm("rules", policy="rules")]
    said: list[str] = []
    measure(pipe, codec, arms, 2, 1, 24, said.append)
    assert all(each.same and len(each.ms_per_token) == 2 for each in arms)
    assert all(each.tokens == arms[0].tokens and each.mean_ms > 0 for each in arms)
    assert len(said) == 2 * len(arms)
    best, by_kind = headroom(arms)
    assert by_kind <= best * (1 + 1e-9)
