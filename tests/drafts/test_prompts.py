"""Training prompts: from the standard library, and made by the target."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

from autopipe.core.errors import ConfigError
from autopipe.drafts.made_prompts import MadePrompt, chat_prompt, code_prompt, passage_prompt, user_turn_prefix
from autopipe.drafts.mix import PromptMix, file_source, own_sources
from autopipe.drafts.prompt import TrainingPrompt
from autopipe.drafts.stdlib_prompts import code_prompts, summary_prompts
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def library() -> list[TrainingPrompt]:
    return code_prompts()


def test_a_completion_prompt_is_a_header_with_a_docstring(library: list[TrainingPrompt]) -> None:
    raw = [prompt.text for prompt in library if prompt.text is not None]

    assert len(raw) > len(library) / 2
    for text in raw[:200]:
        (function,) = ast.parse(text + "    pass\n").body
        assert ast.get_docstring(function)
        assert text.endswith('"""\n')


def test_other_prompts_ask_for_code(library: list[TrainingPrompt]) -> None:
    assert {prompt.form for prompt in library} == {"raw", "chat"}


def test_keys_are_unique_and_the_same_in_every_run(library: list[TrainingPrompt]) -> None:
    prompts = [*library, *summary_prompts()]

    assert len({prompt.key for prompt in prompts}) == len(prompts)
    assert [prompt.key for prompt in code_prompts()] == [prompt.key for prompt in library]


def test_one_group_in_twenty_is_held_out(library: list[TrainingPrompt]) -> None:
    share = sum(prompt.split == "heldout" for prompt in library) / len(library)

    assert 0.03 < share < 0.07


def test_a_group_is_on_one_side_only() -> None:
    prompts = [TrainingPrompt(str(n), "code", "test", "group", text=str(n)) for n in range(9)]

    assert len({prompt.split for prompt in prompts}) == 1


def test_the_digest_ignores_layout_and_tells_forms_apart() -> None:
    raw = TrainingPrompt("1", "code", "test", "g", text="Sort it.")
    same = TrainingPrompt("2", "code", "test", "g", text="  sort IT")
    chat = TrainingPrompt("3", "code", "test", "g", question="Sort it.")

    assert raw.digest == same.digest != chat.digest


def test_a_user_turn_begins_where_the_template_says() -> None:
    assert user_turn_prefix(tiny_tokenizer()) == "user: "


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None

    with pytest.raises(ConfigError, match="--target"):
        user_turn_prefix(tokenizer)


@pytest.mark.parametrize("number", range(12))
def test_a_chat_turn_must_have_been_ended_by_the_model(number: int) -> None:
    made = chat_prompt(number, tiny_tokenizer())
    opening = made.prefix.removeprefix(user_turn_prefix(tiny_tokenizer()))

    assert made.finish(" boil an egg in the sea?", False) is None
    prompt = made.finish(" boil an egg in the sea? ", True)
    assert isinstance(prompt, TrainingPrompt)
    assert prompt.turns == [{"role": "user", "content": f"{opening} boil an egg in the sea?".strip()}]


def test_three_in_four_chat_turns_begin_with_given_words_of_many_kinds() -> None:
    prefix = user_turn_prefix(tiny_tokenizer())
    openings = [chat_prompt(number, tiny_tokenizer()).prefix.removeprefix(prefix) for number in range(400)]
    given = [opening for opening in openings if opening]
    assert 270 < len(given) < 330
    assert len(set(given)) > 60
    assert openings == [chat_prompt(number, tiny_tokenizer()).prefix.removeprefix(prefix) for number in range(400)]


@pytest.mark.parametrize("number", range(12))
def test_a_made_function_has_a_header_and_a_docstring_with_examples_in_two_of_three_cases(number: int) -> None:
    step = code_prompt(number).finish("_x(a, b):\n    junk", False)
    assert isinstance(step, MadePrompt)
    prompt = step.finish('Add two numbers and more. """ junk', False)
    if isinstance(prompt, MadePrompt):
        prompt = prompt.finish('1, 2)\n    3\n    """', False)
    assert isinstance(prompt, TrainingPrompt)
    assert prompt.text is not None
    assert ast.get_docstring(ast.parse(prompt.text + "    pass\n").body[-1])


@pytest.mark.parametrize("header", ["_x(a, b)\n", "_x(a b):\n", " if:\n", ""])
def test_a_made_header_that_is_no_python_is_dropped(header: str) -> None:
    assert code_prompt(0).finish(header, False) is None


def test_a_made_passage_is_cut_at_a_sentence_and_summarized() -> None:
    made = passage_prompt(0, tiny_tokenizer())
    sentence = "The old mill by the river was sold on Monday to a baker from the next town. "
    prompt = made.finish(sentence * 6 + "The rest is", False)

    assert isinstance(prompt, TrainingPrompt)
    assert prompt.kind == "summarize"
    assert prompt.question is not None
    assert "The rest is" not in prompt.question
    assert made.finish("Too short.", True) is None


def test_kinds_keep_their_shares_of_the_tokens() -> None:
    def source(kind: str):
        return (TrainingPrompt(f"{kind}/{n}", kind, "test", str(n), text=str(n)) for n in itertools.count())

    mix = PromptMix({"a": source("a"), "b": source("b")}, {"a": 0.75, "b": 0.25}, {})
    chosen = []
    for _ in range(100):
        job = mix.next()
        assert isinstance(job, TrainingPrompt)
        chosen.append(job.kind)
        mix.count(job.kind, 10)
    assert chosen.count("a") == 75


def test_a_mix_ends_when_all_sources_have() -> None:
    mix = PromptMix({"a": iter([TrainingPrompt("a", "a", "t", "g", text="x")])}, {"a": 1.0}, {})

    assert mix.next() is not None
    assert mix.next() is None


def test_used_prompts_are_not_handed_out_again(library: list[TrainingPrompt]) -> None:
    done = {prompt.key for prompt in library[:-1]} | {"code/self/000004", "chat/self/000002"}
    sources = own_sources(tiny_tokenizer(), done)

    first, second = next(sources["code"]), next(sources["code"])
    assert first.key == library[-1].key
    assert second.key == "code/self/000005"
    assert next(sources["chat"]).key == "chat/self/000003"


def test_a_users_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "def f():"}\n{"messages": [{"role": "user", "content": "Hello?"}]}\n')
    raw, chat = file_source(path, ())

    assert (raw.key, raw.kind, raw.form) == ("mine/000000", "mine", "raw")
    assert chat.turns == [{"role": "user", "content": "Hello?"}]
    assert [prompt.key for prompt in file_source(path, {"mine/000000"})] == ["mine/000001"]


def test_a_benchmark_set_is_no_file_to_train_on() -> None:
    with pytest.raises(ConfigError, match="never trained on"):
        file_source(Path("humaneval"), ())
