"""Options that several commands share: each is declared, and explained, once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PIPELINE = "Pipeline"
_SAMPLING = "Choosing tokens"

PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", rich_help_panel=_PIPELINE, help="A plan (YAML); other options override it."),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="MODEL",
        rich_help_panel=_PIPELINE,
        help="The model whose output you get: a hub id, a folder, FILE.gguf or REPO:FILE.gguf. "
        "Default: SmolLM2-135M-Instruct, which needs no download from a hub.",
    ),
]
Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        metavar="MODEL",
        rich_help_panel=_PIPELINE,
        help="A cheaper model that drafts; or `MODEL@ADAPTER`, layers of the target with an adapter (see `autopipe "
        "drafts distill`); or `int4` or `int8`, the target itself with its weights in fewer bits; or `ngram`, "
        "`ngram@TABLE`, or `none`. Repeat for a longer chain, cheapest first.",
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="MODE",
        rich_help_panel=_PIPELINE,
        help="`plain`: the target alone; `lockstep`: draft, then verify; `async`: all stages at once.",
    ),
]
Windows = Annotated[
    list[int] | None,
    typer.Option(
        "--window",
        metavar="N",
        rich_help_panel=_PIPELINE,
        help="Most tokens a drafter may be ahead. Once for all drafters, or once for each.",
    ),
]
MinDrafts = Annotated[
    int | None,
    typer.Option(
        "--min-drafts",
        metavar="N",
        rich_help_panel=_PIPELINE,
        help="Drafts a verifier waits for (async mode).",
    ),
]
VerifyCap = Annotated[
    int | None,
    typer.Option("--verify-cap", metavar="N", rich_help_panel=_PIPELINE, help="Most drafts checked in one forward."),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        rich_help_panel=_PIPELINE,
        help="`fused` (fast, Llama family), `transformers` (any causal LM), `auto`.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        rich_help_panel=_PIPELINE,
        help="`bf16`, `fp32`, `fp16`, `auto`; `int8`, `int4`: faster, another output (see `autopipe bench`).",
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", rich_help_panel=_PIPELINE, help="`cpu`, `cuda:0`, `auto`."),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", rich_help_panel=_PIPELINE, help="CPU threads of each neural stage."),
]
Adapter = Annotated[
    str | None,
    typer.Option("--adapter", metavar="FOLDER", rich_help_panel=_PIPELINE, help="PEFT adapter for the target."),
]
Verification = Annotated[
    str | None,
    typer.Option(
        "--verification",
        metavar="RULE",
        rich_help_panel=_PIPELINE,
        help="`equality`: the same tokens as plain decoding under the same seed; "
        "`rejection`: the same distribution only.",
    ),
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact/--no-exact",
        rich_help_panel=_PIPELINE,
        help="Bit for bit as plain decoding in any dtype (the default), or perhaps faster.",
    ),
]
Warmup = Annotated[
    str | None,
    typer.Option(
        "--warmup",
        metavar="KIND",
        rich_help_panel=_PIPELINE,
        help="`none`; `conservative`: small windows at first; `progressive`: windows widen with the text.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", rich_help_panel=_PIPELINE, help="Run Python code that comes with the models."),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", metavar="N", rich_help_panel=_SAMPLING, help="Stop after this many tokens."),
]
MinNewTokens = Annotated[
    int | None,
    typer.Option("--min-new-tokens", metavar="N", rich_help_panel=_SAMPLING, help="Do not end before this many."),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", rich_help_panel=_SAMPLING, help="0 (the default) is greedy."),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", metavar="K", rich_help_panel=_SAMPLING, help="Choose among the K likeliest tokens."),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", metavar="P", rich_help_panel=_SAMPLING, help="Choose among the likeliest that sum up to P."
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        metavar="P",
        rich_help_panel=_SAMPLING,
        help="Drop tokens below this share of the likeliest.",
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        metavar="X",
        rich_help_panel=_SAMPLING,
        help="Above 1: avoid tokens seen before.",
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty", metavar="X", rich_help_panel=_SAMPLING, help="Subtracted for each earlier use."
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option("--presence-penalty", metavar="X", rich_help_panel=_SAMPLING, help="Subtracted once if used before."),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        rich_help_panel=_SAMPLING,
        help="Of the sampling noise; the output under a seed does not depend on the pipeline.",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", rich_help_panel=_SAMPLING, help="End before this text. Repeatable."),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        rich_help_panel=_SAMPLING,
        help="With --json: log-probabilities of the chosen and the N likeliest tokens.",
    ),
]
Telemetry = Annotated[
    bool,
    typer.Option(
        "--telemetry/--no-telemetry",
        help="Sample devices in the background: energy per token and device figures in --json, `autopipe top`.",
    ),
]
ProfilePrompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        metavar="SET",
        help="`humaneval[:N]`, `chat[:N]`, `summarize[:N]`, or a file of JSON lines; repeat for several kinds. "
        "Default: humaneval:8 and chat:8.",
    ),
]
LongestOutput = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", help="Longest output of the target per prompt.")
]
