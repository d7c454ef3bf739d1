"""`autopipe run`: one prompt through one pipeline."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.cli.options import PlanOptions, build_plan, naming_options, require_context
from autopipe.core.errors import ConfigError
from autopipe.core.plan import Plan
from autopipe.core.sampling import SamplingParams
from autopipe.inputs import require_text, require_writable

if TYPE_CHECKING:
    from autopipe.api import AutoPipe, GenerationResult
    from autopipe.core.preflight import PlanInfo


def run(
    prompt: str,
    *,
    options: PlanOptions,
    sampling: SamplingParams,
    chat: bool | None = None,
    show_stats: bool = False,
    trace: Path | None = None,
    json_output: bool = False,
    telemetry: bool = True,
) -> None:
    """Stream the answer to `prompt` to stdout, a summary to stderr; or print one JSON object to stdout.

    Args:
        prompt: the text, or `-` for standard input.
        chat: apply the chat template; None: if the target's tokenizer has one.
        show_stats: a table of stages on stderr.
        trace: where to write a Chrome trace.
        telemetry: sample devices meanwhile.

    Raises:
        ConfigError: a bad option, nothing to prompt with or not text, or `trace` cannot be written; before anything
            loads.
        ContextLengthError: the prompt does not fit the target's context.
    """
    plan = build_plan(options)
    text = read_prompt(prompt)
    if trace is not None:
        require_writable(trace, "--trace")
    with naming_options(options, plan):
        pipe = open_pipe(plan, check=lambda info: require_context(info, sampling), telemetry=telemetry)
    with pipe:
        if chat is None:
            chat = bool(getattr(pipe.tokenizer, "chat_template", None))
        request: dict[str, Any] = sampling.model_dump(exclude_unset=True)
        request |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        if trace is not None:
            request["trace"] = str(trace)
        result = pipe.generate(**request) if json_output else stream(pipe, request)
    if json_output:
        print(json.dumps(result.to_dict(), ensure_ascii=not _stdout_is_utf8()))
        return
    from autopipe.cli import show

    show.summary(result)
    if show_stats:
        show.stages(result)


def read_prompt(prompt: str) -> str:
    """The prompt, from standard input if it is `-`.

    Raises:
        ConfigError: empty, or not UTF-8.
    """
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        bad = error.object[error.start : error.start + 8]
        raise ConfigError("PROMPT", bad, f"standard input in {error.encoding} (byte {error.start} is not)") from None
    if not text:
        raise ConfigError("PROMPT", text, "at least one character")
    return require_text(text, "PROMPT")


def open_pipe(plan: Plan, *, check: Callable[[PlanInfo], None], telemetry: bool = True) -> AutoPipe:
    """Load the plan's models. Apart, so that tests can put a fake in its place."""
    from autopipe.api import AutoPipe

    return AutoPipe.from_plan(plan, check=check, progress=say, telemetry=telemetry)


def say(line: str) -> None:
    """Tell the user on stderr that something slow begins."""
    print(line, file=sys.stderr, flush=True)


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


def _stdout_is_utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").replace("_", "") == "utf8"
