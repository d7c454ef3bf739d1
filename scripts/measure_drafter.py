"""What a drafter of the target's own layers costs: time of its step beside the target's, memory of the whole chain.

    python scripts/measure_drafter.py                               # the one that ships for smollm2-135m
    python scripts/measure_drafter.py --adapter training/drafter    # your own
    python scripts/measure_drafter.py --part memory --json

Memory is summed over the engine's process and its workers: resident (RSS), proportional (PSS: a page shared by n
processes counts 1/n to each), and shared (in pages that another process maps too). Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from autopipe import AutoPipe, Plan
from autopipe.core.backends.base import StageBackend
from autopipe.core.backends.load import load_backend
from autopipe.core.models.shared_base import layers_of_drafters
from autopipe.core.plan import StagePlan

PROMPT = "Explain to a child why the sky is blue."
STEPS = 80


def memory_of(process: int) -> dict[str, int]:
    """Bytes by kind, from /proc/PID/smaps_rollup."""
    fields = {}
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]:
        name, size, *_ = line.split()
        fields[name.rstrip(":")] = int(size) * 1024
    shared = fields["Shared_Clean"] + fields["Shared_Dirty"]
    return {"rss_bytes": fields["Rss"], "pss_bytes": fields["Pss"], "shared_bytes": shared}


def memory_of_chain(
    chain: list[dict[str, Any]], mode: str, max_new_tokens: int
) -> tuple[list[dict[str, int]], list[int]]:
    """Memory of the engine's process and of each worker after a request, and the request's tokens."""
    with AutoPipe.from_plan(Plan.parse({"chain": chain, "mode": mode}), telemetry=False) as pipe:
        tokens = pipe.generate(PROMPT, max_new_tokens=max_new_tokens).token_ids
        return [memory_of(pid) for pid in (os.getpid(), *pipe.engine.worker_ids.values())], tokens


def memory(target: dict[str, Any], drafter: dict[str, Any], max_new_tokens: int) -> list[dict[str, Any]]:
    """For plain decoding and for chains of n-gram, drafter and target, each in a fresh process."""
    ngram = {"model": "ngram", "window": 6}
    cases: list[tuple[str, list[dict[str, Any]], str]] = [
        ("plain", [target], "plain"),
        ("ngram -> target, lockstep", [ngram, target], "lockstep"),
        ("ngram -> neural -> target, lockstep", [ngram, drafter, target], "lockstep"),
        ("ngram -> neural -> target, async", [ngram, drafter, target], "async"),
    ]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for label, chain, mode in cases:
            used, tokens = pool.submit(memory_of_chain, chain, mode, max_new_tokens).result()
            total = {name: sum(process[name] for process in used) for name in used[0]}
            plain = rows[0] if rows else {**total, "token_ids": tokens}
            rows.append(
                {
                    "chain": label,
                    "processes": len(used),
                    **total,
                    "pss_over_plain": total["pss_bytes"] / plain["pss_bytes"],
                    "identical": tokens == plain["token_ids"],
                    "token_ids": tokens,
                }
            )
    return rows


def step_ms(backend: StageBackend) -> float:
    """Median time of a step of greedy decoding in the middle of a text of some 100 tokens, ms."""
    backend.reset()
    backend.prefill(list(range(100, 160)))
    times = []
    for step in range(STEPS):
        begin = time.perf_counter()
        backend.best([500 + step])
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[10:])


def steps(target: StagePlan, drafter: StagePlan) -> dict[str, float]:
    """Step times of both, taken in turns, and their ratio."""
    shared = layers_of_drafters([drafter], target)
    backends = [load_backend(target, shared_layers=shared), load_backend(drafter)]
    for backend in backends:
        backend.prepare_best()
    times = [[step_ms(backend) for backend in backends] for _ in range(5)]
    whole, draft = (statistics.median(column) for column in zip(*times, strict=True))
    return {"target_ms": whole, "drafter_ms": draft, "ratio": draft / whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", metavar="MODEL")
    parser.add_argument("--adapter", default="smollm2-135m", metavar="FOLDER", help="the drafter's folder or name")
    parser.add_argument("--part", choices=("all", "steps", "memory"), default="all")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    target: dict[str, Any] = {"model": arguments.target, "name": "target"}
    drafter: dict[str, Any] = {"model": arguments.target, "adapter": arguments.adapter, "window": 3, "name": "drafter"}
    found: dict[str, Any] = {}
    if arguments.part != "steps":
        found["memory"] = memory(target, drafter, arguments.max_new_tokens)
        for row in found["memory"]:
            del row["token_ids"]
    if arguments.part != "memory":
        found["steps"] = steps(StagePlan.parse(target), StagePlan.parse(drafter))
    if arguments.json:
        print(json.dumps(found))
        return
    for row in found.get("memory", []):
        sizes = ", ".join(
            f"{name.removesuffix('_bytes')} {row[name] / 2**20:.0f} MiB" for name in row if "bytes" in name
        )
        same = "identical output" if row["identical"] else "OUTPUT DIFFERS"
        print(f"{row['chain']}: {row['processes']} processes, {sizes}, PSS {row['pss_over_plain']:.2f}x plain, {same}")
    if "steps" in found:
        print(
            "a step of the drafter takes {drafter_ms:.2f} ms, of the target {target_ms:.2f} ms: {ratio:.1%}".format(
                **found["steps"]
            )
        )


if __name__ == "__main__":
    main()
