"""What the engine around the stages costs: measured in live requests, from their traces."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

from autopipe.core.chain import neural_stages
from autopipe.core.engine import Engine
from autopipe.core.plan import Mode, Plan
from autopipe.core.request import Outcome
from autopipe.core.sampling import SamplingParams
from autopipe.profile.model import EngineCosts

_TOKENS = 48
_SWITCHES = 5


def measure_engine(plan: Plan, prompt: Sequence[int], pick_s: float) -> EngineCosts:
    """Start an engine with the plan, run a short request in it, and change its plan this way and that.

    Args:
        pick_s: seconds of picking a token, which a trace counts with the forward.

    Raises:
        AutoPipeError: the plan cannot be loaded.
    """
    plain, lockstep = plan.replace(mode=Mode.PLAIN), plan.replace(mode=Mode.LOCKSTEP)
    started = time.monotonic()
    with Engine(plain) as engine:
        start_s = time.monotonic() - started
        _run(engine, prompt)  # warm-up
        step_s, overhead_s = _plain_step(_run(engine, prompt), plan.names()[-1])
        settings_s = [_timed_apply(engine, other) for _ in range(_SWITCHES) for other in (lockstep, plain)]
        handover_s = None
        if len(neural_stages(plan)) > 1:
            engine.apply(_without_ngram(lockstep))
            _run(engine, prompt)
            handover_s = pick_s + _idle_per_forward(_run(engine, prompt))
            engine.apply(plain)
        join_s, leave_s = _membership(engine, plain)
    return EngineCosts(
        start_s=start_s,
        settings_s=statistics.median(settings_s),
        join_s=join_s,
        leave_s=leave_s,
        step_s=step_s,
        step_overhead_s=overhead_s + pick_s,
        handover_s=handover_s,
    )


def _membership(engine: Engine, plan: Plan) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds until each neural drafter has joined and left, by name."""
    join_s, leave_s = {}, {}
    names = plan.names()
    for index, stage in enumerate(plan.drafters):
        if stage.is_ngram:
            continue
        named = [other.replace(name=name) for other, name in zip(plan.chain, names, strict=True)]
        engine.apply(plan.replace(chain=named))
        without = plan.replace(chain=[*named[:index], *named[index + 1 :]])
        leave_s[names[index]] = _timed_apply(engine, without)
        time.sleep(0.2)  # it leaves in the background
        join_s[names[index]] = _timed_apply(engine, plan.replace(chain=named))
    return join_s, leave_s


def _without_ngram(plan: Plan) -> Plan:
    return plan.replace(chain=[stage for stage in plan.chain if not stage.is_ngram])


def _timed_apply(engine: Engine, plan: Plan) -> float:
    started = time.monotonic()
    engine.apply(plan)
    return time.monotonic() - started


def _run(engine: Engine, prompt: Sequence[int]) -> Outcome:
    room = engine.facts(engine.plan.names()[-1])["max_length"] - len(prompt)
    handle = engine.submit(prompt, SamplingParams(max_new_tokens=min(_TOKENS, room)), trace=True)
    return handle.outcome()


def _plain_step(outcome: Outcome, target: str) -> tuple[float, float]:
    """Median seconds of a decoding step, from one start to the next, and between two of them."""
    events = [event for event in outcome.trace[target] if event.name == "decode"]
    pairs = list(itertools.pairwise(events))
    step = statistics.median((after.start_ns - before.start_ns) / 1e9 for before, after in pairs)
    gap = statistics.median((after.start_ns - before.end_ns) / 1e9 for before, after in pairs)
    return step, max(0.0, gap)


def _idle_per_forward(outcome: Outcome) -> float:
    """Lockstep: seconds in which no stage computes, per forward, from the target's first verification on."""
    events = sorted(
        (event for lane in outcome.trace.values() for event in lane if event.name != "roll back"),
        key=lambda event: event.start_ns,
    )
    events = [event for event in events if event.name != "prefill"]
    gaps, busy_until = [], events[0].end_ns
    for event in events[1:]:
        gaps.append(max(0, event.start_ns - busy_until) / 1e9)
        busy_until = max(busy_until, event.end_ns)
    return statistics.fmean(gaps) if gaps else 0.0
