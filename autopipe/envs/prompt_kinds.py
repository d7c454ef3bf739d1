"""Kinds of prompts: what a policy is told about the text, because acceptance depends on it more than on anything."""

from __future__ import annotations

import re
from enum import StrEnum


class PromptKind(StrEnum):
    CODE = "code"
    CHAT = "chat"
    SUMMARY = "summary"
    MATH = "math"
    OTHER = "other"


_CODE = re.compile(r"```|^\s*(def|class|import|from|#include|public|function|const|return)\b|[;{}]\s*$", re.M)
_CODE_WORDS = re.compile(r"\b(python|javascript|java|rust|c\+\+|function|program|script|sql|regex|unit test)\b", re.I)
_SUMMARY = re.compile(r"\b(summari[sz]e|summary|tl;?dr|shorten|key points|rewrite|translate|extract)\b", re.I)
_MATH = re.compile(
    r"\b(solve|equation|calculate|how many|prove|integral|derivative|percent)\b|\d\s*[-+*/=^]\s*\d", re.I
)
_CHAT_CHARACTERS = 600


def prompt_kind(text: str) -> PromptKind:
    """Guess the kind of a prompt from its words; microseconds, no model.

    Summaries are asked for before code, because the text to be summarised may well be code. What is short and
    nothing else is chat; what is long and nothing else, `other`.
    """
    head = text[:2000]
    if _SUMMARY.search(head[:300]) or _SUMMARY.search(text[-300:]):
        return PromptKind.SUMMARY
    if len(_CODE.findall(head)) >= 2 or _CODE_WORDS.search(head):
        return PromptKind.CODE
    if _MATH.search(head):
        return PromptKind.MATH
    return PromptKind.CHAT if len(text) <= _CHAT_CHARACTERS else PromptKind.OTHER
