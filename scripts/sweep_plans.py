"""Measure every plan of a grid over the demo chain, and compare with what the simulator says.

    scripts/sweep_plans.py --out docs/sweep.csv

Each plan runs beside plain decoding on the same prompts; every run is kept in `--runs` at once, so an interrupted
sweep goes on where it was, and `--seconds` measures a piece of it. `--plan plan.yaml` measures the plan of
`autopipe tune` with the others, under the name `tuned`.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autopipe.bench.workload import encode_workload, read_workload
from autopipe.core.plan import Mode, Plan
from autopipe.core.preflight import inspect_plan
from autopipe.plans import DEFAULT_PLAN_PATH
from autopipe.profile import ProfilePrompt
from autopipe.profile.identity import describe_machine
from autopipe.tune.candidates import named, parse_drafter, shipped_drafters, shipped_tables
from autopipe.tune.live import LiveBench, OutOfTimeError, models_of
from autopipe.tune.predict import Predictor, plain_plan
from autopipe.tune.profiling import cached_profile
from autopipe.tune.space import Space, plan_key, structure

BLOCK = 7
"""Plans measured between two runs of plain decoding."""


def grid(space: Space) -> dict[str, Plan]:
    """At least 40 different plans, by name: n-gram windows, gate, orders and table; drafters in all modes."""
    plain = space.defaults()
    params: dict[str, dict[str, Any]] = {"plain": plain}
    tables = {"text": None, **{f"table{place}": table for place, table in enumerate(space.tables, start=1)}}
    for word, table in tables.items():
        ngram = {**plain, "use.ngram": True} | ({} if table is None else {"ngram.table": table})
        for window in (1, 2, 3, 5, 7, 10, 14, 20):
            params[f"ngram {word} {window}"] = {**ngram, "window.ngram": window}
        for window in (2, 4, 7, 12):
            params[f"ngram {word} {window} ungated"] = {**ngram, "window.ngram": window, "ngram.gate": False}
        params[f"ngram {word} 10 order 4"] = {**ngram, "window.ngram": 10, "ngram.max_order": 4}
        params[f"ngram {word} 10 order 2-8"] = {
            **ngram, "window.ngram": 10, "ngram.max_order": 8, "ngram.min_order": 2,
        }  # fmt: skip
        params[f"ngram {word} 10 progressive"] = {**ngram, "window.ngram": 10, "warmup": "progressive"}
        if len(space.threads) > 1:
            params[f"ngram {word} 10 on 1 thread"] = {**ngram, "window.ngram": 10, "threads.target": 1}
    for name in space.names:
        alone = {**plain, f"use.{name}": True}
        for window in (1, 2, 3, 5):
            params[f"{name} {window}"] = {**alone, f"window.{name}": window}
            params[f"{name} {window} async"] = {
                **alone,
                f"window.{name}": window,
                "mode": "async",
                "min_drafts": window,
            }
        for word, table in tables.items():
            behind = {**alone, "use.ngram": True, f"window.{name}": 4} | (
                {} if table is None else {"ngram.table": table}
            )
            params[f"ngram {word} 4 + {name} 4"] = {**behind, "window.ngram": 4}
            params[f"ngram {word} 4 + {name} 4 async"] = {**behind, "window.ngram": 4, "mode": "async", "min_drafts": 2}
    found: dict[str, Plan] = {}
    for name, each in params.items():
        plan = space.plan(each)
        if plan_key(plan) not in {plan_key(other) for other in found.values()}:
            found[name] = plan
    return found


def blocks(plans: dict[str, Plan]) -> Iterator[list[str]]:
    """Names of plans to measure together: with the same models, a few at a time."""
    groups: dict[str, list[str]] = {}
    for name, plan in plans.items():
        if plan.mode is not Mode.PLAIN:
            groups.setdefault(models_of(plan), []).append(name)
    for names in groups.values():
        for start in range(0, len(names), BLOCK):
            yield names[start : start + BLOCK]


def measure(
    plans: dict[str, Plan], prompts: Sequence[ProfilePrompt], runs: Path, seconds: float, max_new_tokens: int
) -> bool:
    """Run what has not been run; True when nothing is left."""
    done = {(row["plan"], row["prompt"]) for row in read(runs)}
    deadline_s = time.monotonic() + seconds
    try:
        with LiveBench(max_new_tokens, deadline_s, keep=2) as bench, runs.open("a", encoding="utf-8") as file:
            for names in blocks(plans):
                for prompt in prompts:
                    missing = [name for name in names if (name, prompt.name) not in done]
                    if not missing:
                        continue
                    reference = bench.run(plans[missing[0]].replace(mode="plain", warmup={}), prompt)
                    for name in missing:
                        found = bench.run(plans[name], prompt)
                        row = {
                            "plan": name,
                            "prompt": prompt.name,
                            "kind": prompt.kind,
                            "tokens": len(found.token_ids),
                            "seconds": found.seconds,
                            "plain_s": reference.seconds,
                            "identical": found.token_ids == reference.token_ids,
                        }
                        file.write(json.dumps(row) + "\n")
                        file.flush()
    except OutOfTimeError:
        return False
    return True


def read(runs: Path) -> list[dict[str, Any]]:
    """The runs so far; a line that a crash cut short does not count."""
    if not runs.exists():
        return []
    rows = []
    for line in runs.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def table(plans: dict[str, Plan], rows: Sequence[dict[str, Any]], predictor: Predictor) -> list[dict[str, Any]]:
    """One row a plan, the fastest first: measured and predicted speed over plain decoding, by kind and in all."""
    kinds = sorted({row["kind"] for row in rows})
    plain = predictor.predict(plain_plan(next(iter(plans.values()))))
    found = []
    for name, plan in plans.items():
        own = [row for row in rows if row["plan"] == name]
        prediction = predictor.predict(plan)
        line: dict[str, Any] = {
            "plan": name,
            "chain": structure(plan),
            "windows": "+".join(str(stage.window) for stage in plan.drafters),
            "predicted": round(plain.ms_per_token / prediction.ms_per_token, 3),
            "measured": 1.0 if plan.mode is Mode.PLAIN else speedup(own),
        }
        for kind in kinds:
            of_kind = [row for row in own if row["kind"] == kind]
            line[kind] = 1.0 if plan.mode is Mode.PLAIN else speedup(of_kind)
        line["ms_per_token"] = (
            round(1e3 * sum(r["seconds"] for r in own) / sum(r["tokens"] for r in own), 3) if own else ""
        )
        line["identical"] = f"{sum(row['identical'] for row in own)}/{len(own)}"
        found.append(line)
    return sorted(found, key=lambda line: -(line["measured"] or 0.0))


def speedup(rows: Sequence[dict[str, Any]]) -> float | None:
    """Seconds of plain decoding over those of the plan, each in all."""
    if not rows:
        return None
    return round(sum(row["plain_s"] for row in rows) / sum(row["seconds"] for row in rows), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", action="append", help="a neural drafter; repeat; default: the shipped one")
    parser.add_argument("--table", action="append", help="a learned n-gram table; repeat; default: the shipped one")
    parser.add_argument("--workload", action="append", help="prompt sets; default humaneval:6 and chat:6")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="longest output per prompt")
    parser.add_argument("--plan", type=Path, help="a tuned plan to measure with the others")
    parser.add_argument(
        "--seconds", type=float, default=1e6, help="measure for so long, then stop; call again to go on"
    )
    parser.add_argument("--runs", type=Path, default=Path("sweep-runs.jsonl"), help="every run, as it was measured")
    parser.add_argument("--out", type=Path, default=Path("docs/sweep.csv"))
    parser.add_argument("--profile-only", action="store_true", help="measure the profile and stop")
    parser.add_argument("--tables-only", action="store_true", help="measure nothing, write the table of what there is")
    arguments = parser.parse_args()

    base = Plan.load(DEFAULT_PLAN_PATH)
    given = [parse_drafter(text, base.target) for text in arguments.drafter or ()]
    drafters = named(shipped_drafters(base.target) if arguments.drafter is None else given)
    tables = shipped_tables(base.target) if arguments.table is None else arguments.table
    workload = arguments.workload or ["humaneval:6", "chat:6"]
    eos = inspect_plan(plain_plan(base)).eos_token_ids
    prompts = encode_workload(read_workload(workload, "--workload"), plain_plan(base))
    profile = cached_profile(
        base.target,
        drafters,
        prompts,
        base=base,
        workload=workload,
        eos_token_ids=eos,
        max_new_tokens=arguments.max_new_tokens,
        budget_s=1e6,
        deadline_s=float("inf"),
        advance=lambda label, share: print(f"[{share:4.0%}] {label}", flush=True),
    )
    if arguments.profile_only:
        return
    threads = sorted({curves.threads for stage in profile.stages for curves in stage.curves})
    space = Space(
        target=base.target,
        drafters=tuple(drafters),
        tables=tuple(tables),
        threads=tuple(threads),
        cores=tuple(range(profile.machine.cores)),
        base=base,
    )
    plans = grid(space)
    if arguments.plan is not None:
        plans["tuned"] = Plan.load(arguments.plan).replace(tuned=None)
    whole = arguments.tables_only or measure(
        plans, prompts, arguments.runs, arguments.seconds, arguments.max_new_tokens
    )
    rows = read(arguments.runs)
    print(f"{len(plans)} plans, {len(rows)} of {(len(plans) - 1) * len(prompts)} runs")
    if not whole or not rows:
        return
    lines = table(plans, rows, Predictor(profile))
    write(arguments.out, lines, [*workload, f"{arguments.max_new_tokens} tokens"])
    report(lines)


def write(path: Path, lines: Sequence[dict[str, Any]], workload: Sequence[str]) -> None:
    """The table as CSV; its first line, a comment, says where it is from."""
    machine = describe_machine()
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(
            f"# {machine.cpu or machine.platform}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB; "
            f"{', '.join(workload)}; speed over plain decoding beside it\n"
        )
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def report(lines: Sequence[dict[str, Any]]) -> None:
    """How well the simulator ranks, and where the tuned plan stands."""
    from scipy.stats import kendalltau

    compared = [line for line in lines if line["measured"] and line["plan"] != "tuned"]
    tau = kendalltau([line["predicted"] for line in compared], [line["measured"] for line in compared]).statistic
    best = compared[0]
    print(f"{len(compared)} plans; Kendall tau of predicted against measured: {tau:.3f}")
    print(f"best: {best['plan']} ({best['measured']:.2f}x, predicted {best['predicted']:.2f}x)")
    for line in lines:
        if line["plan"] == "tuned" and line["measured"]:
            kinds = {key: value for key, value in line.items() if key in ("code", "chat")}
            print(
                f"tuned: {line['measured']:.2f}x, {line['measured'] / best['measured'] - 1:+.1%} of the best; {kinds}"
            )


if __name__ == "__main__":
    main()
