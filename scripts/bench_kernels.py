#!/usr/bin/env python
"""Time forwards of the default model on our kernels against reading its weights once at the measured streaming rate.

`forward` gives all logits, `best` the ids of the largest, which is what greedy decoding asks for.

.venv/bin/python scripts/bench_kernels.py --threads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from rich.console import Console
from rich.progress import track
from rich.table import Table

from autopipe.core.backends.load import load_backend
from autopipe.core.kernels.bandwidth import StreamingRate
from autopipe.core.plan import StagePlan

SIZES = (1, 2, 4, 8, 16, 32)
CONTEXT = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bf16", "fp32", "int8", "int4"), default="bf16")
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    stage = StagePlan.parse({"model": "smollm2-135m", "backend": "fused", "dtype": options.dtype})
    backend = load_backend(stage, exact=True, threads=options.threads)
    weight_bytes = backend.cost_notes().weight_bytes
    if weight_bytes is None:
        raise SystemExit("the backend does not know the size of its weights")
    backend.prepare_best()
    text = list(range(100, 100 + CONTEXT))
    backend.prefill(text)
    rate = StreamingRate(weight_bytes, options.threads)
    seconds: dict[str, list[float]] = {"read once": []}
    calls = {"forward": backend.forward, "best": backend.best}
    for _ in track(range(options.repeat), "measuring", console=Console(stderr=True)):
        seconds["read once"].append(rate.read_once())
        for n in SIZES:
            for name, call in calls.items():
                started = time.perf_counter()
                call(text[:n])
                seconds.setdefault(f"{name} of {n}", []).append(time.perf_counter() - started)
                backend.rollback(CONTEXT)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "threads": options.threads,
        "dtype": options.dtype,
        "weight_bytes": weight_bytes,
        "streaming_bytes_per_s": weight_bytes / medians["read once"],
        "read_once_ms": 1e3 * medians["read once"],
        **{f"{name}_ms": {str(n): 1e3 * medians[f"{name} of {n}"] for n in SIZES} for name in calls},
        "one_token_over_read_once": medians["forward of 1"] / medians["read once"],
    }
    if options.json:
        print(json.dumps(result))
        return
    table = Table("what", "ms", "over reading once")
    for name, value in medians.items():
        table.add_row(name, f"{1e3 * value:.2f}", f"{value / medians['read once']:.2f}")
    Console().print(table)
    print(f"weights: {weight_bytes / 1e6:.0f} MB, streamed at {result['streaming_bytes_per_s'] / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
