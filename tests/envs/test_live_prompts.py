"""Prompts of the live stream."""

import pytest

from autopipe.core.errors import ConfigError
from autopipe.envs.live_prompts import DEFAULT_PROMPTS, LivePrompt, encode_prompts
from autopipe.envs.prompt_kinds import PromptKind
from tests.envs.scenes import emulated_plan


def test_a_prompt_is_text_or_token_ids() -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        LivePrompt(text="a", token_ids=(1,))
    with pytest.raises(ConfigError, match="exactly one"):
        LivePrompt()


def test_text_goes_through_the_targets_tokenizer() -> None:
    (token_ids, kind), *_ = encode_prompts(["Hi"], emulated_plan())
    assert (len(token_ids), kind) == (2, PromptKind.CHAT)


def test_the_kind_of_a_text_is_guessed_unless_given() -> None:
    given = [LivePrompt("Write a Python script."), LivePrompt("Write a Python script.", kind=PromptKind.MATH)]
    assert [kind for _, kind in encode_prompts(given, emulated_plan())] == [PromptKind.CODE, PromptKind.MATH]


def test_token_ids_are_taken_as_they_are() -> None:
    assert encode_prompts([LivePrompt(token_ids=(3, 1))], emulated_plan()) == [((3, 1), PromptKind.OTHER)]


def test_the_built_in_prompts_are_of_different_kinds() -> None:
    assert len({kind for _, kind in encode_prompts(DEFAULT_PROMPTS, emulated_plan())}) == 3
