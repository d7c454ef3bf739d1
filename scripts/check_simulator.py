#!/usr/bin/env python
"""Does the simulator predict the engine? Ten assorted plans of each kind, run and simulated.

live: the default model with an n-gram drafter and a neural one (the target with some of its layers left out), from
a profile measured first, in modes, windows and settings of all sorts. Every prompt is also decoded plainly, right
before: where another process slowed the machine down between profile and run, `error vs plain` still tells.

emulated: chains of sleeping stages, which need no profile.

    .venv/bin/python scripts/check_simulator.py --part emulated
    .venv/bin/python scripts/check_simulator.py --part live --out profile.json
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autopipe.core.engine import Engine
from autopipe.core.plan import Mode, Plan
from autopipe.core.sampling import SamplingParams

TARGET: dict[str, Any] = {"model": "smollm2-135m", "dtype": "bf16"}
LEFT_OUT_LAYERS = (12, 13, 14, 15, 16, 17)


def prune_default_model(folder: Path) -> Path:
    """Write the default model without some of its layers: a drafter of sorts that needs no training."""
    import torch
    from safetensors.torch import save_file

    from autopipe.core.models import load_config, load_state, load_tokenizer, resolve

    source = resolve(TARGET["model"])
    config = copy.deepcopy(load_config(source))
    kept = [layer for layer in range(config.num_hidden_layers) if layer not in LEFT_OUT_LAYERS]
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in kept]

    state = {}
    for name, tensor in load_state(source, torch.bfloat16).items():
        head, marker, rest = name.partition(".layers.")
        if marker:
            layer, _, tail = rest.partition(".")
            if int(layer) in LEFT_OUT_LAYERS:
                continue
            name = f"{head}{marker}{kept.index(int(layer))}.{tail}"
        state[name] = tensor.contiguous().clone()
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def live_plans(drafter: str) -> dict[str, Plan]:
    """Assorted plans of the demo chain. Neighbours in the list differ in the n-gram's options, so that each
    starts with a drafter that has learned nothing, as the profile's replay did."""

    def ngram(window: int, gate: bool) -> dict[str, Any]:
        return {"model": "ngram", "window": window, "ngram": {"gate": gate}}

    small: dict[str, Any] = {"model": drafter, "name": "pruned", "dtype": "bf16"}
    shapes: dict[str, dict[str, Any]] = {
        "ngram 3, no gate": {"chain": [ngram(3, False), TARGET]},
        "ngram 7, gate": {"chain": [ngram(7, True), TARGET]},
        "ngram 7, no gate": {"chain": [ngram(7, False), TARGET]},
        "ngram 12, gate, cap 4": {"chain": [ngram(12, True), {**TARGET, "verify_cap": 4}]},
        "ngram 16, no gate, progressive": {"chain": [ngram(16, False), TARGET], "warmup": {"kind": "progressive"}},
        "ngram 7, gate, 1 thread": {"chain": [ngram(7, True), {**TARGET, "threads": 1}]},
        "lockstep pruned 3": {"chain": [{**small, "window": 3}, TARGET]},
        "async pruned 4, at least 2": {
            "mode": "async",
            "chain": [{**small, "window": 4}, {**TARGET, "min_drafts": 2}],
        },
        "async pruned 8, at least 4": {
            "mode": "async",
            "chain": [{**small, "window": 8}, {**TARGET, "min_drafts": 4}],
        },
        "lockstep ngram 4 + pruned 6": {"chain": [ngram(4, False), {**small, "window": 6}, TARGET]},
    }
    return {name: Plan.parse({"mode": "lockstep", **shape}) for name, shape in shapes.items()}


