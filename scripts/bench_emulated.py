#!/usr/bin/env python
"""Run the real engine over an emulated LLaMA chain (1B, 8B, 70B on four A100s) and compare ways to run it.

Latencies and agreement are those of the PipeSpec paper's system: 1B 11.4 ms a token; 8B 22.5 ms for one token, 26 for
more; 70B 123.7 ms for one, 427 for more; agreement with the target 0.86 and 0.94, nested. Stages sleep instead of
computing; everything else (processes, links, verification, roll-back) is the engine that serves real models.

How fast a run is depends on where its text happens to be rejected (1,000 tokens: standard deviation 0.19x), so the
figures pool several seeds, whose runs may share the machine: sleeping stages do not disturb each other.

    .venv/bin/python scripts/bench_emulated.py --tokens 750 --seeds 8
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from autopipe.core.engine import Engine
from autopipe.core.plan import Plan
from autopipe.core.sampling import SamplingParams

SMALL: dict[str, Any] = {"name": "1B", "emulated": {"ms": {1: 11.4}, "agreement": 0.86}}
MIDDLE: dict[str, Any] = {"name": "8B", "emulated": {"ms": {1: 22.5, 2: 26.0}, "agreement": 0.94}}
TARGET: dict[str, Any] = {"name": "70B", "emulated": {"ms": {1: 123.7, 2: 427.0}}}


def arms(min_drafts: int, seed: int) -> dict[str, Plan]:
    """Each way to run the chain, with the windows that suit it."""

    def stage(base: dict[str, Any], **settings: Any) -> dict[str, Any]:
        return {"model": "emulated", **base, "emulated": {**base["emulated"], "seed": seed}, **settings}

    target = stage(TARGET, min_drafts=min_drafts, when_short="step")
    chains: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "plain": ("plain", [stage(TARGET)]),
        "lockstep 1B+8B+70B": ("lockstep", [stage(SMALL, window=5), stage(MIDDLE, window=16), stage(TARGET)]),
        "async 1B+70B": ("async", [stage(SMALL, window=64), target]),
        "async 8B+70B": ("async", [stage(MIDDLE, window=64), target]),
        "async 1B+8B+70B": ("async", [stage(SMALL, window=8), stage(MIDDLE, window=64, min_drafts=0), target]),
    }
    return {name: Plan.parse({"mode": mode, "chain": chain}) for name, (mode, chain) in chains.items()}


def run(plan: Plan, num_tokens: int) -> dict[str, Any]:
    with Engine(plan) as engine:
        handle = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=num_tokens))
        token_ids = [token for block in handle for token in block.token_ids]
        stats = handle.outcome().stats
    target = stats.stages[-1]
    return {
        "token_ids": token_ids,
        "ms_per_token": stats.ms_per_token,
        "verifications": sum(stats.acceptance_histogram.values()),
        "overhead_s": target.overhead_s,
        "busy_s": target.busy_s,
    }


def pooled(runs: list[dict[str, Any]], plain: list[dict[str, Any]] | None) -> dict[str, Any]:
    """One row of the table from an arm's runs and plain decoding's, seed by seed."""
    plain = plain or runs
    tokens = sum(len(run["token_ids"]) for run in runs)
    return {
        "ms_per_token": sum(run["ms_per_token"] for run in runs) / len(runs),
        "ms_per_token_min": min(run["ms_per_token"] for run in runs),
        "ms_per_token_max": max(run["ms_per_token"] for run in runs),
        "speedup_over_plain": sum(run["ms_per_token"] for run in plain) / sum(run["ms_per_token"] for run in runs),
        "acceptance_length": tokens / sum(run["verifications"] for run in runs),
        "overhead_of_busy": sum(run["overhead_s"] for run in runs) / sum(run["busy_s"] for run in runs),
        "identical": all(
            run["token_ids"][: len(alone["token_ids"])] == alone["token_ids"]
            for run, alone in zip(runs, plain, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=750, help="output tokens per run (plain: a tenth)")
    parser.add_argument("--seeds", type=int, default=8, help="runs per arm")
    parser.add_argument("--parallel", type=int, default=4, help="runs at a time")
    parser.add_argument("--min-drafts", type=int, default=12, help="drafts the 70B waits for before it verifies")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    names = list(arms(options.min_drafts, 0))
    runs: dict[str, list[dict[str, Any]]] = {}
    with Progress(console=Console(stderr=True)) as progress, ThreadPoolExecutor(options.parallel) as pool:
        task = progress.add_task("emulating", total=len(names) * options.seeds)
        for name in names:
            length = max(20, options.tokens // 10) if name == "plain" else options.tokens
            plans = [arms(options.min_drafts, seed)[name] for seed in range(options.seeds)]
            runs[name] = []
            for result in pool.map(run, plans, [length] * len(plans)):
                runs[name].append(result)
                progress.advance(task)
    rows = {name: pooled(runs[name], runs["plain"]) for name in names}
    if options.json:
        print(json.dumps(rows))
        return
    table = Table("arm", "ms/token", "over plain", "tokens/verify", "target idle though ready", "same tokens")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['ms_per_token']:.1f}",
            f"{row['speedup_over_plain']:.2f}x",
            f"{row['acceptance_length']:.2f}",
            f"{100 * row['overhead_of_busy']:.2f}%",
            "yes" if row["identical"] else "NO",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
