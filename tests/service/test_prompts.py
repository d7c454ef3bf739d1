"""One BOS, whatever template and tokenizer do; templates run in a sandbox."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from autopipe.api import AutoPipe
from autopipe.service.errors import ApiError
from autopipe.service.prompts import chat_ids, completion_ids, one_bos
from autopipe.service.schemas import ChatMessage
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

BOS = 256


class Pipe:
    """The part of an `AutoPipe` that encodes."""

    encode = AutoPipe.encode

    def __init__(self, *, adds_bos: bool, template: str = CHAT_TEMPLATE) -> None:
        self.tokenizer: PreTrainedTokenizerFast = tiny_tokenizer()
        self.tokenizer.chat_template = template
        if adds_bos:
            self.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", BOS)]
            )


def message(content: str = "hi", role: Any = "user") -> ChatMessage:
    return ChatMessage(role=role, content=content)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, "{{ bos_token }}" + CHAT_TEMPLATE, "<s><s>" + CHAT_TEMPLATE])
def test_a_tokenizer_that_adds_bos_gives_chats_exactly_one(template: str) -> None:
    ids = chat_ids(Pipe(adds_bos=True, template=template), [message()])
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


@pytest.mark.parametrize(("template", "count"), [(CHAT_TEMPLATE, 0), ("{{ bos_token }}" + CHAT_TEMPLATE, 1)])
def test_a_tokenizer_that_adds_none_leaves_it_to_the_template(template: str, count: int) -> None:
    assert chat_ids(Pipe(adds_bos=False, template=template), [message()]).count(BOS) == count


@pytest.mark.parametrize("prompt", ["hi", "<s>hi", "<s><s>hi"])
def test_text_gets_exactly_one(prompt: str) -> None:
    (ids,) = completion_ids(Pipe(adds_bos=True), prompt)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


def test_token_ids_are_left_alone() -> None:
    assert completion_ids(Pipe(adds_bos=True), [BOS, BOS, 1]) == [[BOS, BOS, 1]]


def test_a_tokenizer_without_bos_is_left_alone() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    assert one_bos([1, 2], tokenizer) == [1, 2]


def test_developer_is_another_name_of_system() -> None:
    pipe = Pipe(adds_bos=False)
    assert chat_ids(pipe, [message(role="developer")]) == chat_ids(pipe, [message(role="system")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.more }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set x = messages.append(1) %}",
        "{% for x in range(999999999) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{% if %}",
    ],
)
def test_a_template_that_fails_or_misbehaves_is_a_bad_request(template: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_ids(Pipe(adds_bos=False, template=template), [message()])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_model_without_a_template_refuses_chats() -> None:
    pipe = Pipe(adds_bos=False)
    pipe.tokenizer.chat_template = None
    with pytest.raises(ApiError, match="plain prompt"):
        chat_ids(pipe, [message()])
