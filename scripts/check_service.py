#!/usr/bin/env python3
"""Figures of the service: sharing, faults, policies, leaks, malformed requests.

    python scripts/check_service.py                             every part with its defaults
    python scripts/check_service.py --part concurrency
    python scripts/check_service.py --part soak --minutes 15
    python scripts/check_service.py --part kill --plan neural.yaml

Each part starts servers of its own on the default chain (`--target`, `--plan`), and prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _service_client import Answer, ServerProcess, ask, clients, get, server

from autopipe.bench.prompts import load_prompts
from autopipe.core.errors import AutoPipeError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Request = tuple[str, dict[str, Any]]


def main() -> None:
    parts: dict[str, Callable[[argparse.Namespace], None]] = {
        "concurrency": concurrency,
        "disconnect": disconnect,
        "kill": kill,
        "alternate": alternate,
        "schema": schema,
        "soak": soak,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=parts, help="repeat; default: all of them")
    parser.add_argument("--target", default=None, help="model to serve; default: as `autopipe serve`")
    parser.add_argument("--plan", default=None, help="plan to serve instead, as `autopipe serve --plan`")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a request")
    parser.add_argument("--requests", type=int, default=16, help="requests of a measurement")
    parser.add_argument("--policy", default="bandit", help="policy of the alternating load")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the alternating load")
    parser.add_argument("--minutes", type=float, default=1.0, help="of the soak")
    parser.add_argument("--seconds", type=float, default=60.0, help="of malformed requests")
    options = parser.parse_args()
    for name in options.part or parts:
        parts[name](options)


def say(part: str, **figures: Any) -> None:
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({"part": part, **rounded}), flush=True)


def served(options: argparse.Namespace) -> list[str]:
    """Arguments of `autopipe serve` that say which chain to serve."""
    if options.plan is not None:
        return ["--plan", options.plan]
    return [] if options.target is None else ["--target", options.target]


def alias(port: int) -> str:
    return str(json.loads(asyncio.run(get(port, "/v1/models"))[1])["data"][0]["id"])


def requests(kinds: Sequence[str], count: int, tokens: int, model: str) -> list[Request]:
    """The first `count` prompts of these kinds in turn, greedy."""
    sets = [load_prompts(kind) for kind in kinds]
    made: list[Request] = []
    for number in range(count):
        prompts = sets[number % len(sets)]
        prompt = prompts[(number // len(sets)) % len(prompts)]
        common = {"model": model, "max_tokens": tokens, "temperature": 0}
        if prompt.messages is not None:
            made.append((CHAT, {**common, "messages": [dict(message) for message in prompt.messages]}))
        else:
            made.append((TEXT, {**common, "prompt": prompt.text}))
    return made


def goodput(answers: Sequence[Answer], seconds: float) -> float:
    return sum(answer.tokens for answer in answers) / seconds


# -- parts --------------------------------------------------------------------------------------------------


def concurrency(options: argparse.Namespace) -> None:
    """Tokens per second of 1 and of 8 clients, shared and in turns; and whether they all got the same text.

    Each answers the same prompts, so nothing is learned from one run for the next.
    """
    texts: dict[str, list[str]] = {}
    speeds: dict[str, float] = {}
    for name, extra in (("shared", []), ("turns", ["--no-sharing"])):
        with server(*served(options), "--no-online", *extra) as serving:
            work = requests(("chat",), options.requests, options.tokens, alias(serving.port))
            asyncio.run(clients(serving.port, 1, work[:1]))
            for num_clients in (1, 8):
                answers, seconds = asyncio.run(clients(serving.port, num_clients, work))
                speeds[f"{name}-{num_clients}"] = goodput(answers, seconds)
                texts[f"{name}-{num_clients}"] = [answer.text for answer in answers]
                firsts = sorted(answer.ttft_s for answer in answers if answer.ttft_s is not None)
                say(
                    "concurrency",
                    engine=name,
                    clients=num_clients,
                    tokens_per_s=speeds[f"{name}-{num_clients}"],
                    ttft_median_s=firsts[len(firsts) // 2] if firsts else None,
                    errors=sum(answer.error is not None for answer in answers),
                )
    first = next(iter(texts.values()))
    say(
        "concurrency",
        gain_over_one_client=speeds["shared-8"] / speeds["shared-1"],
        gain_over_turns=speeds["shared-8"] / speeds["turns-8"],
        identical=all(found == first for found in texts.values()),
    )


def disconnect(options: argparse.Namespace) -> None:
    """200 clients that leave after half a second, then a normal request."""
    with server(*served(options)) as serving:
        model = alias(serving.port)
        work = requests(("chat",), 200, 400, model)
        asyncio.run(clients(serving.port, 1, requests(("chat",), 1, 8, model)))
        before = footprint(serving)

        async def leave() -> list[Answer]:
            return await asyncio.gather(
                *(ask(serving.port, body, path=path, leave_after_s=0.5) for path, body in work)
            )  # fmt: skip

        left = asyncio.run(leave())
        started_s = time.monotonic()
        answers, _ = asyncio.run(clients(serving.port, 1, requests(("chat",), 1, 16, model)))
        normal_s = time.monotonic() - started_s
        time.sleep(1.0)
        load = json.loads(asyncio.run(get(serving.port, "/v1/autopipe/status"))[1])["load"]
        after = footprint(serving)
        say(
            "disconnect",
            clients=len(left),
            refused=sum(answer.status == 429 for answer in left),
            normal_request_s=normal_s,
            normal_request_ok=answers[0].error is None and answers[0].tokens == 16,
            load_after=load,
            descriptors=(before["descriptors"], after["descriptors"]),
            threads=(before["threads"], after["threads"]),
            processes=(before["processes"], after["processes"]),
        )


def kill(options: argparse.Namespace) -> None:
    """Kill -9 each worker in turn under load: nobody hangs, the survivors' texts are those of an undisturbed run."""
    stage = {"model": "emulated"}
    drafters = [
        {**stage, "name": name, "window": 4, "emulated": {"ms": {1: ms}, "agreement": agreement}}
        for name, ms, agreement in (("small", 1, 0.6), ("middle", 3, 0.8))
    ]
    big = {**stage, "name": "big", "emulated": {"ms": {1: 12}}}
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "chain.yaml"
        plan.write_text(yaml.safe_dump({"mode": "async", "chain": [*drafters, big]}), encoding="utf-8")
        kill_each("three emulated stages, in turns", ["--plan", str(plan), "--no-sharing"], TEXT, 60, 4)
    kill_each(options.plan or options.target or "default model", served(options), CHAT, options.tokens, 8)


