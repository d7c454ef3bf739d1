"""Text completions through the official client."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from tests.service.serving import ALIAS, Running
from tests.tiny import EOS_ID


def complete(client: OpenAI, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "model": ALIAS,
        "prompt": "The quick",
        "seed": 3,
        "logit_bias": {str(EOS_ID): -100},
        **options,
    }
    return client.completions.create(**settings)


def test_sixteen_tokens_are_the_default(client: OpenAI) -> None:
    assert complete(client).usage.completion_tokens == 16


def test_several_prompts_give_choices_in_their_order(client: OpenAI) -> None:
    both = complete(client, prompt=["The quick", "A slow"], n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == complete(client).choices[0].text
    assert both.choices[2].text == complete(client, prompt="A slow").choices[0].text


def test_token_ids_are_taken_as_they_are(running: Running, client: OpenAI) -> None:
    ids = running.service.ready().encode("The quick")
    expected = complete(client).choices[0].text
    assert complete(client, prompt=ids).choices[0].text == expected
    assert complete(client, prompt=[ids, ids]).choices[1].text == expected


def test_a_stream_adds_up_to_the_text(client: OpenAI) -> None:
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == complete(client).choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_integer_logprobs_have_offsets_into_the_text(client: OpenAI, stream: bool) -> None:
    if stream:
        parts = [chunk.choices[0].logprobs for chunk in complete(client, logprobs=2, stream=True)]
        offsets = [offset for part in parts if part for offset in part.text_offset]
        tokens = [token for part in parts if part for token in part.tokens]
    else:
        found = complete(client, logprobs=2).choices[0].logprobs
        offsets, tokens = found.text_offset, found.tokens
        assert len(found.top_logprobs[0]) == 2
        assert len(found.token_logprobs) == 16
    assert len(offsets) == len(tokens) == 16
    assert offsets == sorted(offsets)


def test_neutral_values_of_what_is_not_supported_are_taken(client: OpenAI) -> None:
    assert complete(client, echo=False, best_of=1, suffix="").choices[0].text == complete(client).choices[0].text
