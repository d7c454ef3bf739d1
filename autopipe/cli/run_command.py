"""`autopipe run`: one prompt through one pipeline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import ConfigError
from autopipe.core.plan import Plan
from autopipe.core.sampling import SamplingParams

if TYPE_CHECKING:
    from autopipe.api import AutoPipe, GenerationResult


def run(
    prompt: str,
    *,
    plan: Plan,
    sampling: SamplingParams,
    chat: bool | None = None,
    show_stats: bool = False,
    trace: Path | None = None,
    json_output: bool = False,
) -> None:
    """Stream the answer to `prompt` to stdout, a summary to stderr; or print one JSON object to stdout.

    Args:
        prompt: the text, or `-` for standard input.
        chat: apply the chat template; None: if the target's tokenizer has one.
        show_stats: a table of stages on stderr.
        trace: where to write a Chrome trace.

    Raises:
        ConfigError: nothing to prompt with, or `trace` cannot be written.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise ConfigError("PROMPT", text, "at least one character")
    if trace is not None and not trace.resolve().parent.is_dir():
        raise ConfigError("--trace", str(trace), "a file in a folder that exists")
    with open_pipe(plan) as pipe:
        if chat is None:
            chat = bool(getattr(pipe.tokenizer, "chat_template", None))
        request: dict[str, Any] = sampling.model_dump(exclude_unset=True)
        request |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        if trace is not None:
            request["trace"] = str(trace)
        result = pipe.generate(**request) if json_output else stream(pipe, request)
    if json_output:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    from autopipe.cli import show

    show.summary(result)
    if show_stats:
        show.stages(result)


def open_pipe(plan: Plan) -> AutoPipe:
    """Load the plan's models. Apart, so that tests can put a fake in its place."""
    from autopipe.api import AutoPipe

    return AutoPipe.from_plan(plan)


def stream(pipe: AutoPipe, request: dict[str, Any]) -> GenerationResult:
    """Write the answer to stdout as it comes; return the whole result."""
    result = None
    for delta in pipe.stream(**request):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        if delta.result is not None:
            result = delta.result
    sys.stdout.write("\n")
    if result is None:
        raise RuntimeError("the stream ended without a result")
    return result