def kill_each(name: str, arguments: list[str], path: str, tokens: int, num_requests: int) -> None:
    with server(*arguments) as serving:
        model = alias(serving.port)
        work = requests(("chat",), num_requests, tokens, model)
        if path == TEXT:
            work = [(TEXT, {"model": model, "max_tokens": tokens, "temperature": 0, "prompt": f"Story {number}"})
                    for number in range(num_requests)]  # fmt: skip
        expected, _ = asyncio.run(clients(serving.port, num_requests, work))
        for victim in [process.pid for process in serving.tree()[1:]]:

            async def disturbed(victim: int = victim) -> list[Answer]:
                running = asyncio.create_task(clients(serving.port, num_requests, work))
                await asyncio.sleep(0.4)
                os.kill(victim, signal.SIGKILL)
                return (await running)[0]

            started_s = time.monotonic()
            answers = asyncio.run(disturbed())
            while asyncio.run(get(serving.port, "/health"))[0] != 200 and time.monotonic() - started_s < 60:
                time.sleep(0.05)
            survivors = [pair for pair in zip(answers, expected, strict=True) if pair[0].error is None]
            again, _ = asyncio.run(clients(serving.port, num_requests, work))
            say(
                "kill",
                pipeline=name,
                clients=num_requests,
                hung=sum(answer.error == "hung" for answer in answers),
                errors=sorted({answer.error for answer in answers if answer.error is not None}),
                survivors=len(survivors),
                survivors_identical=all(answer.text == known.text for answer, known in survivors),
                healthy_again_s=time.monotonic() - started_s,
                identical_afterwards=[answer.text for answer in again] == [answer.text for answer in expected],
            )


