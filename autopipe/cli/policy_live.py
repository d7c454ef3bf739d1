"""`autopipe policy eval --live`: policies against every static plan on the real engine, over a stream that alternates.

Every arm generates the same requests (code, chat, summaries, in turn) on the same loaded models, one arm after the
other, round after round, starting with another arm each time; a slow minute of the machine hits all of them. A policy
begins anew in every round: what it does not know yet is part of what it costs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autopipe.api import AutoPipe
from autopipe.core.plan import Mode, Plan
from autopipe.envs.config import EnvConfig
from autopipe.envs.menu import ActionCodec, PlanMenu, slots_of
from autopipe.policies.attach import attach_policy
from autopipe.policies.registry import make_policy

if TYPE_CHECKING:
    from autopipe.bench.prompts import Prompt

MAX_NEW_TOKENS = 160
_PER_KIND = 3
"""Prompts of a kind in a row, before the stream turns to the next kind."""
_WINDOWS = (2, 4, 8)
CODE, CHAT, SUMMARY = "humaneval", "chat", "summarize"


@dataclass(slots=True)
class LiveArm:
    """An arm and what it has measured.

    Attributes:
        ms_per_token: of every round: seconds of decoding (from the first token on) by tokens after the first.
        same: whether its outputs were always those of plain decoding.
    """

    name: str
    plan: Plan | None = None
    policy: str | None = None
    ms_per_token: list[float] = field(default_factory=list)
    changes: int = 0
    same: bool = True
    guard: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "arm": self.name,
            "ms_per_token": statistics.fmean(self.ms_per_token) if self.ms_per_token else None,
            "rounds_ms_per_token": self.ms_per_token,
            "changes": self.changes,
            "same_output": self.same,
            "guard": self.guard,
        }


def live_prompts(per_kind: int = _PER_KIND, blocks: int = 2) -> list[Prompt]:
    """The stream: code, chat, summaries, and again, with other prompts of each kind every time."""
    from autopipe.bench.prompts import load_prompts

    found: list[Prompt] = []
    for block in range(blocks):
        for name in (CODE, CHAT, SUMMARY):
            prompts = load_prompts(f"{name}:{per_kind * blocks}")
            found += prompts[block * per_kind : (block + 1) * per_kind]
    return found


def static_arms(codec: ActionCodec, base: Plan) -> list[LiveArm]:
    """The static plans: plain decoding, the plan given as it is, and every chain in lockstep with several windows."""
    everything = (1 << len(codec.menu.drafters)) - 1
    arms = [LiveArm("off", codec.plan(codec.off(), everything)), LiveArm("the plan given", base)]
    mode = codec.spaces.modes.index(Mode.LOCKSTEP)
    for chain in range(1, everything + 1):
        for window in _WINDOWS:
            action = codec.off()
            action[0], action[-3] = chain, mode
            for slot in slots_of(chain):
                action[1 + slot] = codec.spaces.windows.index(window)
            arms.append(LiveArm(codec.describe(action), codec.plan(action)))
    return arms


def run_live(
    policies: Sequence[str],
    *,
    plan: Path | None,
    rounds: int,
    json_output: bool,
    per_kind: int = _PER_KIND,
    max_new_tokens: int = MAX_NEW_TOKENS,
    say: Callable[[str], None] | None = None,
) -> list[LiveArm]:
    """Measure and print."""
    from autopipe.cli.show import console
    from autopipe.core.errors import ConfigError
    from autopipe.plans import DEFAULT_PLAN_PATH

    if rounds < 1:
        raise ConfigError("--rounds", rounds, "at least 1")
    for name in policies:
        make_policy(name, "--policies").close()
    screen = console(stderr=True)
    tell = say or (lambda text: screen.print(text, highlight=False))
    base = Plan.load(DEFAULT_PLAN_PATH if plan is None else plan)
    with AutoPipe.from_plan(base) as pipe:
        codec = ActionCodec(EnvConfig().spaces, PlanMenu.from_plan(base))
        arms = static_arms(codec, base)
        arms += [LiveArm(name, policy=name) for name in policies]
        measure(pipe, codec, arms, rounds, per_kind, max_new_tokens, tell)
    _show(arms, json_output)
    return arms


def measure(
    pipe: AutoPipe,
    codec: ActionCodec,
    arms: Sequence[LiveArm],
    rounds: int,
    per_kind: int,
    max_new_tokens: int,
    say: Callable[[str], None],
) -> None:
    """Run every arm in every round; the first arm, plain decoding, gives the outputs that all must have."""
    prompts = live_prompts(per_kind)
    full = codec.off()
    full[0] = (1 << len(codec.menu.drafters)) - 1
    pipe.engine.keep_loaded([codec.plan(full)] if full[0] else [])
    outputs: list[list[int]] = []
    for number in range(rounds):
        order = list(arms) if number == 0 else [*arms[number % len(arms) :], *arms[: number % len(arms)]]
        for arm in order:
            with _at_work(pipe, codec, arm):
                seconds, tokens = 0.0, 0
                for index, prompt in enumerate(prompts):
                    result = pipe.generate(**_input(prompt), max_new_tokens=max_new_tokens)
                    seconds += result.stats.total_s - (result.stats.queued_s or 0.0) - _ttft(result)
                    tokens += len(result.token_ids) - 1
                    if len(outputs) <= index:
                        outputs.append(list(result.token_ids))
                    arm.same = arm.same and list(result.token_ids) == outputs[index]
                arm.ms_per_token.append(1e3 * seconds / max(tokens, 1))
            say(f"round {number + 1}/{rounds}: {arm.name}: {arm.ms_per_token[-1]:.2f} ms a token")


@contextmanager
def _at_work(pipe: AutoPipe, codec: ActionCodec, arm: LiveArm) -> Iterator[None]:
    """The arm's plan in force, or its policy at work."""
    if arm.plan is not None:
        pipe.engine.apply(arm.plan)
        yield
        return
    controller = attach_policy(pipe.engine, arm.policy or "", tokenizer=pipe.tokenizer, menu=codec.menu)
    try:
        yield
    finally:
        controller.stop()
        status = controller.status()
        arm.changes += status["switches"] + status["retunes"]
        arm.guard = status["guard"]


def _input(prompt: Prompt) -> dict[str, Any]:
    return {"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.text}


def _ttft(result: Any) -> float:
    stats = result.stats
    return max((stats.ttft_s or 0.0) - (stats.queued_s or 0.0), 0.0)


def _show(arms: Sequence[LiveArm], json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps({"arms": [arm.to_dict() for arm in arms]}))
        return
    from rich.table import Table

    from autopipe.cli.show import console

    plain = statistics.fmean(arms[0].ms_per_token)
    table = Table(title="live: code, chat and summaries in turn")
    table.add_column("arm")
    for header in ("ms a token", "of plain", "plans changed", "same output"):
        table.add_column(header, justify="right")
    for arm in sorted(arms, key=lambda each: statistics.fmean(each.ms_per_token)):
        mean = statistics.fmean(arm.ms_per_token)
        table.add_row(arm.name, f"{mean:.2f}", f"{plain / mean:.3f}", str(arm.changes), "yes" if arm.same else "NO")
    console().print(table)
