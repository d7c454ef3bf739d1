#!/usr/bin/env python
"""What an n-gram and a neural drafter are worth together: replayed on the target's own answers.

    python scripts/replay_two_drafters.py --prompts chat:24
    python scripts/replay_two_drafters.py --prompts humaneval:24 --backend fused

The target answers every prompt greedily. At every position of the answers both drafters are asked what comes next; then
steps are replayed under several ways of drafting, with the times of a target's and a drafter's step measured here. Each
way verifies as many drafts as pay by its own confidence. A draft of the neural drafter costs one of its steps; what it
has to read up on after a stretch without drafts of its own is free, which favours it. The last way knows which draft is
right, asks for a neural one only where the n-gram is wrong, and stops where both are: nothing that chooses between the
two drafts can do better. `--better P` makes the neural drafter right on a share P of the positions on which it was
wrong, to see how good a drafter would have to be.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autopipe.bench.encode import encode_prompt, load_tokenizer
from autopipe.bench.prompts import load_prompts
from autopipe.core.backends.base import StageBackend
from autopipe.core.backends.load import load_backend
from autopipe.core.ngram import NgramDrafter
from autopipe.core.plan import NgramOptions, Plan, StagePlan

MODEL = "smollm2-135m"
WINDOW = 11
SIZES = (1, 2, 4, 8, WINDOW + 1)
OVERHEAD_MS = 0.6
"""What the engine's own Python takes of a step, about."""
FLOORS = (0.3, 0.5, 0.7)
HOPELESS = 0.03
"""No drafts after one that is reached and right less often."""


@dataclass
class Position:
    """What both drafters say at one position: whether they are right, and how sure they are."""

    ngram_right: bool
    ngram_chance: float
    neural_right: bool
    neural_chance: float


@dataclass(frozen=True)
class Way:
    """A way of drafting: the chance it gives its draft at a position, whether that is right, whether it is neural."""

    name: str
    draft: Callable[[Position], tuple[float, bool, bool]]


def fill(floor: float) -> Way:
    def draft(at: Position) -> tuple[float, bool, bool]:
        if at.ngram_chance >= floor:
            return at.ngram_chance, at.ngram_right, False
        return at.neural_chance, at.neural_right, True

    return Way(f"neural where the n-gram is less than {floor:.0%} sure", draft)


def likelier(at: Position) -> tuple[float, bool, bool]:
    if at.ngram_chance >= at.neural_chance:
        return at.ngram_chance, at.ngram_right, True  # both were asked
    return at.neural_chance, at.neural_right, True


def knowing(at: Position) -> tuple[float, bool, bool]:
    right = at.ngram_right or at.neural_right
    return float(right), right, not at.ngram_right


WAYS = (
    Way("n-gram alone", lambda at: (at.ngram_chance, at.ngram_right, False)),
    Way("neural alone", lambda at: (at.neural_chance, at.neural_right, True)),
    *(fill(floor) for floor in FLOORS),
    Way("the likelier of both", likelier),
    Way("knowing which is right (a bound)", knowing),
)


def answer(target: StageBackend, prompt: list[int], length: int, eos: int) -> list[int]:
    target.reset()
    tokens = [int(target.prefill(prompt).reshape(-1).argmax())]
    while len(tokens) < length and tokens[-1] != eos:
        tokens.append(int(target.forward(tokens[-1:])[0].argmax()))
    return tokens


def ask(drafter: NgramDrafter, neural: StageBackend, prompt: list[int], tokens: list[int]) -> list[Position]:
    """Both drafters at every position of an answer, everything before it being known."""
    neural.reset()
    rows = [neural.prefill(prompt).reshape(1, -1)]
    if len(tokens) > 1:
        rows.append(neural.forward(tokens[:-1]))
    best = torch.cat(rows).float().softmax(-1).max(-1)
    drafter.reset()
    text = list(prompt)
    drafter.sync(text, 0)
    found = []
    for token, pick, chance in zip(tokens, best.indices.tolist(), best.values.tolist(), strict=True):
        draft = drafter.draft(1)
        ngram_right = draft.token_ids == [token]
        found.append(Position(ngram_right, sum(draft.confidence), pick == token, chance))
        text.append(token)
        drafter.sync(text, len(text) - 1)
    return found


def calibrate(answers: list[list[Position]]) -> None:
    """Turn the neural drafter's probabilities into how often it is right where it says so, in ten steps."""
    cells: dict[int, list[bool]] = {}
    for at in (at for positions in answers for at in positions):
        cells.setdefault(min(9, int(10 * at.neural_chance)), []).append(at.neural_right)
    for at in (at for positions in answers for at in positions):
        at.neural_chance = statistics.fmean(cells[min(9, int(10 * at.neural_chance))])


