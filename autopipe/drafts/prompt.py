"""A training prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from autopipe.drafts.overlap import normalised_words

_HELDOUT_ONE_IN = 20


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A text to complete as it stands, or chat messages. Exactly one of text, question and messages is set.

    Attributes:
        key: unique and stable: the answer of a key is made once.
        kind: `code`, `chat`, `summarize`, or what a user's file says.
        source: where it comes from (`stdlib`, `doc`, `self`, a file's name).
        group: prompts of one group fall on the same side of the held-out split.
        text: to complete, without a chat template.
        question: a single user turn.
        messages: a conversation, last turn the user's.
    """

    key: str
    kind: str
    source: str
    group: str
    text: str | None = None
    question: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None

    @property
    def form(self) -> str:
        return "chat" if self.text is None else "raw"

    @property
    def turns(self) -> list[dict[str, str]]:
        """Messages for the chat template; empty for a text to complete."""
        if self.question is not None:
            return [{"role": "user", "content": self.question}]
        return [dict(message) for message in self.messages or ()]

    @property
    def content(self) -> str:
        """All words of it, for overlap and duplicates."""
        return self.text if self.text is not None else "\n".join(turn["content"] for turn in self.turns)

    @property
    def digest(self) -> str:
        """Equal for prompts that differ in layout, case or punctuation only."""
        return hashlib.sha256(f"{self.form} {' '.join(normalised_words(self.content))}".encode()).hexdigest()[:16]

    @property
    def split(self) -> str:
        """`heldout` for one group in twenty, by a hash of its name: the same in every run."""
        number = int(hashlib.sha256(self.group.encode()).hexdigest()[:8], 16)
        return "heldout" if number % _HELDOUT_ONE_IN == 0 else "train"
