"""Requests with an idempotency key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.serving import ALIAS, Running, serving, tiny_plan, until
from tests.service.test_refusals import send

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def kept(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("journal") / "requests.sqlite"
    with serving(tiny_plan(tiny_folder), journal_path=str(path)) as running:
        yield running


def complete(running: Running, key: str, **fields: Any) -> tuple[int, Any]:
    body = {"model": ALIAS, "prompt": "abc", "max_tokens": 20, "logit_bias": {"257": -100}, **fields}
    return send(running, TEXT, body, headers={"Idempotency-Key": key})


def test_the_same_key_gives_the_same_answer_without_a_seed(kept: Running) -> None:
    first, second = complete(kept, "k1"), complete(kept, "k1")
    assert first[0] == second[0] == 200
    assert first[1]["choices"] == second[1]["choices"]
    assert complete(kept, "k2")[1]["choices"] != first[1]["choices"]


def test_every_choice_is_kept_and_reported(kept: Running) -> None:
    status, answer = complete(kept, "several", n=2)
    assert status == 200
    status, report = send(kept, "/v1/autopipe/requests/several")
    assert status == 200
    assert [choice["text"] for choice in report["choices"]] == [choice["text"] for choice in answer["choices"]]
    assert [choice["status"] for choice in report["choices"]] == ["finished", "finished"]


def test_a_key_used_for_another_request_is_refused(kept: Running) -> None:
    assert complete(kept, "once")[0] == 200
    status, answer = complete(kept, "once", prompt="other")
    assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")


def test_an_unknown_key_is_not_found(kept: Running) -> None:
    assert send(kept, "/v1/autopipe/requests/nobody")[0] == 404


def test_a_restarted_service_still_knows_what_it_answered(tiny_folder: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "requests.sqlite")
    with serving(tiny_plan(tiny_folder), journal_path=path) as running:
        before = complete(running, "k")[1]["choices"]
    with serving(tiny_plan(tiny_folder), journal_path=path) as running:
        until(lambda: send(running, "/v1/autopipe/requests/k")[1]["choices"][0]["status"] == "finished")
        assert complete(running, "k")[1]["choices"] == before


def test_without_a_journal_a_key_is_refused_instead_of_ignored(running: Running) -> None:
    status, answer = complete(running, "k")
    assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")
