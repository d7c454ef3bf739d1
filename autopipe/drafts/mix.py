"""Which prompt comes next: sources by kind, kept at their shares of the answer tokens."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autopipe.core.errors import ConfigError
from autopipe.drafts.made_prompts import MadePrompt, chat_prompt, code_prompt, passage_prompt
from autopipe.drafts.prompt import TrainingPrompt
from autopipe.drafts.stdlib_prompts import code_prompts, summary_prompts

SHARES = {"code": 0.45, "chat": 0.35, "summarize": 0.20}
"""Of the answer tokens, by kind, for self-made prompts."""

Job = TrainingPrompt | MadePrompt


class PromptMix:
    """Hands out prompts so that every kind keeps its share of the answer tokens.

    Args:
        sources: prompts by kind; a kind whose source is exhausted drops out.
        shares: by kind.
        tokens: answer tokens by kind there are already.
    """

    def __init__(
        self, sources: Mapping[str, Iterator[Job]], shares: Mapping[str, float], tokens: Mapping[str, int]
    ) -> None:
        self._sources = dict(sources)
        self._shares = shares
        self._tokens = {kind: tokens.get(kind, 0) for kind in sources}

    def count(self, kind: str, num_tokens: int) -> None:
        """An answer of this kind has been, or is expected to be, so long."""
        self._tokens[kind] = self._tokens.get(kind, 0) + num_tokens

    def next(self) -> Job | None:
        """The next prompt; None when all sources are exhausted."""
        while self._sources:
            kind = min(self._sources, key=lambda kind: self._tokens[kind] / self._shares[kind])
            job = next(self._sources[kind], None)
            if job is not None:
                return job
            del self._sources[kind]
        return None


def own_sources(tokenizer: Any, done: Collection[str]) -> dict[str, Iterator[Job]]:
    """Endless prompts by kind: made by the target, and from the Python standard library while it lasts.

    Args:
        tokenizer: the target's.
        done: keys of prompts that were used before; self-made ones go on after the last of these.
    """

    def made(kind: str) -> Iterator[int]:
        prefix = f"{kind}/self/"
        used = [int(key.removeprefix(prefix)) for key in done if key.startswith(prefix)]
        return itertools.count(max(used, default=-1) + 1)

    def fresh(prompts: Iterable[TrainingPrompt]) -> Iterator[TrainingPrompt]:
        return (prompt for prompt in prompts if prompt.key not in done)

    return {
        "code": _by_turns(fresh(code_prompts()), map(code_prompt, made("code")), 3),
        "chat": (chat_prompt(number, tokenizer) for number in made("chat")),
        "summarize": _by_turns(
            fresh(summary_prompts()), (passage_prompt(number, tokenizer) for number in made("summarize")), 1
        ),
    }


def file_source(path: Path, done: Collection[str]) -> Iterator[Job]:
    """The prompts of a user's file of JSON lines (as `autopipe bench --prompts` reads them); kind: the file's name.

    Raises:
        ConfigError: it is not such a file; the message names `--prompts`.
    """
    from autopipe.bench.prompts import load_prompts

    if not path.is_file():
        raise ConfigError("--prompts", str(path), "a file of JSON lines; benchmark sets are never trained on")
    prompts = [
        TrainingPrompt(
            key=f"{path.stem}/{number:06d}",
            kind=path.stem,
            source=path.name,
            group=prompt.text or repr(prompt.messages),
            text=prompt.text,
            messages=prompt.messages,
        )
        for number, prompt in enumerate(load_prompts(str(path)))
    ]
    return iter([prompt for prompt in prompts if prompt.key not in done])


def _by_turns(first: Iterator[Job], second: Iterator[Job], num_second: int) -> Iterator[Job]:
    """One of the first, so many of the second, by turns; the second alone when the first is exhausted."""
    while True:
        yield from itertools.islice(first, 1)
        yield from itertools.islice(second, num_second)
