#!/usr/bin/env python
"""How fast is the simulator? Target tokens, and control steps of the environment, per second of processor time.

A three-stage chain shaped like LLaMA 1B, 8B and 70B, in one long request and in many short ones; then
`AutoPipe/PipelineSim-v0` under random actions. One core is used.

    .venv/bin/python scripts/bench_simulator.py
"""

from __future__ import annotations

import argparse
import json
import time

from autopipe.core.plan import Mode
from autopipe.envs.simulator import LatencyCurve, SimChain, SimRequest, SimStage, simulate


def chain(mode: Mode) -> SimChain:
    stages = (
        SimStage(LatencyCurve({1: 0.0114}), agreement=0.86, window=8, name="1B"),
        SimStage(LatencyCurve({1: 0.0225, 2: 0.026}), agreement=0.94, window=48, name="8B"),
        SimStage(LatencyCurve({1: 0.1237, 2: 0.427}), min_drafts=12, step_alone=True, name="70B"),
    )
    return SimChain(stages, mode)


def tokens_per_s(mode: Mode, requests: list[SimRequest], repeats: int) -> float:
    """The fastest of some runs: what other processes do only adds time."""
    simulate(chain(mode), [SimRequest(100)])  # compiled at its first call
    fastest = float("inf")
    for _ in range(repeats):
        begun = time.process_time()
        result = simulate(chain(mode), requests)
        fastest = min(fastest, (time.process_time() - begun) / result.tokens)
    return 1 / fastest


def steps_per_s(num_steps: int) -> float:
    """Control steps of the environment, episodes and their beginnings included."""
    import gymnasium

    import autopipe.envs  # noqa: F401 - registers it

    env = gymnasium.make("AutoPipe/PipelineSim-v0")
    env.reset(seed=0)
    env.action_space.seed(0)
    env.step(env.action_space.sample())
    begun = time.process_time()
    for _ in range(num_steps):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    return num_steps / (time.process_time() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="target tokens of a run")
    parser.add_argument("--repeats", type=int, default=5, help="runs, of which the fastest counts")
    options = parser.parse_args()
    short = [SimRequest(500)] * max(1, options.tokens // 500)
    answer: dict[str, int] = {
        f"{mode.value}, {name}": round(tokens_per_s(mode, requests, options.repeats))
        for mode in (Mode.ASYNC, Mode.LOCKSTEP)
        for name, requests in (("one request", [SimRequest(options.tokens)]), ("requests of 500 tokens", short))
    }
    answer["control steps of PipelineSim"] = round(steps_per_s(options.tokens // 32))
    print(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main()
