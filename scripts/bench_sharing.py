#!/usr/bin/env python
"""Many clients on one target: aggregate tokens per second of 1, 2, 4, 8, ... clients that share it, against one client
and against the same engine without sharing (one request after another).

    .venv/bin/python scripts/bench_sharing.py --clients 1 8

Measurements take turns, and ratios are medians over rounds. Each client sends one request after another, each its own
prompt, for the given time; greedy, so that every answer can be compared with the one that plain decoding gives.
`--system` gives all prompts one system prompt.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from autopipe.core.engine import Engine
from autopipe.core.errors import ConfigError
from autopipe.core.models import load_tokenizer, resolve
from autopipe.core.plan import Plan
from autopipe.core.sampling import SamplingParams
from autopipe.core.shared import SharedEngine, SharingOptions

SYSTEM = (
    "You are a patient assistant of a small town's public library. Answer in plain words, in at most three "
    "paragraphs. When you are not sure, say so, and say where one could look it up. Do not invent titles, opening "
    "hours or prices. If a question is about the law, health or money, give general information and advise the "
    "reader to ask someone who is responsible for it."
)
TOPICS = (
    "how a lock gate lets ships climb a hill", "what yeast does in bread dough", "why the sky is red in the evening",
    "how to mend a bicycle tube", "what a fuse in an electric circuit is for", "how bees find their way home",
    "a Python function that reverses a linked list", "how tides and the moon are connected", "what compost is good for",
    "the rules of draughts for a child", "a SQL query that finds duplicate rows", "how a thermos keeps tea warm",
    "why leaves turn yellow", "what to pack for a day's walk", "how a mirror telescope is built", "what a sonnet is",
)  # fmt: skip


@dataclass
class Client:
    """What one client got: texts by prompt, and when tokens came."""

    answers: dict[int, list[int]] = field(default_factory=dict)
    num_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def shifted(self, shift: int, count: int) -> Client:
        """With the numbers that prompts had before they were turned by `shift`."""
        return replace(self, answers={(number + shift) % count: text for number, text in self.answers.items()})


def run_client(engine: Any, prompts: Sequence[list[int]], mine: Sequence[int], until_s: float, params: SamplingParams,
               eos: Sequence[int], client: Client) -> None:  # fmt: skip
    turn = 0
    while time.monotonic() < until_s:
        number = mine[turn % len(mine)]
        turn += 1
        handle = engine.submit(prompts[number], params, eos_token_ids=eos)
        text: list[int] = []
        last_s = time.monotonic()
        started_s = last_s
        for block in handle:
            now = time.monotonic()
            if not text:
                client.ttft_s.append(now - started_s)
            elif now < until_s:
                client.gaps_s.append(now - last_s)
            last_s = now
            text += block.token_ids
            if now < until_s:
                client.num_tokens += len(block.token_ids)
            else:
                handle.cancel()
        if handle.outcome().finish_reason != "cancelled":
            client.answers[number] = text


def measure(engine: Any, prompts: Sequence[list[int]], num_clients: int, seconds: float, params: SamplingParams,
            eos: Sequence[int]) -> tuple[dict[str, float], list[Client]]:  # fmt: skip
    clients = [Client() for _ in range(num_clients)]
    until_s = time.monotonic() + seconds
    shares = [list(range(len(prompts)))[index::num_clients] for index in range(num_clients)]
    threads = [
        threading.Thread(target=run_client, args=(engine, prompts, mine, until_s, params, eos, client))
        for mine, client in zip(shares, clients, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gaps = sorted(gap for client in clients for gap in client.gaps_s)
    firsts = sorted(first for client in clients for first in client.ttft_s)
    figures = {
        "tokens_per_s": sum(client.num_tokens for client in clients) / seconds,
        "ttft_ms_median": 1e3 * firsts[len(firsts) // 2] if firsts else float("nan"),
        "gap_ms_p95": 1e3 * gaps[int(0.95 * len(gaps))] if gaps else float("nan"),
    }
    return figures, clients


def make_prompts(tokenizer: Any, count: int, system: bool) -> list[list[int]]:
    prompts = []
    for number in range(count):
        question = f"Explain {TOPICS[number % len(TOPICS)]}" + f", version {number // len(TOPICS)}." * bool(
            number >= len(TOPICS)
        )
        messages = [{"role": "system", "content": SYSTEM}] * system + [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return prompts


def differing(plain: Any, prompts: Sequence[list[int]], clients: Sequence[Client], params: SamplingParams,
              eos: Sequence[int], most: int) -> tuple[int, int]:  # fmt: skip
    """(answers compared with plain decoding, of these different)."""
    answers = {number: text for client in clients for number, text in client.answers.items()}
    compared = sorted(answers)[:most]
    different = 0
    for number in compared:
        text = [
            token for block in plain.submit(prompts[number], params, eos_token_ids=eos) for token in block.token_ids
        ]
        different += text != answers[number]
    return len(compared), different


def _ratio(rounds: dict[str, list[dict[str, float]]], one: str, other: str) -> float:
    """Median over rounds, so that a neighbour who comes and goes disturbs both alike."""
    pairs = zip(rounds[one], rounds[other], strict=True)
    return median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of all measurements by turns")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer, at most")
    parser.add_argument("--plan", metavar="FILE", help="a plan instead of an n-gram before the target")
    parser.add_argument("--no-drafts", action="store_true", help="plain decoding instead of n-gram drafts")
    parser.add_argument("--system", action="store_true", help="one system prompt for all")
    parser.add_argument("--skip-single", action="store_true", help="do not measure the engine without sharing")
    parser.add_argument("--check", type=int, default=8, help="answers compared with plain decoding")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args()


def main() -> None:
    options = parse()
    chain = [] if options.no_drafts else [{"model": "ngram", "window": 7}]
    plan = Plan.parse({"chain": [*chain, {"model": options.target}]})
    if options.plan is not None:
        plan = Plan.load(options.plan)
    plain_plan = Plan.parse({"chain": [plan.target.model_dump()], "mode": "plain"})
    tokenizer = load_tokenizer(resolve(plan.target.model))
    params = SamplingParams(max_new_tokens=options.tokens)
    eos = (tokenizer.eos_token_id,)
    prompts = make_prompts(tokenizer, 16 * max(options.clients), options.system)
    most = max(options.clients)
    kept: list[Client] = []
    rounds: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as opened:
        shared = opened.enter_context(SharedEngine(plan, SharingOptions(max_active=max(64, most))))
        runs: list[tuple[str, Any, int]] = [(f"shared, {count}", shared, count) for count in options.clients]
        if not options.skip_single:
            single = opened.enter_context(Engine(plan))
            runs += [(f"in turn, {count}", single, count) for count in sorted({1, most})]
        for number in track(range(options.rounds), "measuring", console=Console(stderr=True)):
            for name, engine, count in runs:
                shift = number * len(prompts) // options.rounds  # nobody finds a prompt of the last round in the cache
                figures, clients = measure(
                    engine, prompts[shift:] + prompts[:shift], count, options.seconds, params, eos
                )
                rounds.setdefault(name, []).append(figures)
                kept += [client.shifted(shift, len(prompts)) for client in clients]
        cache = shared.cache_stats()
    compared = different = 0
    if options.check:
        with Engine(plain_plan) as plain:
            compared, different = differing(plain, prompts, kept, params, eos, options.check)
    rows = {
        name: {key: median(each[key] for each in figures) for key in figures[0]} for name, figures in rounds.items()
    }
    result = {
        "rows": rows,
        "cache": cache,
        "compared": compared,
        "different": different,
        "over_one_client": _ratio(rounds, f"shared, {most}", f"shared, {options.clients[0]}"),
    }
    if not options.skip_single:
        result["over_without_sharing"] = _ratio(rounds, f"shared, {most}", f"in turn, {most}")
    if options.json:
        print(json.dumps(result))
        return
    table = Table("engine, clients", "tokens/s", "first token, median ms", "gap, 95% ms")
    for name, figures in rows.items():
        table.add_row(name, *(f"{figures[key]:.1f}" for key in ("tokens_per_s", "ttft_ms_median", "gap_ms_p95")))
    Console().print(table)
    print(f"{most} clients over {options.clients[0]}: {result['over_one_client']:.2f}x")
    if "over_without_sharing" in result:
        print(f"{most} clients, shared over in turn: {result['over_without_sharing']:.2f}x")
    print(f"answers compared with plain decoding: {compared}, different: {different}")
    print(f"prefix cache: {cache}")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
