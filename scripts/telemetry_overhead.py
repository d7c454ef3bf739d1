"""What background sampling costs: work with and without it, in turns, and the processor time of a sweep.

    python scripts/telemetry_overhead.py                       # a loop that keeps every core busy
    python scripts/telemetry_overhead.py --plan default        # generation with a plan: `default` or a YAML file

Prints, with a 95% interval from resampling pairs of blocks, by how much telemetry slows the work down: sampling, and
with --plan also announcing the engine to `autopipe top`. Both cost less than most machines' noise, so each sweep reads
its sources many times over and the engine is announced as many times (--amplify), and the result is divided by that;
the processor time of a sweep is a second, independent figure.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.telemetry import DeviceSnapshot, Sampler, TelemetrySource, default_sources
from autopipe.core.telemetry.announce import Announcer

if TYPE_CHECKING:
    from autopipe.core.engine import Engine

RESAMPLES = 2000


class Amplified(TelemetrySource):
    """Reads another source many times in one sweep."""

    def __init__(self, source: TelemetrySource, times: int) -> None:
        self._source = source
        self._times = times

    @property
    def name(self) -> str:
        return self._source.name

    def open(self) -> None:
        self._source.open()

    def close(self) -> None:
        self._source.close()

    def read(self) -> tuple[DeviceSnapshot, ...]:
        for _ in range(self._times - 1):
            self._source.read()
        return self._source.read()


def loop_work() -> tuple[Callable[[float], float], None]:
    """Gives a function: seconds -> matrix products per second, on all cores; there is no engine."""
    import torch

    a, b = torch.randn(384, 384), torch.randn(384, 384)

    def work(seconds: float) -> float:
        count, begin_s = 0, time.perf_counter()
        while (passed_s := time.perf_counter() - begin_s) < seconds:
            torch.mm(a, b)
            count += 1
        return count / passed_s

    return work, None


def generation_work(plan: str, stack: ExitStack) -> tuple[Callable[[float], float], Engine]:
    """Gives a function: seconds -> output tokens per second, and the engine that it uses."""
    from importlib.resources import files

    from autopipe.api import AutoPipe

    path = str(files("autopipe") / "plans" / "default.yaml") if plan == "default" else plan
    pipe = stack.enter_context(AutoPipe.from_plan(path, telemetry=False))

    def work(seconds: float) -> float:
        num_tokens, begin_s = 0, time.perf_counter()
        while (passed_s := time.perf_counter() - begin_s) < seconds:
            result = pipe.generate("The weather was", min_new_tokens=64, max_new_tokens=64)
            num_tokens += len(result.token_ids)
        return num_tokens / passed_s

    return work, pipe.engine


def sweep_cost() -> dict[str, Any]:
    """Processor and wall milliseconds of one sweep, by source, when the caches are warm."""
    costs = {}
    for source in default_sources():
        try:
            source.open()
        except Exception as error:
            costs[source.name] = {"problem": str(error)}
            continue
        processor_ms, wall_ms = [], []
        for _ in range(20):
            wall_s, processor_s = time.perf_counter(), time.thread_time()
            source.read()
            processor_ms.append(1000 * (time.thread_time() - processor_s))
            wall_ms.append(1000 * (time.perf_counter() - wall_s))
            time.sleep(0.1)
        source.close()
        costs[source.name] = {
            "processor_ms": round(statistics.mean(processor_ms), 3),
            "wall_ms": round(statistics.mean(wall_ms), 3),
        }
    return costs


def slow_down(
    work: Callable[[float], float], engine: Engine | None, pairs: int, block_s: float, interval_s: float, amplify: int
) -> dict[str, Any]:
    """Compare `pairs` of blocks with and without sampling; which comes first alternates."""
    ratios = []
    work(block_s)
    for pair in range(pairs):
        speeds = {}
        for sampled in (pair % 2 == 0, pair % 2 == 1):
            with ExitStack() as stack:
                if sampled:
                    sources = [Amplified(source, amplify) for source in default_sources()]
                    sampler = stack.enter_context(Sampler(sources, interval_s=interval_s, cpu_budget=1.0))
                    sampler.wait(10.0)
                    if engine is not None:
                        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autopipe-overhead-")))
                        for _ in range(amplify):
                            stack.callback(Announcer(engine, sampler, folder).close)
                speeds[sampled] = work(block_s)
        ratios.append(speeds[False] / speeds[True] - 1)
    generator = random.Random(0)
    resampled = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return {
        "slow_down": round(statistics.median(ratios) / amplify, 6),
        "slow_down_95": [round(resampled[int(RESAMPLES * share)] / amplify, 6) for share in (0.025, 0.975)],
        "pairs": pairs,
        "amplified": amplify,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", help="measure generation with this plan, not a loop")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--block-s", type=float, default=1.0, help="seconds of work in a block")
    parser.add_argument("--interval-s", type=float, default=0.25, help="sampling interval")
    parser.add_argument("--amplify", type=int, default=50, help="readings in one sweep")
    options = parser.parse_args()
    with ExitStack() as stack:
        work, engine = generation_work(options.plan, stack) if options.plan else loop_work()
        answer = slow_down(work, engine, options.pairs, options.block_s, options.interval_s, options.amplify)
    answer["work"] = f"generation with {options.plan}" if options.plan else "matrix products"
    answer["interval_s"] = options.interval_s
    answer["sweep"] = sweep_cost()
    print(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main()
