"""Requests with an idempotency key."""

from __future__ import annotations

from typing import Any

from tests.service.serving import ALIAS, Running, until
from tests.service.test_refusals import send

TEXT = "/v1/completions"


def complete(running: Running, key: str, **fields: Any) -> tuple[int, Any]:
    body = {"model": ALIAS, "prompt": "abc", "max_tokens": 20, "logit_bias": {"257": -100}, **fields}
    return send(running, TEXT, body, headers={"Idempotency-Key": key})


def test_the_same_key_gives_the_same_answer_without_a_seed(guarded: Running) -> None:
    first, second = complete(guarded, "k1"), complete(guarded, "k1")
    assert first[0] == second[0] == 200
    assert first[1]["choices"] == second[1]["choices"]
    assert complete(guarded, "k2")[1]["choices"] != first[1]["choices"]


def test_every_choice_is_kept_and_reported(guarded: Running) -> None:
    status, answer = complete(guarded, "several", n=2)
    assert status == 200
    status, report = send(guarded, "/v1/autopipe/requests/several")
    assert status == 200
    assert [choice["text"] for choice in report["choices"]] == [choice["text"] for choice in answer["choices"]]
    assert [choice["status"] for choice in report["choices"]] == ["finished", "finished"]


def test_a_key_used_for_another_request_is_refused(guarded: Running) -> None:
    assert complete(guarded, "once")[0] == 200
    status, answer = complete(guarded, "once", prompt="other")
    assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")


def test_an_unknown_key_is_not_found(guarded: Running) -> None:
    assert send(guarded, "/v1/autopipe/requests/nobody")[0] == 404


def test_the_report_ends_at_a_stop_string_as_the_answer_does(guarded: Running) -> None:
    text = complete(guarded, "whole", seed=9)[1]["choices"][0]["text"]
    status, answer = complete(guarded, "cut", seed=9, stop=text[4:6])
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")

    def report() -> Any:
        return send(guarded, "/v1/autopipe/requests/cut")[1]["choices"][0]

    until(lambda: report()["status"] == "finished")
    assert report()["text"] == answer["choices"][0]["text"] == text[: text.index(text[4:6])]
    assert report()["reason"] == "stop"
    assert report()["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_without_a_journal_a_key_is_refused_instead_of_ignored(running: Running) -> None:
    status, answer = complete(running, "k")
    assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")
