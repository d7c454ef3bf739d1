#!/usr/bin/env python
"""Every split of this machine's cores over the stages of a chain, measured, against the one that was chosen before.

A split gives each stage's process a number of threads and, or not, cores of its own. Splits are measured in turns, on
the same prompts. The drafter of the second chain is the target's first layers:
what matters here is how it competes for cores, not how well it drafts.

    .venv/bin/python scripts/sweep_threads.py --chain both --repeat 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from autopipe.bench.encode import load_tokenizer
from autopipe.core.engine import Engine
from autopipe.core.models.loading import load_config, load_state
from autopipe.core.models.spec import DEFAULT_MODEL, resolve
from autopipe.core.plan import Plan
from autopipe.core.sampling import SamplingParams
from autopipe.profile.split import choose_split, core_splits

PROMPTS = (
    "def fibonacci(n):\n    ",
    "The three largest rivers of Europe are",
    "import json\n\ndef load(path):\n    with open(path) as file:\n        return json.load(file)\n\ndef save(",
)
TARGET: dict[str, Any] = {"model": DEFAULT_MODEL, "name": "target"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chain", choices=("ngram", "async", "both"), default="both")
    parser.add_argument("--drafter-layers", type=int, default=3, help="of the async chain's drafter")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each split; the median counts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.chain in ("ngram", "both"):
            plan = Plan.parse({"mode": "lockstep", "chain": [{"model": "ngram", "window": 7}, TARGET]})
            results["n-gram, lockstep"] = sweep(plan, options)
        if options.chain in ("async", "both"):
            drafter = {"model": first_layers(Path(folder), options.drafter_layers), "name": "drafter", "window": 3}
            plan = Plan.parse({"mode": "async", "chain": [drafter, TARGET]})
            results["neural drafter, async"] = sweep(plan, options)
    if options.json:
        print(json.dumps(results))
        return
    for name, result in results.items():
        show(name, result)


def sweep(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """Choose a split as `autopipe plan --measure-cores` does, then measure all of them, the chosen one among them."""
    tokenizer = load_tokenizer(plan)
    prompts = [[int(token) for token in tokenizer(prompt)["input_ids"]] for prompt in PROMPTS]
    choice = choose_split(plan, prompts, max_new_tokens=options.max_new_tokens)
    times: dict[str, list[float]] = {label: [] for label in core_splits(plan)}
    params = SamplingParams(max_new_tokens=options.max_new_tokens)
    with Engine(plan) as engine:
        for round_number in track(range(options.repeat + 1), "measuring", console=Console(stderr=True)):
            for label, split in core_splits(plan).items():
                engine.apply(split)
                handles = [engine.submit(ids, params).outcome() for ids in prompts]
                if round_number:  # the first round warms up
                    spent = sum(outcome.stats.total_s for outcome in handles)
                    times[label].append(1e3 * spent / (len(prompts) * options.max_new_tokens))
    medians = {label: statistics.median(values) for label, values in times.items()}
    return {
        "ms_per_token": medians,
        "chosen": choice.label,
        "chosen_over_best": medians[choice.label] / min(medians.values()),
    }


def first_layers(folder: Path, count: int) -> str:
    """The target's first `count` layers as a model of their own."""
    from safetensors.torch import save_file

    from autopipe.core.models.loading import local_folder

    source = resolve(DEFAULT_MODEL)
    config = load_config(source)
    config.num_hidden_layers = count
    config.save_pretrained(folder)
    state = load_state(source)
    kept = {
        name: tensor.contiguous()
        for name, tensor in state.items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < count
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for file in local_folder(source).iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template", "generation")):
            (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def show(name: str, result: dict[str, Any]) -> None:
    table = Table("split", "ms/token", "over the best", title=name)
    best = min(result["ms_per_token"].values())
    for label, value in sorted(result["ms_per_token"].items(), key=lambda item: item[1]):
        mark = " (chosen)" if label == result["chosen"] else ""
        table.add_row(label + mark, f"{value:.2f}", f"{100 * (value / best - 1):+.1f}%")
    Console().print(table)


if __name__ == "__main__":
    main()
