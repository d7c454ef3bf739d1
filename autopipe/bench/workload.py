"""Prompt sets as the target sees them: kinds of prompts, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopipe.bench.encode import encode_prompt, load_tokenizer
from autopipe.bench.prompts import Prompt, load_prompts
from autopipe.core.plan import Plan
from autopipe.core.preflight import Progress
from autopipe.profile import ProfilePrompt

_KINDS = {"humaneval": "code"}


def read_workload(sets: Sequence[str], key: str) -> list[tuple[str, Prompt]]:
    """Kind and prompt of all sets; a file's kind is its name without the ending.

    Args:
        key: the option that gave `sets`, for messages.

    Raises:
        ConfigError: no such set or file, or a line that is not right.
    """
    chosen: list[tuple[str, Prompt]] = []
    for spec in sets:
        name = spec.partition(":")[0]
        kind = Path(spec).stem if Path(spec).is_file() else _KINDS.get(name, name)
        chosen += [(kind, prompt) for prompt in load_prompts(spec, key)]
    return chosen


def encode_workload(
    chosen: Sequence[tuple[str, Prompt]], plan: Plan, progress: Progress | None = None
) -> list[ProfilePrompt]:
    """Token ids as the plan's target gets them; an emulated target, which knows no chat, gets the bare words."""
    tokenizer = load_tokenizer(plan, progress=progress)
    found = []
    for kind, prompt in chosen:
        if plan.target.is_emulated and prompt.messages is not None:
            prompt = Prompt(prompt.name, text="\n".join(message["content"] for message in prompt.messages))
        found.append(ProfilePrompt(prompt.name, kind, tuple(encode_prompt(prompt, tokenizer))))
    return found


def spread(prompts: Sequence[ProfilePrompt], count: int) -> list[ProfilePrompt]:
    """At most `count` prompts, of all kinds alike, each kind's from all over its set."""
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    found: list[ProfilePrompt] = []
    for place, kind in enumerate(kinds):
        own = [prompt for prompt in prompts if prompt.kind == kind]
        wanted = min(len(own), count // len(kinds) + (place < count % len(kinds)) or 1)
        found += [own[len(own) * number // wanted] for number in range(wanted)]
    return found
