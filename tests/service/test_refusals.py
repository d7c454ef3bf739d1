"""What is not right is refused with a 4xx that names the field, in OpenAI's shape."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.service.serving import ALIAS, Running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def send(
    running: Running, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and JSON body of an answer."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {running.key}", **(headers or {})}
    request = urllib.request.Request(running.url + path, data, head, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": ALIAS, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": ALIAS, "prompt": "hi", "max_tokens": 2, **fields}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, chat(temperatur=1), "temperatur", "unknown_parameter"),
        (CHAT, chat(tools=[{"type": "function"}]), "tools", "unsupported_parameter"),
        (CHAT, chat(response_format={"type": "json_object"}), "response_format", "unsupported_parameter"),
        (CHAT, chat(store=True), "store", "unsupported_parameter"),
        (CHAT, chat(reasoning_effort="low"), "reasoning_effort", "unsupported_parameter"),
        (CHAT, chat(messages=[]), "messages", "invalid_value"),
        (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), "messages.0.role", "invalid_value"),
        (CHAT, chat(messages=[{"role": "user"}]), "messages.0.content", "missing_required_parameter"),
        (
            CHAT,
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "text": ""}]}]),
            "messages.0.content.0.type",
            "invalid_value",
        ),
        (CHAT, chat(temperature=3), "temperature", "invalid_value"),
        (CHAT, chat(temperature=1e-9), "temperature", "invalid_value"),
        (CHAT, chat(temperature="1"), "temperature", "invalid_type"),
        (CHAT, chat(n=0), "n", "invalid_value"),
        (CHAT, chat(n=17), "n", "invalid_value"),
        (CHAT, chat(stop=["a", "b", "c", "d", "e"]), "stop", "invalid_value"),
        (CHAT, chat(stop=""), "stop", "invalid_value"),
        (CHAT, chat(stop=["x" * 513]), "stop", "invalid_value"),
        (CHAT, chat(top_logprobs=2), "top_logprobs", "invalid_value"),
        (CHAT, chat(max_tokens=3, max_completion_tokens=2), "max_tokens", "invalid_value"),
        (CHAT, chat(max_tokens=0), "max_tokens", "invalid_value"),
        (CHAT, chat(max_tokens=511), "max_tokens", "context_length_exceeded"),
        (CHAT, chat(min_tokens=3), "min_tokens", "invalid_value"),
        (CHAT, chat(stream_options={"include_usage": True}), "stream_options", "invalid_value"),
        (CHAT, chat(logit_bias={"400": 1}), "logit_bias", "invalid_value"),
        (CHAT, chat(logit_bias={"x": 1}), "logit_bias.x", "invalid_value"),
        (CHAT, chat(seed=2**63), "seed", "invalid_value"),
        (CHAT, chat(messages=[{"role": "user", "content": "x" * 600}]), "messages", "context_length_exceeded"),
        (TEXT, text(echo=True), "echo", "unsupported_parameter"),
        (TEXT, text(best_of=2), "best_of", "unsupported_parameter"),
        (TEXT, text(suffix="x"), "suffix", "unsupported_parameter"),
        (TEXT, text(prompt=""), "prompt", "invalid_value"),
        (TEXT, text(prompt=[]), "prompt", "invalid_value"),
        (TEXT, text(prompt=[[]]), "prompt.0", "invalid_value"),
        (TEXT, text(prompt=[400]), "prompt", "invalid_value"),
        (TEXT, text(prompt=["a"] * 17), "prompt", "invalid_value"),
        (TEXT, text(logprobs=21), "logprobs", "invalid_value"),
    ],
)
def test_a_bad_field_is_named(running: Running, path: str, body: Any, param: str, code: str) -> None:
    status, answer = send(running, path, body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert param.split(".")[0] in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"model": 1e999}', b"9" * 5000],
)
def test_a_body_that_is_no_request_is_a_400(running: Running, body: bytes) -> None:
    status, answer = send(running, CHAT, body, method="POST")
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_text_that_is_not_unicode_is_refused(running: Running) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
    assert send(running, CHAT, body)[0] == 400
    assert send(running, TEXT, b'{"model": "tiny", "prompt": "\\ud800"}')[0] == 400


def test_another_model_is_not_found_whatever_its_name(running: Running) -> None:
    for name in ("gpt-4", "/etc/passwd", "../tiny", "http://localhost/x"):
        status, answer = send(running, CHAT, chat(model=name))
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_a_large_body_is_refused_before_it_is_parsed(running: Running) -> None:
    status, answer = send(running, CHAT, b"x" * (running.service.config.limits.max_body_bytes + 1))
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


def test_unknown_paths_and_methods_answer_in_the_same_shape(running: Running) -> None:
    assert send(running, "/v1/nothing")[1]["error"]["code"] == "not_found"
    assert send(running, CHAT)[1]["error"]["code"] == "method_not_allowed"
    assert send(running, "/docs")[0] == 404
