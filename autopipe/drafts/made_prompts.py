"""Prompts the target makes itself, by sampling: an instruct model knows what its users ask."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from autopipe.core.errors import ConfigError
from autopipe.drafts.prompt import TrainingPrompt
from autopipe.drafts.stdlib_prompts import summary_prompt

_MARK = "\u2400user turn\u2400"
_CHAT_OPENINGS = (
    "Why do, Why does, Why is, How does, How do I, How can I, How much, How long, What is, What does, What should I, "
    "What happens when, What are, What's the difference between, Which, When did, Where, Who, Is it, Does, Should I, "
    "Explain, Explain to a child, Describe, Compare, Summarize, Define, Tell me about, Tell me how, Tell me a, List, "
    "Name three, Name five, Give me, Give an example of, Give two reasons, Suggest, Recommend, Plan a, Make a plan, "
    "Write a, Write a short story about, Write a poem, Write a letter, Write an email, Write a speech, Write a review, "
    "Write a Python, Write SQL, Write a regular expression, Draft a, Invent, Imagine, Translate, Rewrite, Correct, "
    "Turn this into, Convert, Calculate, Solve, Prove that, Find the mistake, Help me, I have, I am, I need, I want, "
    "I would like, I can't, I don't understand, My, My daughter, My boss, My neighbour, My dog, My computer, Our, We, "
    "We are, This, The, In, A, If, Someone, There is, People say, Yesterday, Every, Is there, Can I, Could you"
)
_CODE_STARTS = (
    "from typing import List\n\n\ndef ",
    "def ",
    "\n\ndef ",
    "\ndef ",
    "import math\n\n\ndef ",
    "from typing import List, Tuple\n\n\ndef ",
    "from typing import Optional\n\n\ndef ",
)
_CODE_NOUNS = (
    "list, numbers, string, strings, words, matrix, text, tuple, integer, digits, dates, path, tree, graph, "
    "array, values, dictionary, names, time, money, temperature, prices, letters, characters, intervals, points, "
    "grades, scores, stack, queue, file, line, table, vowels, prefix, binary, roman, fraction, polynomial, "
    "square, circle, triangle, distance, password, email, palindrome, sentence"
)
_CODE_VERBS = (
    "find, count, sum, remove, sort, get, check, is, reverse, replace, convert, merge, split, filter, calculate, "
    "generate, make, parse, compare, compute, validate, rotate, encode, decode, format, largest, smallest, max, "
    "min, average, add, insert, search, unique, group, flatten, has, apply, total, next, first, last, common, "
    "even, odd"
)
_FORMS = (
    "a short news report, a paragraph for a local newspaper, a short magazine article, a report of about 150 "
    "words, an informative paragraph, a press release, a short account full of facts and figures, a diary entry, "
    "an e-mail to colleagues, a short review"
)
_TOPICS = (
    "a hospital that changed its opening hours, a new kind of battery, a museum's collection of clocks, a flood, "
    "a school that teaches cooking, a study of teenagers and sleep, a small company that makes shoes, a lost dog, "
    "a film, the price of coffee, a train line that was closed, an orchard in a dry summer, a volunteer fire "
    "brigade, a chess player, a new law on bicycles, an experiment with plants, a library's night opening, whales "
    "near the coast, a broken satellite, a village without a shop, a music festival, the history of glass, a "
    "factory's move, a football club in debt, honey, a university's research on soil, an old theatre, a mountain "
    "rescue, wind turbines, a novel about the sea, a market hall, an election for mayor, a hotel, the life of a "
    "painter, a kitchen garden, a vaccine, a bridge for animals, ants, salt, a court case about noise, a ferry "
    "timetable, a volcano, a new phone, two brothers who build boats, forest fires, a survey of commuters, a "
    "bakery's anniversary, a comet, a dam, a language that is dying out, an exhibition of maps"
)


@dataclass(frozen=True, slots=True)
class MadePrompt:
    """A prompt still to be sampled.

    Attributes:
        key: of the prompt it will be.
        kind: of the prompt it will be.
        prefix: text that the sampled text continues, special tokens written out.
        max_tokens: sampled at most.
        ends: whether the text sampled so far is complete; the model's end of turn always ends it.
        finish: makes the prompt (or the next step towards it) from the sampled text, and whether the model ended its
            turn; None: it is of no use.
    """

    key: str
    kind: str
    prefix: str
    max_tokens: int
    ends: Callable[[str], bool]
    finish: Callable[[str, bool], TrainingPrompt | MadePrompt | None]


def never(text: str) -> bool:
    return False


def user_turn_prefix(tokenizer: Any) -> str:
    """The chat template up to where the user's words begin.

    Raises:
        ConfigError: the tokenizer has no chat template, or one that rewrites what the user says.
    """
    if not getattr(tokenizer, "chat_template", None):
        wanted = "a target with a chat template, or prompts of your own (--prompts)"
        raise ConfigError("--target", getattr(tokenizer, "name_or_path", None), wanted)
    turns = [{"role": "user", "content": _MARK}]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    prefix, found, _ = text.partition(_MARK)
    if not found:
        raise ConfigError("--target", tokenizer.name_or_path, "a target whose chat template keeps the user's words")
    return prefix


def chat_prompt(number: int, tokenizer: Any) -> MadePrompt:
    """A user's turn: three in four begin with given words, for the target itself nearly always begins with a few."""
    key = f"chat/self/{number:06d}"
    chooser = random.Random(key)
    opening = chooser.choice(_CHAT_OPENINGS.split(", ")) if chooser.random() < 3 / 4 else ""

    def finish(text: str, ended: bool) -> TrainingPrompt | None:
        question = (opening + text).strip()
        if not ended or not 4 <= len(question.split()) <= 160 or "\ufffd" in question:
            return None
        return TrainingPrompt(key=key, kind="chat", source="self", group=question, question=question)

    return MadePrompt(key, "chat", user_turn_prefix(tokenizer) + opening, 200, never, finish)


