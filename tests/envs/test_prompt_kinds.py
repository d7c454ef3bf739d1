"""The guess of a prompt's kind."""

import pytest

from autopipe.envs.prompt_kinds import PromptKind, prompt_kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("def add(a, b):\n    return a + b\n\ndef sub(a, b):\n", PromptKind.CODE),
        ("Write a Python function that sorts a list.", PromptKind.CODE),
        ("How are you today?", PromptKind.CHAT),
        ("Summarize the following article: def and return were used.", PromptKind.SUMMARY),
        ("x" * 1000 + "\nTL;DR", PromptKind.SUMMARY),
        ("How many apples are left if 3 of 7 are eaten?", PromptKind.MATH),
        ("Solve 3 + 4 for me", PromptKind.MATH),
        ("Once upon a time. " * 100, PromptKind.OTHER),
        ("", PromptKind.CHAT),
    ],
)
def test_kind_of_a_prompt(text: str, kind: PromptKind) -> None:
    assert prompt_kind(text) is kind
