"""Keeps benchmark prompts out of training data: no long run of words may be the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

NUM_WORDS = 10
"""Length of a run of words that counts as overlap. Runs of 13 are usual for web text; prompts are short."""

_WORD = re.compile(r"[^\W_]+")


def normalised_words(text: str) -> list[str]:
    """Lower-case letters and digits only: case, punctuation, layout and underscores do not hide a copy."""
    return _WORD.findall(text.lower())


class OverlapFilter:
    """Texts that must not be trained on.

    Args:
        texts: the protected ones. Of a text shorter than `num_words`, the whole counts.
        num_words: length of a run of words that counts as overlap.
    """

    def __init__(self, texts: Iterable[str], num_words: int = NUM_WORDS) -> None:
        self._num_words = num_words
        self._runs = {run for text in texts for run in self._runs_of(text)}
        self._short_lengths = sorted({run.count(" ") + 1 for run in self._runs} - {num_words})

    @classmethod
    def of_benchmarks(cls) -> OverlapFilter:
        """HumanEval (prompts, solutions and tests, where its package is installed) and the own bench sets."""
        from autopipe.bench.prompts import OWN_SETS, load_prompts

        texts = list(_humaneval_texts())
        for name in OWN_SETS:
            for prompt in load_prompts(name):
                texts += [message["content"] for message in prompt.messages or ()]
        return cls(texts)

    def overlaps(self, text: str) -> bool:
        """Whether `text` shares a run of words with a protected one."""
        words = normalised_words(text)
        lengths = (*self._short_lengths, self._num_words)
        return any(run in self._runs for length in lengths for run in _windows(words, length))

    def _runs_of(self, text: str) -> Iterator[str]:
        words = normalised_words(text)
        yield from _windows(words, min(self._num_words, len(words)))


def _windows(words: list[str], length: int) -> Iterator[str]:
    if length:
        for start in range(len(words) - length + 1):
            yield " ".join(words[start : start + length])


def _humaneval_texts() -> Iterator[str]:
    """Everything of a problem that a model could have been trained on."""
    from autopipe.bench.prompts import humaneval_problems
    from autopipe.core.errors import ConfigError

    try:
        problems = humaneval_problems()
    except ConfigError:  # not installed here: there is nothing to measure with, either
        return
    for problem in problems:
        yield problem["prompt"] + problem["canonical_solution"]