def code_prompt(number: int) -> MadePrompt:
    """A function's header, then its docstring, in two of three cases with examples in it."""
    key = f"code/self/{number:06d}"
    chooser = random.Random(key)
    start = chooser.choice(_CODE_STARTS)
    hint = chooser.choice(("", "{verb}_", "{verb}_{noun}", "{noun}_", "{verb}_{noun}_"))
    start += hint.format(verb=chooser.choice(_CODE_VERBS.split(", ")), noun=chooser.choice(_CODE_NOUNS.split(", ")))
    opening = chooser.choice(('    """ ', '    """\n    ', '    """'))
    wants_examples = chooser.random() < 2 / 3

    def closes(text: str) -> bool:
        return '"""' in text

    def with_header(text: str, ended: bool) -> MadePrompt | None:
        header = start + text.partition("\n")[0].rstrip() + "\n"
        if not header.endswith(":\n") or not _parses(header + "    pass\n"):
            return None
        return MadePrompt(key, "code", header + opening, 160, closes, partial(with_docstring, header + opening))

    def with_docstring(before: str, text: str, ended: bool) -> TrainingPrompt | MadePrompt | None:
        doc, closed, _ = text.partition('"""')
        doc = doc.rstrip()
        if not closed or len(f"{before}{doc}".partition('"""')[2].split()) < 4:
            return None
        if wants_examples and ">>>" not in before + doc:
            found = re.search(r"def (\w+)\(", before)
            if found is None:
                return None
            before = f"{before}{doc}\n    >>> {found[1]}("
            return MadePrompt(key, "code", before, 120, closes, partial(with_docstring, before))
        whole = f'{before}{doc}\n    """\n'
        if not _parses(whole + "    pass\n"):
            return None
        return TrainingPrompt(key=key, kind="code", source="self", group=whole, text=whole)

    return MadePrompt(key, "code", start, 50, lambda text: "\n" in text, with_header)


def passage_prompt(number: int, tokenizer: Any) -> MadePrompt:
    """A passage the target writes, to be summarized."""
    name = f"self/{number:06d}"
    chooser = random.Random(name)
    request = f"Write {chooser.choice(_FORMS.split(', '))} about {chooser.choice(_TOPICS.split(', '))}."
    prefix = str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": request}], tokenize=False, add_generation_prompt=True
        )
    )

    def finish(text: str, ended: bool) -> TrainingPrompt | None:
        whole = text if ended else text[: max((match.end() for match in re.finditer(r"[.!?](?=\s)", text)), default=0)]
        passage = whole.strip()
        if len(passage.split()) < 60 or "\ufffd" in passage:
            return None
        return summary_prompt(name, passage, chooser.randrange(1 << 30))

    return MadePrompt(f"summarize/{name}", "summarize", prefix, chooser.choice((150, 220, 300)), never, finish)


def _parses(code: str) -> bool:
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return False
    return isinstance(body[-1], ast.FunctionDef)
