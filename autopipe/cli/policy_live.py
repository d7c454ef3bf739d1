"""`autopipe policy eval --live`: policies against every static plan on the real engine, over a stream that alternates.

Static plans are of two sorts: with the n-gram drafter's gate, which decides at every verification how many drafts
pay, and with fixed windows, always filled. Beside the arms stands what a policy could have gained by always having
that one of these plans in force which was best for the kind of text, chosen with hindsight, noise and all: if that is
nothing, choosing by kind cannot win.

Every arm generates the same requests (code, chat, summaries, in turn) on the same loaded models, one arm after the
other, round after round, starting with another arm each time; a slow minute of the machine hits all of them. A policy
begins anew in every round: what it does not know yet is part of what it costs.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autopipe.api import AutoPipe
from autopipe.core.plan import Mode, NgramOptions, Plan
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
KINDS = ("humaneval", "chat", "summarize")


@dataclass(slots=True)
class LiveArm:
    """An arm and what it has measured.

    Attributes:
        ms_per_token: of every round: milliseconds of decoding (from the first token on) by tokens after the first.
        ms, tokens: of all rounds, by kind of text.
        same: whether its outputs were always those of plain decoding.
    """

    name: str
    plan: Plan | None = None
    policy: str | None = None
    ms_per_token: list[float] = field(default_factory=list)
    ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: Counter[str] = field(default_factory=Counter)
    changes: int = 0
    same: bool = True
    guard: dict[str, Any] = field(default_factory=dict)

    @property
    def mean_ms(self) -> float:
        """Milliseconds a token, of all rounds together."""
        return sum(self.ms.values()) / max(self.tokens.total(), 1)

    def mean_ms_of(self, kind: str) -> float:
        return self.ms[kind] / max(self.tokens[kind], 1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "arm": self.name,
            "ms_per_token": self.mean_ms,
            "kinds_ms_per_token": {kind: self.mean_ms_of(kind) for kind in self.tokens},
            "rounds_ms_per_token": self.ms_per_token,
            "changes": self.changes,
            "same_output": self.same,
            "guard": self.guard,
        }


def live_prompts(per_kind: int = _PER_KIND, blocks: int = 2) -> list[tuple[str, Prompt]]:
    """The stream, with the kind of each prompt: code, chat, summaries, and again, with other prompts every time."""
    from autopipe.bench.prompts import load_prompts

    found: list[tuple[str, Prompt]] = []
    for block in range(blocks):
        for kind in KINDS:
            prompts = load_prompts(f"{kind}:{per_kind * blocks}")
            found += [(kind, prompt) for prompt in prompts[block * per_kind : (block + 1) * per_kind]]
    return found


def static_arms(codec: ActionCodec, base: Plan) -> list[LiveArm]:
    """The static plans: plain decoding, the plan given, every chain in lockstep with several windows, gated and not."""
    everything = (1 << len(codec.menu.drafters)) - 1
    arms = [LiveArm("off", codec.plan(codec.off(), everything)), LiveArm("the plan given", base)]
    mode = codec.spaces.modes.index(Mode.LOCKSTEP)
    for chain in range(1, everything + 1):
        for window in _WINDOWS:
            action = codec.off()
            action[0], action[-3] = chain, mode
            for slot in slots_of(chain):
                action[1 + slot] = codec.spaces.windows.index(window)
            plan = codec.plan(action)
            arms.append(LiveArm(codec.describe(action), plan))
            if (fixed := without_gate(plan)) is not None:
                arms.append(LiveArm(f"{codec.describe(action)}, no gate", fixed))
    if (fixed := without_gate(base)) is not None:
        arms.append(LiveArm("the plan given, no gate", fixed))
    return arms


def without_gate(plan: Plan) -> Plan | None:
    """The plan with its n-gram drafter's window always filled; None: it has no gate."""
    first = plan.chain[0]
    options = first.ngram or NgramOptions()
    if not first.is_ngram or not options.gate:
        return None
    fixed = first.replace(ngram=options.replace(gate=False))
    return plan.replace(chain=(fixed, *plan.chain[1:]))


def headroom(arms: Sequence[LiveArm]) -> tuple[float, float]:
    """Milliseconds a token of the best static plan, and of the best one for each kind of text, with hindsight."""
    static = [arm for arm in arms if arm.plan is not None]
    best = min(static, key=lambda arm: arm.mean_ms)
    by_kind = sum(min(arm.mean_ms_of(kind) for arm in static) * best.tokens[kind] for kind in best.tokens)
    return best.mean_ms, by_kind / max(best.tokens.total(), 1)


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
                for index, (kind, prompt) in enumerate(prompts):
                    result = pipe.generate(**_input(prompt), max_new_tokens=max_new_tokens)
                    took_s = result.stats.total_s - (result.stats.queued_s or 0.0) - _ttft(result)
                    seconds, tokens = seconds + took_s, tokens + len(result.token_ids) - 1
                    arm.ms[kind] += 1e3 * took_s
                    arm.tokens[kind] += len(result.token_ids) - 1
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
    static_ms, hindsight_ms = headroom(arms)
    if json_output:
        found = {"best_static_ms": static_ms, "best_static_by_kind_ms": hindsight_ms}
        typer.echo(json.dumps({"arms": [arm.to_dict() for arm in arms], **found}))
        return
    from rich.table import Table

    from autopipe.cli.show import console

    plain = arms[0].mean_ms
    table = Table(title="live: code, chat and summaries in turn")
    table.add_column("arm")
    for header in ("ms a token", *KINDS, "of plain", "plans changed", "same output"):
        table.add_column(header, justify="right")
    for arm in sorted(arms, key=lambda each: each.mean_ms):
        kinds = [f"{arm.mean_ms_of(kind):.2f}" for kind in KINDS]
        same = "yes" if arm.same else "NO"
        table.add_row(arm.name, f"{arm.mean_ms:.2f}", *kinds, f"{plain / arm.mean_ms:.3f}", str(arm.changes), same)
    console().print(table)
    gain = static_ms / hindsight_ms - 1 if hindsight_ms > 0 else 0.0
    console().print(
        f"The best static plan takes {static_ms:.2f} ms a token, the best one for each kind, chosen with hindsight, "
        f"{hindsight_ms:.2f}: a policy could gain {gain:.1%} by choosing among these plans by kind."
    )
