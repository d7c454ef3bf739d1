"""Prompts from the Python standard library: its functions' headers and docstrings, and its documentation.

Sources are parsed, never imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopipe.drafts.prompt import TrainingPrompt

_SKIPPED = {"test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
_MAX_PER_MODULE = 60
_MAX_WORDS = 150
_PASSAGE_WORDS = (60, 260)
_CODE_QUESTIONS = (
    "Write a Python function `{signature}` that does the following: {doc}",
    "Implement this in Python:\n\n```python\n{header}\n```\n\n{doc}",
    "I need a Python function called {name}. {doc} Please show me the code with a short example.",
    "Can you write {name} in Python? Its signature is `{signature}`.\n{doc}",
    "{doc}\n\nWrite a Python function for that, named `{name}`, and explain how it works.",
)
_SUMMARY_QUESTIONS = (
    "Summarize this in three sentences:\n\n{passage}",
    "Summarize the following text in one short paragraph:\n\n{passage}",
    "Give me the key points of this text as a short list:\n\n{passage}",
    "What is this text about? Answer in two sentences.\n\n{passage}",
    "Please write a brief summary of the passage below.\n\n{passage}",
    "Shorten this to about fifty words:\n\n{passage}",
)


@dataclass(frozen=True, slots=True)
class _Function:
    module: str
    name: str
    header: str
    doc: str


def library_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def code_prompts(seed: int = 0) -> list[TrainingPrompt]:
    """A prompt for every documented function of the library, by turns to complete and to answer, shuffled."""
    functions = list(_harvest()[0])
    random.Random(seed).shuffle(functions)
    seen: set[str] = set()
    prompts: list[TrainingPrompt] = []
    for function in functions:
        if function.doc not in seen:
            seen.add(function.doc)
            prompts.append(_code_prompt(function, len(prompts)))
    return prompts


def summary_prompts(seed: int = 0) -> list[TrainingPrompt]:
    """Passages of docstrings and of the language reference, each with a request to summarize it, shuffled."""
    passages = list(dict(_passages()).items())
    chooser = random.Random(seed)
    chooser.shuffle(passages)
    return [summary_prompt(name, passage, chooser.randrange(1 << 30)) for name, passage in passages]


def summary_prompt(name: str, passage: str, choice: int) -> TrainingPrompt:
    """A chat prompt that asks, in one of several wordings, for a summary of a passage."""
    question = _SUMMARY_QUESTIONS[choice % len(_SUMMARY_QUESTIONS)]
    return TrainingPrompt(
        key=f"summarize/{name}",
        kind="summarize",
        source=name.split("/")[0],
        group=name,
        question=question.format(passage=passage),
    )


def _code_prompt(function: _Function, number: int) -> TrainingPrompt:
    key, group = f"code/stdlib/{number:05d}", f"{function.module}.{function.name}"
    if number % 3:
        layout = '    """{0}\n    """\n' if number % 2 else '    """\n    {0}\n    """\n'
        doc = layout.format(function.doc.replace("\n", "\n    "))
        text = f"{function.header}\n{doc}".replace("    \n", "\n")
        if number % 4 == 1:
            text = "\n\n" + text
        return TrainingPrompt(key=key, kind="code", source="stdlib", group=group, text=text)
    question = _CODE_QUESTIONS[number // 3 % len(_CODE_QUESTIONS)]
    signature = function.header.removeprefix("def ").removesuffix(":")
    question = question.format(header=function.header, signature=signature, doc=function.doc, name=function.name)
    return TrainingPrompt(key=key, kind="code", source="stdlib", group=group, question=question)


@functools.cache
def _harvest() -> tuple[list[_Function], list[str]]:
    """Documented functions, and all texts of the documentation, in one pass over the sources."""
    functions: list[_Function] = []
    texts: list[str] = []
    root = library_folder()
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED & set(path.relative_to(root).parts):
            continue
        try:
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        except (SyntaxError, ValueError, OSError):
            continue
        functions += _functions(path.stem, nodes)
        texts += _strings(nodes) if path.parent.name == "pydoc_data" else _docstrings(nodes)
    return functions, list(dict.fromkeys(texts))


def _functions(module: str, nodes: list[ast.AST]) -> list[_Function]:
    found = []
    for node in nodes:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        doc = ast.get_docstring(node)
        if doc and doc.isascii() and 5 <= len(doc.split()) <= _MAX_WORDS and '"""' not in doc:
            found.append(_Function(module, node.name, _header(node), doc))
    return found[:_MAX_PER_MODULE]


def _docstrings(nodes: list[ast.AST]) -> list[str]:
    documented = (node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return [doc for node in documented if (doc := ast.get_docstring(node))]


def _strings(nodes: list[ast.AST]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _header(node: ast.FunctionDef) -> str:
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args.pop(0)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(arguments)}){returns}:"


def _passages() -> Iterator[tuple[str, str]]:
    """Name and text of passages of a length worth summarizing."""
    for text in _harvest()[1]:
        for passage in _cut(text):
            yield "doc/" + hashlib.sha256(passage.encode()).hexdigest()[:12], passage


def _cut(text: str) -> Iterator[str]:
    """Runs of prose paragraphs: neither headings, nor tables, nor code."""
    least, most = _PASSAGE_WORDS
    words: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        prose = len(line.split()) >= 12 and line[-1:] in ".:" and ">>>" not in line and "---" not in line
        if prose and line.isascii():
            words += ([*"\n"] if words else []) + line.split()
        if words and (not prose or len(words) > most // 2):
            if least <= len(words) <= most:
                yield " ".join(words).replace(" \n ", "\n\n")
            words = []
    if least <= len(words) <= most:
        yield " ".join(words).replace(" \n ", "\n\n")
