"""Chat completions through the official client."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.service.serving import ALIAS, Running
from tests.tiny import EOS_ID

NO_EOS = {str(EOS_ID): -100}
MESSAGES: Any = [{"role": "user", "content": "The quick brown fox"}]


def ask(client: OpenAI, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "model": ALIAS,
        "messages": MESSAGES,
        "max_tokens": 24,
        "seed": 5,
        "logit_bias": NO_EOS,
        **options,
    }
    return client.chat.completions.create(**settings)


def test_the_answer_is_that_of_the_engine(running: Running, client: OpenAI) -> None:
    host = running.service.ready()
    answer = ask(client, temperature=0)
    ids = host.encode(messages=MESSAGES)
    from autopipe.core.sampling import SamplingParams

    blocks = list(host.submit(ids, SamplingParams(max_new_tokens=24)))
    tokens = [token for block in blocks for token in block.token_ids]
    assert answer.choices[0].message.content == host.tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == len(tokens)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"


def test_a_stream_adds_up_to_the_answer_and_has_one_finish_chunk(client: OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_comes_in_a_last_chunk_without_choices_where_asked_for(client: OpenAI) -> None:
    *chunks, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert last.usage.total_tokens == last.usage.prompt_tokens + 24
    assert all(chunk.usage is None for chunk in chunks)


def test_the_async_client_streams_several_requests_at_once(running: Running) -> None:
    async def one(client: AsyncOpenAI, seed: int) -> str:
        stream: Any = await client.chat.completions.create(
            model=ALIAS, messages=MESSAGES, max_tokens=16, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=running.base_url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in (1, 2, 1, 2)))

    first, second, third, fourth = asyncio.run(all_of_them())
    assert (first, second) == (third, fourth)
    assert first != second


def test_a_seed_fixes_the_answer_and_none_does_not(client: OpenAI) -> None:
    assert ask(client).choices[0].message.content == ask(client).choices[0].message.content
    assert len({ask(client, seed=None).choices[0].message.content for _ in range(3)}) > 1


def test_choices_differ_and_the_first_does_not_depend_on_their_number(client: OpenAI) -> None:
    three = ask(client, n=3)
    texts = [choice.message.content for choice in three.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert texts[0] == ask(client).choices[0].message.content
    assert three.usage.completion_tokens == 3 * 24


def test_streamed_choices_each_have_their_text_and_one_finish_chunk(client: OpenAI) -> None:
    whole = ask(client, n=3)
    texts, reasons = ["", "", ""], [0, 0, 0]
    for chunk in ask(client, n=3, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] += choice.finish_reason is not None
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_text_and_tokens(client: OpenAI, stream: bool) -> None:
    full = ask(client).choices[0].message.content
    stop = full[6:8]
    if stream:
        chunks = list(ask(client, stop=[stop, "never"], stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = ask(client, stop=stop)
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens < 24
    assert text == full[: full.index(stop)]
    assert reason == "stop"


def test_max_completion_tokens_is_the_other_name_of_max_tokens(client: OpenAI) -> None:
    answer = ask(client, max_tokens=None, max_completion_tokens=7)
    assert answer.usage.completion_tokens == 7


def test_logprobs_have_one_entry_a_token_with_bytes_and_the_likeliest(client: OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=3, max_tokens=9).choices[0]
    content = choice.logprobs.content
    assert len(content) == 9
    assert all(len(entry.top_logprobs) == 3 and math.isfinite(entry.logprob) for entry in content)
    data = bytes(byte for entry in content for byte in entry.bytes)
    assert data.decode("utf-8", errors="replace") == choice.message.content


def test_streamed_logprobs_equal_those_of_the_whole_answer(client: OpenAI) -> None:
    whole = ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    parts = [chunk.choices[0].logprobs for chunk in ask(client, logprobs=True, top_logprobs=2, stream=True)]
    assert [entry for part in parts if part for entry in part.content] == whole


def test_a_text_in_parts_is_the_text(client: OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "The quick "}, {"type": "text", "text": "brown fox"}]
    in_parts = ask(client, messages=[{"role": "user", "content": parts}])
    assert in_parts.choices[0].message.content == ask(client).choices[0].message.content


def test_a_message_of_ours_can_be_sent_back(client: OpenAI) -> None:
    message = ask(client).choices[0].message
    history = [*MESSAGES, message, {"role": "user", "content": "go on"}]
    assert ask(client, messages=history).choices[0].message.content


def test_fields_that_cannot_change_the_output_are_taken(client: OpenAI) -> None:
    plain = ask(client).choices[0].message.content
    decorated = ask(
        client,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        parallel_tool_calls=True,
        prediction={"type": "content", "content": "x"},
    )
    assert decorated.choices[0].message.content == plain


def test_extras_reach_the_sampler(client: OpenAI) -> None:
    greedy = ask(client, temperature=0).choices[0].message.content
    assert ask(client, extra_body={"top_k": 1}).choices[0].message.content == greedy
    assert ask(client, extra_body={"min_p": 1.0}).choices[0].message.content == greedy
    assert ask(client, top_p=0).choices[0].message.content == greedy


def test_logit_bias_and_penalties_change_the_answer(client: OpenAI) -> None:
    biased = ask(client, temperature=0, logit_bias={"65": 100}).choices[0].message.content
    assert len(set(biased)) == 1
    assert ask(client, temperature=0, logit_bias={"65": 30}, frequency_penalty=2).choices[0].message.content != biased