def alternate(options: argparse.Namespace) -> None:
    """Code, chat and summaries in turn, one client: the policy against static plans."""
    blocks = (("humaneval",), ("chat",), ("summarize",))
    plans: dict[str, dict[str, Any] | None] = {"plain": {"mode": "plain", "drafters": []}}
    for window in (3, 7, 15):
        plans[f"ngram({window})"] = {"mode": "lockstep", "drafters": [{"stage": "ngram", "window": window}]}
    plans[options.policy] = None
    with server(*served(options), "--policy", options.policy) as serving:
        model = alias(serving.port)
        per_block = max(1, options.requests // len(blocks))
        work = [
            item
            for round_ in range(options.rounds)
            for block in blocks
            for item in requests(block, (round_ + 1) * per_block, options.tokens, model)[-per_block:]
        ]
        speeds, texts = {}, {}
        for name, plan in plans.items():
            change = {"pinned": False} if plan is None else {"pinned": True, "plan": plan}
            status, body = asyncio.run(get(serving.port, "/v1/autopipe/plan", method="PUT", body=change))
            if status != 200:
                raise SystemExit(body.decode())
            if plan is None:
                asyncio.run(clients(serving.port, 1, work[:per_block]))  # let it measure plain decoding
            answers, seconds = asyncio.run(clients(serving.port, 1, work))
            speeds[name], texts[name] = goodput(answers, seconds), [answer.text for answer in answers]
            say("alternate", plan=name, tokens_per_s=speeds[name], errors=sum(bool(each.error) for each in answers))
        best = max(speed for name, speed in speeds.items() if name != options.policy)
        identical = all(found == texts["plain"] for found in texts.values())
        say("alternate", policy=options.policy, over_best_static=speeds[options.policy] / best, identical=identical)


def schema(options: argparse.Namespace) -> None:
    """Schemathesis over the OpenAPI schema, valid and invalid cases."""
    with server(*served(options), "--max-new-tokens", "4", "--max-prompt-tokens", "256") as serving:
        command = [sys.executable, "-m", "schemathesis.cli", "run", serving.url + "/openapi.json", "--mode", "all"]
        command += ["--checks", "not_a_server_error", "--exclude-path", "/v1/autopipe/events"]
        command += ["--max-examples", "1000000", "--max-time", str(int(options.seconds)), "--no-color"]
        started_s = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        health = asyncio.run(get(serving.port, "/health"))[0]
        tail = done.stdout.strip().splitlines()[-12:]
        say("schema", exit_code=done.returncode, seconds=time.monotonic() - started_s, health=health, report=tail)


def soak(options: argparse.Namespace) -> None:
    """Mixed load for minutes: memory, descriptors and shared memory after a warm-up and at the end."""
    with server(*served(options)) as serving:
        model = alias(serving.port)
        work = requests(("chat", "summarize", "humaneval"), 48, 32, model)
        asyncio.run(clients(serving.port, 8, work))
        marks, num_done, num_errors = [footprint(serving)], 0, 0
        deadline_s = time.monotonic() + 60 * options.minutes
        while time.monotonic() < deadline_s:
            answers, _ = asyncio.run(clients(serving.port, 8, work))
            leaving = [ask(serving.port, body, path=path, leave_after_s=0.2) for path, body in work[:8]]
            asyncio.run(together(leaving))
            num_done += len(answers)
            num_errors += sum(answer.error is not None for answer in answers)
            marks.append(footprint(serving))
            say("soak", minutes=round(options.minutes - (deadline_s - time.monotonic()) / 60, 2), **marks[-1])
        half = len(marks) // 2
        growth = {key: marks[-1][key] - marks[0][key] for key in marks[0]}
        late = {key: marks[-1][key] - marks[half][key] for key in marks[0]}
        say("soak", requests=num_done, errors=num_errors, growth=growth, growth_in_second_half=late)


async def together(work: Sequence[Any]) -> list[Answer]:
    return list(await asyncio.gather(*work))


def footprint(serving: ServerProcess) -> dict[str, float]:
    """Of the server and its workers together."""
    tree = serving.tree()
    memory = [process.memory_full_info() for process in tree]
    return {
        "unique_mb": sum(info.uss for info in memory) / 2**20,
        "shared_mb": sum(info.shared for info in memory) / 2**20,
        "descriptors": sum(process.num_fds() for process in tree),
        "threads": sum(process.num_threads() for process in tree),
        "processes": len(tree),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended, too
    try:
        main()
    except AutoPipeError as error:
        raise SystemExit(f"error: {error}") from error