def replay(answers: list[list[Position]], way: Way, step_ms: Callable[[int], float], draft_ms: float) -> list[float]:
    """[milliseconds, steps, tokens] of all answers; the first token of each comes with its prompt."""
    spent_ms = steps = tokens = 0.0
    for positions in answers:
        place = 1
        while place < len(positions):
            chain = expected = 1.0
            drafts, neural = list[bool](), 0
            best, best_value, best_ms = 0, 1 / (step_ms(1) + OVERHEAD_MS), 0.0
            for at in positions[place : place + WINDOW]:
                chance, right, by_neural = way.draft(at)
                chain *= chance
                if chain < HOPELESS:
                    break
                expected, neural = expected + chain, neural + by_neural
                drafts.append(right)
                value = expected / (step_ms(len(drafts) + 1) + OVERHEAD_MS + neural * draft_ms)
                if value > best_value:
                    best, best_value, best_ms = len(drafts), value, neural * draft_ms
            accepted = next((n for n, right in enumerate(drafts[:best]) if not right), best)
            spent_ms += step_ms(best + 1) + OVERHEAD_MS + best_ms
            place += accepted + 1
            steps += 1
        tokens += len(positions) - 1
    return [spent_ms, steps, tokens]


def curve(backend: StageBackend, prompt: list[int]) -> dict[int, float]:
    """Median milliseconds of a forward, by rows."""
    backend.reset()
    backend.prefill(prompt)
    times: dict[int, list[float]] = {}
    for _ in range(20):
        for rows in SIZES:
            begin = time.perf_counter()
            backend.forward(prompt[:1] * rows)
            times.setdefault(rows, []).append(1e3 * (time.perf_counter() - begin))
            backend.rollback(len(prompt))
    return {rows: statistics.median(values) for rows, values in times.items()}


def between(points: dict[int, float]) -> Callable[[int], float]:
    def value(rows: int) -> float:
        low = max(size for size in SIZES if size <= rows)
        high = min((size for size in SIZES if size > low), default=low)
        share = 0.0 if high == low else (rows - low) / (high - low)
        return points[low] + share * (points[high] - points[low])

    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="chat:24")
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="N")
    parser.add_argument(
        "--backend", choices=("transformers", "fused"), default="transformers", help="of the target's times"
    )
    parser.add_argument("--better", type=float, default=0.0, metavar="P")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    whole = StagePlan.parse({"model": MODEL})
    torch.set_num_threads(1)  # its threads would spin beside those of our kernels
    tokenizer = load_tokenizer(Plan.parse({"chain": [{"model": MODEL}], "mode": "plain"}))
    target, neural = load_backend(whole), load_backend(StagePlan.parse({"model": MODEL, "adapter": MODEL}))
    drafter = NgramDrafter(NgramOptions(table=MODEL))
    prompts = [encode_prompt(prompt, tokenizer) for prompt in load_prompts(options.prompts)]
    answers = []
    for prompt in track(prompts, "answering", console=Console(stderr=True)):
        tokens = answer(target, prompt, options.max_new_tokens, tokenizer.eos_token_id)
        answers.append(ask(drafter, neural, prompt, tokens))
    chance = random.Random(0)
    for at in (at for positions in answers for at in positions):
        at.neural_right = at.neural_right or chance.random() < options.better
    calibrate(answers)
    draft_ms = curve(neural, prompts[0])[1]
    timed = load_backend(StagePlan.parse({"model": MODEL, "backend": options.backend}))
    target_ms = curve(timed, prompts[0])
    step_ms, flat = between(target_ms), [at for positions in answers for at in positions]
    result = {
        "target_ms": target_ms,
        "draft_ms": draft_ms,
        "ngram_right": statistics.fmean(at.ngram_right for at in flat),
        "neural_right": statistics.fmean(at.neural_right for at in flat),
        "either_right": statistics.fmean(at.ngram_right or at.neural_right for at in flat),
    }
    ways = {}
    for way in WAYS:
        spent_ms, steps, tokens = replay(answers, way, step_ms, draft_ms)
        ways[way.name] = {"over_plain": tokens * step_ms(1) / spent_ms, "tokens_per_step": tokens / steps}
    if options.json:
        print(json.dumps({**result, "ways": ways}))
        return
    table = Table("way of drafting", "over plain", "tokens per verification")
    for name, row in ways.items():
        table.add_row(name, f"{row['over_plain']:.2f}x", f"{row['tokens_per_step']:.2f}")
    Console().print(table)
    print(
        "right: n-gram {ngram_right:.3f}, neural {neural_right:.3f}, one of them {either_right:.3f}; "
        "a draft takes {draft_ms:.2f} ms, ".format(**result)
        + "a step "
        + ", ".join(f"{ms:.1f} ms of {rows}" for rows, ms in target_ms.items())
    )


if __name__ == "__main__":
    main()
