from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.bench.prompts import OWN_SETS, load_prompts
from autopipe.core.errors import ConfigError


@pytest.mark.parametrize("name", OWN_SETS)
def test_own_sets_hold_24_different_chat_prompts(name: str) -> None:
    prompts = load_prompts(name)

    assert len({prompt.name for prompt in prompts}) == 24
    assert len({prompt.messages[0]["content"] for prompt in prompts if prompt.messages}) == 24


def test_passages_to_summarize_have_150_to_250_words() -> None:
    for prompt in load_prompts("summarize"):
        assert prompt.messages is not None
        passage = prompt.messages[0]["content"].split("\n\n", 1)[1]
        assert 150 <= len(passage.split()) <= 250, prompt.name


def test_humaneval_prompts_are_raw_texts_in_order() -> None:
    prompts = load_prompts("humaneval:3")

    assert [prompt.name for prompt in prompts] == ["HumanEval/0", "HumanEval/1", "HumanEval/2"]
    assert all(prompt.text and "def " in prompt.text for prompt in prompts)


def test_a_count_takes_the_first_prompts() -> None:
    assert load_prompts("chat:5") == load_prompts("chat")[:5]


@pytest.mark.parametrize("spec", ["chat:0", "chat:25", "chat:", "chat:x", "humaneval:165", "chit", ""])
def test_a_spec_that_is_not_right_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="--prompts"):
        load_prompts(spec)


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        "{}",
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"prompt": "a", "messages": []}',
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": 1}]}',
    ],
)
def test_a_line_that_is_not_right_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "good"}\n' + line + "\n")

    with pytest.raises(ConfigError, match=r"mine\.jsonl:2"):
        load_prompts(str(file))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("\n")

    with pytest.raises(ConfigError, match="at least one prompt"):
        load_prompts(str(file))
