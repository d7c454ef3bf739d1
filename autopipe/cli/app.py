"""The commands and their options. Bodies import what they need: help and bad options answer at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopipe.cli import arguments as arg
from autopipe.cli import (
    drafts_command,
    plan_command,
    plot_command,
    policy_command,
    profile_command,
    serve_command,
    simulate_command,
    top_command,
    tune_command,
)

app = typer.Typer(
    name="autopipe",
    help="Faster text generation, the very same tokens: cheap drafters run ahead of a large language model.",
    epilog="Start with: autopipe run 'Explain rainbows to a child.'",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

_RUN_EXAMPLES = """Stream an answer through a pipeline.

Examples:

- `autopipe run "Explain rainbows to a child."`
- `autopipe run - --raw --max-new-tokens 64 < story.txt`
- `autopipe run "Name three rivers." --temperature 0.8 --seed 7 --json`
- `autopipe run "..." --target meta-llama/Llama-3.1-8B-Instruct --drafter meta-llama/Llama-3.2-1B-Instruct`
- `autopipe run "..." --drafter ngram --drafter small --mode async --window 6 --window 4 --trace trace.json`
"""

_BENCH_EXAMPLES = """Compare pipelines, and other libraries, on the same prompts in one run.

Examples:

- `autopipe bench --prompts humaneval:8 --max-new-tokens 160`
- `autopipe bench --prompts chat --compare plain,lockstep,transformers,transformers-lookup`
- `autopipe bench --prompts mine.jsonl --compare plain,lockstep:window=3,lockstep:window=7 --json`

An arm of `--compare` may carry settings of its own, `NAME:key=value`, with the keys `drafter` and `window`
(several joined by `+`), `min-drafts`, `dtype`, `backend`, `warmup` and `verification`. All arms get the same
prompts, the same threads and, but for llama.cpp and openvino, the same dtype.
"""


@app.callback()
def _root() -> None:
    pass


@app.command(help=_RUN_EXAMPLES)
def run(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; `-` reads standard input.")],
    plan: arg.PlanFile = None,
    target: arg.Target = None,
    drafter: arg.Drafters = None,
    mode: arg.Mode = None,
    window: arg.Windows = None,
    min_drafts: arg.MinDrafts = None,
    verify_cap: arg.VerifyCap = None,
    warmup: arg.Warmup = None,
    verification: arg.Verification = None,
    exact: arg.Exact = None,
    backend: arg.Backend = None,
    dtype: arg.Dtype = None,
    device: arg.Device = None,
    threads: arg.Threads = None,
    adapter: arg.Adapter = None,
    trust_remote_code: arg.TrustRemoteCode = False,
    max_new_tokens: arg.MaxNewTokens = None,
    min_new_tokens: arg.MinNewTokens = None,
    temperature: arg.Temperature = None,
    top_k: arg.TopK = None,
    top_p: arg.TopP = None,
    min_p: arg.MinP = None,
    repetition_penalty: arg.RepetitionPenalty = None,
    frequency_penalty: arg.FrequencyPenalty = None,
    presence_penalty: arg.PresencePenalty = None,
    seed: arg.Seed = None,
    stop: arg.Stop = None,
    logprobs: arg.Logprobs = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Apply the model's chat template, or not. Default: if it has one."),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Also show what each stage did, on stderr.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a Chrome trace, one lane per stage (open in Perfetto)."),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")
    ] = False,
    telemetry: arg.Telemetry = True,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.cli import options, run_command

        run_command.run(
            prompt,
            options=options.PlanOptions(
                plan=plan,
                target=target,
                drafters=drafter or (),
                mode=mode,
                windows=window or (),
                min_drafts=min_drafts,
                verify_cap=verify_cap,
                backend=backend,
                dtype=dtype,
                device=device,
                threads=threads,
                adapter=adapter,
                verification=verification,
                exact=exact,
                warmup=warmup,
                trust_remote_code=trust_remote_code,
            ),
            sampling=options.build_sampling(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                seed=seed,
                stop=tuple(stop or ()),
                max_new_tokens=max_new_tokens,
                min_new_tokens=min_new_tokens,
                num_logprobs=logprobs,
            ),
            chat=chat,
            show_stats=stats,
            trace=trace,
            json_output=json_output,
            telemetry=telemetry,
        )


@app.command(help=_BENCH_EXAMPLES)
def bench(
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts",
            metavar="SET",
            help="`humaneval[:N]`, `chat[:N]`, `summarize[:N]`, or a file of JSON lines with "
            '`{"prompt": ...}` or `{"messages": [...]}`.',
        ),
    ] = "humaneval:8",
    compare: Annotated[
        str,
        typer.Option(
            "--compare",
            metavar="ARMS",
            help="Separated by commas: `plain`, `lockstep`, `async`, `transformers`, `transformers-lookup`, "
            "`transformers-assisted`, `llama.cpp`, `openvino`.",
        ),
    ] = "plain,lockstep,transformers,transformers-lookup",
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Runs of every prompt in every arm.")] = 1,
    plan: arg.PlanFile = None,
    target: arg.Target = None,
    drafter: arg.Drafters = None,
    window: arg.Windows = None,
    min_drafts: arg.MinDrafts = None,
    verification: arg.Verification = None,
    exact: arg.Exact = None,
    backend: arg.Backend = None,
    dtype: arg.Dtype = None,
    device: arg.Device = None,
    threads: arg.Threads = None,
    max_new_tokens: arg.MaxNewTokens = 160,
    temperature: arg.Temperature = None,
    seed: arg.Seed = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    telemetry: arg.Telemetry = True,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.cli import bench_command, options

        bench_command.bench(
            prompts=prompts,
            compare=compare,
            repeat=repeat,
            options=options.PlanOptions(
                plan=plan,
                target=target,
                drafters=drafter or (),
                windows=window or (),
                min_drafts=min_drafts,
                backend=backend,
                dtype=dtype,
                device=device,
                threads=threads,
                verification=verification,
                exact=exact,
            ),
            sampling=options.build_sampling(
                temperature=temperature,
                seed=seed,
                max_new_tokens=max_new_tokens,
            ),
            json_output=json_output,
            telemetry=telemetry,
        )


@app.command()
def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """What AutoPipe found on this machine, what is missing, and what to do about it."""
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.cli import doctor_command

        doctor_command.doctor(json_output=json_output)


for command in (
    drafts_command,
    profile_command,
    plan_command,
    simulate_command,
    plot_command,
    top_command,
    tune_command,
    serve_command,
    policy_command,
):
    command.register(app)