def check_live(options: argparse.Namespace) -> list[dict[str, Any]]:
    from autopipe.bench.workload import encode_workload, read_workload
    from autopipe.core.preflight import check_plan
    from autopipe.envs.simulator import simulate
    from autopipe.profile import Profile, profile_plan, sim_chain, sim_requests
    from autopipe.profile.sim import chosen_prompts

    drafter = str(prune_default_model(Path(options.drafter)))
    whole = Plan.parse({"chain": [{"model": "ngram"}, {"model": drafter, "name": "pruned", "dtype": "bf16"}, TARGET]})
    eos = check_plan(whole)
    if options.profile:
        profile = Profile.load(options.profile)
    else:
        sets = options.prompts
        profile = profile_plan(
            whole,
            encode_workload(read_workload(sets, "--prompts"), whole),
            options.out,
            prompt_sets=sets,
            eos_token_ids=eos,
            max_new_tokens=options.tokens,
            advance=lambda label, share: print(f"{share:5.0%} {label}", flush=True),
        )
        print(f"profile: {profile.took_s:.0f} s, agreement {profile.agreement[0].rate:.3f}")
    kinds = options.kind or None
    prompts = [list(prompt.prompt_ids) for prompt in chosen_prompts(profile, kinds)]
    requests = sim_requests(profile, kinds)
    rows: list[dict[str, Any]] = []
    plans = {name: plan for name, plan in live_plans(drafter).items() if options.only in name}
    predicted = {name: simulate(sim_chain(profile, plan, kinds), requests) for name, plan in plans.items()}
    plain_predicted = simulate(sim_chain(profile, whole.replace(mode=Mode.PLAIN), kinds), requests)
    params = SamplingParams(max_new_tokens=profile.settings.max_new_tokens)
    live: dict[str, list[Run]] = {name: [] for name in plans}
    plain: dict[str, list[Run]] = {name: [] for name in plans}
    idle = whole.replace(mode=Mode.PLAIN)
    if options.runs and Path(options.runs).exists():
        for kept, found in zip((live, plain), json.loads(Path(options.runs).read_text()), strict=True):
            kept.update({name: [Run(*run) for run in runs] for name, runs in found.items()})
    with Engine(idle) as engine:
        _run(engine, prompts[0], params, eos)
        for _ in range(options.repeats):
            for name, plan in plans.items():
                for prompt in prompts:
                    engine.apply(_plain(plan))
                    plain[name].append(_run(engine, prompt, params, eos))
                    engine.apply(plan)
                    live[name].append(_run(engine, prompt, params, eos))
    if options.runs:
        Path(options.runs).write_text(
            json.dumps(
                [{name: [astuple(run) for run in runs] for name, runs in kept.items()} for kept in (live, plain)]
            )
        )
    for name in plans:
        ours, measured = _decode_ms(predicted[name], len(requests)), _fastest_ms(live[name], len(prompts))
        ours_plain, measured_plain = _decode_ms(plain_predicted, len(requests)), _fastest_ms(plain[name], len(prompts))
        rows.append(
            {
                "plan": name,
                "measured": measured,
                "predicted": ours,
                "error": ours / measured - 1,
                "plain": measured_plain,
                "plain_predicted": ours_plain,
                "error_vs_plain": (ours / ours_plain) / (measured / measured_plain) - 1,
                "forwards": sum(run.forwards for run in live[name][: len(prompts)]),
                "predicted_forwards": predicted[name].stages[-1].forwards,
            }
        )
    return rows


def _plain(plan: Plan) -> Plan:
    """Plain decoding with the stages of `plan` loaded, so that going from one to the other loads nothing."""
    return plan.replace(mode=Mode.PLAIN, chain=[stage.replace(threads=None) for stage in plan.chain])


def _decode_ms(result: Any, num_requests: int) -> float:
    """Milliseconds per token after each request's first."""
    return 1e3 * (result.total_s - num_requests * result.ttft_s) / (result.tokens - num_requests)


@dataclass(frozen=True, slots=True)
class Run:
    """A live request: seconds and tokens after the first, and forwards of the target."""

    seconds: float
    tokens: int
    forwards: int


def _run(engine: Engine, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int] = ()) -> Run:
    handle = engine.submit(prompt, params, eos_token_ids=eos)
    later = sum(len(block.token_ids) for block in handle) - 1
    stats = handle.outcome().stats
    return Run(1e-3 * (stats.ms_per_token or 0.0) * later, later, stats.stages[-1].forwards)


def _fastest_ms(runs: Sequence[Run], num_prompts: int) -> float:
    """Milliseconds per token, of each prompt the fastest of its runs: what other processes do only adds time."""
    fastest = [min(runs[place::num_prompts], key=lambda run: run.seconds) for place in range(num_prompts)]
    return 1e3 * sum(run.seconds for run in fastest) / sum(run.tokens for run in fastest)


