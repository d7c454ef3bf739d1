"""What `scripts/demo` runs: an answer streamed through the shipped pipeline, then a comparison."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

_DEFAULT_PROMPT = (
    "Write a Python class Temperature with methods to_celsius, to_fahrenheit and to_kelvin, "
    "and unit tests for each of them."
)
_MAX_NEW_TOKENS = 200
_REPEAT = 2
_ARMS = "plain,lockstep,transformers"


def demo(prompt: Annotated[str, typer.Argument(help="What to ask the model.")] = _DEFAULT_PROMPT) -> None:
    """Stream an answer through the best pipeline known for the default model; compare with plain decoding."""
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        _demo(prompt)


def _demo(text: str) -> None:
    from autopipe.bench.arms import PipelineArm
    from autopipe.bench.prompts import Prompt
    from autopipe.bench.runner import prepare_arms, run_bench
    from autopipe.bench.specs import parse_arms
    from autopipe.cli import bench_command, show
    from autopipe.cli.options import PlanOptions, build_plan, build_sampling
    from autopipe.cli.run_command import stream
    from autopipe.core.affinity import usable_cores
    from autopipe.core.errors import ConfigError

    if not text:
        raise ConfigError("PROMPT", text, "at least one character")
    options = PlanOptions()
    base = build_plan(options)
    specs = parse_arms(_ARMS)
    sampling = build_sampling(max_new_tokens=_MAX_NEW_TOKENS)
    plans = bench_command.arm_plans(specs, options, usable_cores())
    with bench_command.bench_session(specs, plans, base, usable_cores(), options, sampling) as (arms, encode):
        _say("Loading the model (the first time it is converted, which takes about 15 s) ...")
        ready, missing = prepare_arms(arms)
        ids = encode(Prompt("demo", messages=({"role": "user", "content": text},)))
        _say(f"\n> {text}\n")
        pipeline = next(arm for arm in ready if isinstance(arm, PipelineArm) and arm.name == base.mode.value)
        result = stream(pipeline.engine(), {"input_ids": ids, **sampling.model_dump(exclude_unset=True)})
        show.summary(result)
        _say("\nThe same prompt again, plain and through the pipeline:")
        with bench_command.progress(len(ready) * _REPEAT) as advance:
            rows = run_bench(ready, [ids], sampling, repeat=_REPEAT, advance=advance)
    show.bench_rows(rows, missing)
    row = next(row for row in rows if row.name == base.mode.value)
    same = "the very same" if row.identical == row.prompts else "NOT the same"
    print(f"The pipeline gave {same} {row.tokens} tokens, {show.number(row.speedup_over_plain)} times as fast.")
    print("transformers rounds bf16 in its own way, so its tokens may part from ours; in fp32 they agree.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(demo)
