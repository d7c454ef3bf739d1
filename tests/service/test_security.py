"""Who may ask, from where, and what the log tells of it."""

from __future__ import annotations

import http.client
import logging

import pytest
from openai import AuthenticationError, OpenAI

from autopipe.core.errors import ConfigError
from autopipe.service.config import ServiceConfig, default_alias
from tests.service.serving import ALIAS, Running

KEY = "s3cret-key"
SECRET = "the launch code is 0000"


def status_of(running: Running, target: str, *, method: str = "GET", **headers: str) -> int:
    """Status of a request whose target is sent as it is written here."""
    host, port = running.sock.getsockname()[:2]
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.putrequest(method, target, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def test_only_health_and_the_page_answer_without_a_key(guarded: Running) -> None:
    assert status_of(guarded, "/health") == 200
    assert status_of(guarded, "/") == 200
    for target in ("/v1/models", "/metrics", "/v1/autopipe/plan", "/v1/autopipe/events", "/openapi.json", "/nothing"):
        assert status_of(guarded, target) == 401, target
    assert status_of(guarded, "/v1/autopipe/plan", method="PUT") == 401
    assert status_of(guarded, "/v1/chat/completions", method="POST") == 401


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/health/../v1/models",
        "/health/%2e%2e/v1/models",
        "/health;/v1/models",
        "/health%2f..%2fv1/models",
        "/v1/models?path=/health",
        "http://localhost/v1/models",
        "/%76%31/models",
        "/v1/models#/health",
        "/health/",
        "/Health",
    ],
)
def test_no_spelling_of_a_path_gets_past_the_key(guarded: Running, target: str) -> None:
    assert status_of(guarded, target) in (401, 400)


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer s3cret"])
def test_a_wrong_key_is_none(guarded: Running, header: str) -> None:
    assert status_of(guarded, "/v1/models", Authorization=header) == 401


def test_the_key_opens(guarded: Running) -> None:
    assert status_of(guarded, "/v1/models", Authorization=f"Bearer {KEY}") == 200
    assert status_of(guarded, "/v1/models", Authorization=f"bearer {KEY}") == 200
    with OpenAI(base_url=guarded.base_url, api_key=KEY) as client:
        assert client.models.list().data[0].id == ALIAS
    with (
        OpenAI(base_url=guarded.base_url, api_key="wrong", max_retries=0) as client,
        pytest.raises(AuthenticationError),
    ):
        client.models.list()


def test_without_a_key_only_this_machines_names_are_answered(running: Running) -> None:
    assert status_of(running, "/v1/models", Host="localhost:1234") == 200
    assert status_of(running, "/v1/models", Host="evil.example") == 403
    assert status_of(running, "/health", Host="127.0.0.1.evil.example") == 403


def test_without_a_key_pages_of_other_sites_are_not_answered(running: Running) -> None:
    cross = {"Sec-Fetch-Site": "cross-site"}
    assert status_of(running, "/v1/models", **cross) == 403
    assert status_of(running, "/v1/completions", method="POST", **cross) == 403
    assert status_of(running, "/", **cross) == 200
    assert status_of(running, "/v1/models", **{"Sec-Fetch-Site": "same-origin"}) == 200


def test_an_address_that_others_reach_needs_a_key_or_an_explicit_word() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.7", "example.org"):
        with pytest.raises(ConfigError) as caught:
            ServiceConfig.parse({"host": host})
        assert caught.value.key == "host"
    ServiceConfig.parse({"host": "0.0.0.0", "api_key": "k"})
    ServiceConfig.parse({"host": "0.0.0.0", "allow_unauthenticated_remote": True})
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        ServiceConfig.parse({"host": host})


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    for key in ("", "two words", "line\nbreak", "schlüssel"):
        with pytest.raises(ConfigError) as caught:
            ServiceConfig.parse({"api_key": key})
        assert caught.value.key == "api_key"


def test_the_key_is_not_shown_with_the_configuration() -> None:
    assert KEY not in repr(ServiceConfig.parse({"api_key": KEY}))


def test_the_alias_tells_nothing_of_where_a_model_lies() -> None:
    assert default_alias("/home/me/models/big/") == "big"
    assert default_alias("org/name") == "name"
    assert default_alias("repo:file.gguf") == "file"
    assert default_alias("///") == "autopipe"


def test_the_log_holds_no_prompts_unless_asked(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with OpenAI(base_url=running.base_url, api_key="none", max_retries=0) as client:
        client.completions.create(model=ALIAS, prompt=SECRET, max_tokens=2)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("autopipe", "uvicorn"))]
    assert any("prompt tokens" in line for line in ours)
    assert not any(SECRET in line for line in ours)


def test_the_log_holds_prompts_where_asked(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with OpenAI(base_url=guarded.base_url, api_key=KEY, max_retries=0) as client:
        client.completions.create(model=ALIAS, prompt=SECRET, max_tokens=2)
    assert any(SECRET in record.getMessage() for record in caplog.records if record.name.startswith("autopipe"))