def emulated_plans(seed: int) -> dict[str, Plan]:
    """Assorted emulated plans; a step takes 10 ms or more, so that the machine itself hardly counts."""

    def stage(ms: dict[int, float], agreement: float = 1.0, **settings: Any) -> dict[str, Any]:
        spec = {"ms": ms, "agreement": agreement, "seed": seed}
        return {"model": "emulated", "name": f"e{agreement}", "emulated": spec, **settings}

    def small(**settings: Any) -> dict[str, Any]:
        return stage({1: 11.4}, 0.86, **settings)

    def middle(**settings: Any) -> dict[str, Any]:
        return stage({1: 22.5, 2: 26.0}, 0.94, **settings)

    def target(**settings: Any) -> dict[str, Any]:
        return stage({1: 60.0, 2: 90.0, 9: 130.0}, **settings)

    shapes: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
        "plain": ("plain", [target()], {}),
        "lockstep small 3": ("lockstep", [small(window=3), target()], {}),
        "lockstep middle 8": ("lockstep", [middle(window=8), target()], {}),
        "lockstep small 4 + middle 8": ("lockstep", [small(window=4), middle(window=8), target()], {}),
        "async small 8": ("async", [small(window=8), target()], {}),
        "async small 16, at least 6": ("async", [small(window=16), target(min_drafts=6)], {}),
        "async middle 16, step alone": (
            "async",
            [middle(window=16), target(min_drafts=6, when_short="step")],
            {},
        ),
        "async small 8 + middle 16": (
            "async",
            [small(window=8), middle(window=16, min_drafts=0), target(min_drafts=4)],
            {},
        ),
        "async small 16, cap 5": ("async", [small(window=16), target(verify_cap=5)], {}),
        "async small 16, progressive": ("async", [small(window=16), target()], {"kind": "progressive"}),
    }
    return {
        name: Plan.parse({"mode": mode, "chain": chain, **({"warmup": warmup} if warmup else {})})
        for name, (mode, chain, warmup) in shapes.items()
    }


def check_emulated(options: argparse.Namespace) -> list[dict[str, Any]]:
    from autopipe.envs.simulator import SimRequest, chain_from_plan, simulate

    prompt, tokens = [1, 2, 3], options.tokens
    overhead_s = _emulated_overhead_s()
    rows = []
    for name, plan in emulated_plans(options.seed).items():
        if options.only not in name:
            continue
        chain = chain_from_plan(plan, prompt_tokens=len(prompt), output_tokens=tokens, overhead_s=overhead_s)
        predicted = simulate(chain, [SimRequest(tokens, len(prompt))])
        with Engine(plan) as engine:
            run = _run(engine, prompt, SamplingParams(max_new_tokens=tokens))
        ours, measured = _decode_ms(predicted, 1), 1e3 * run.seconds / run.tokens
        rows.append(
            {
                "plan": name,
                "measured": measured,
                "predicted": ours,
                "error": ours / measured - 1,
                "forwards": run.forwards,
                "predicted_forwards": predicted.stages[-1].forwards,
            }
        )
    return rows


def _emulated_overhead_s() -> float:
    """What the engine adds to a sleeping stage's step."""
    plan = Plan.parse({"mode": "plain", "chain": [{"model": "emulated", "emulated": {"ms": {1: 10}}}]})
    with Engine(plan) as engine:
        run = _run(engine, [1, 2, 3], SamplingParams(max_new_tokens=100))
    return max(0.0, run.seconds / run.tokens - 0.01)


def show(part: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    table = Table(title=part)
    keys = [key for key in rows[0]]
    for key in keys:
        table.add_column(key.replace("_", " "), justify="left" if key == "plan" else "right")
    for row in rows:
        table.add_row(*(_text(key, row[key]) for key in keys))
    Console(width=130).print(table)
    summary = {}
    for key in keys:
        if key.startswith("error"):
            errors = [abs(row[key]) for row in rows]
            summary |= {f"{key} median": statistics.median(errors), f"{key} worst": max(errors)}
    print(part, ", ".join(f"{key} {value:.1%}" for key, value in summary.items()))
    return summary


def _text(key: str, value: Any) -> str:
    if key.startswith("error"):
        return f"{value:+.1%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("live", "emulated"), required=True)
    parser.add_argument("--profile", help="live: a profile of the same chain, instead of measuring one")
    parser.add_argument("--out", default="check_profile.json", help="live: where a measured profile goes")
    parser.add_argument("--drafter", default=str(Path(tempfile.gettempdir()) / "autopipe-pruned-drafter"))
    parser.add_argument("--prompts", nargs="+", default=["humaneval:4", "chat:4"])
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per prompt (emulated: per run)")
    parser.add_argument("--repeats", type=int, default=1, help="live: runs of every plan; the fastest counts")
    parser.add_argument("--only", default="", metavar="TEXT", help="only plans with this text in their name")
    parser.add_argument("--runs", help="live: file to which measured runs are added; those of earlier calls count too")
    parser.add_argument("--kind", nargs="*", help="live: only the profile's prompts of these kinds")
    parser.add_argument("--seed", type=int, default=3, help="emulated: of text and agreement")
    parser.add_argument("--json", action="store_true", help="also print one JSON object")
    options = parser.parse_args()
    started = time.monotonic()
    rows = check_live(options) if options.part == "live" else check_emulated(options)
    summary = show(options.part, rows)
    print(f"{time.monotonic() - started:.0f} s")
    if options.json:
        print(json.dumps({"rows": rows, "summary": summary}))


if __name__ == "__main__":
    main()
