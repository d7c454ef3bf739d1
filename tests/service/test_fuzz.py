"""Schemathesis: whatever the OpenAPI schema allows or forbids, no request makes the service fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.service.serving import Running, serving, tiny_plan

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def fuzzed(tiny_folder: Path) -> Any:
    limits = {"max_new_tokens": 4, "max_prompt_tokens": 64, "max_choices": 4}
    with serving(tiny_plan(tiny_folder), limits=limits) as running:
        yield running


BODIES = [("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("PUT", "/v1/autopipe/plan")]
OTHERS = [("GET", "/v1/models/{model}"), ("GET", "/v1/autopipe/requests/{key}"), ("GET", "/v1/autopipe/status")]


@pytest.mark.parametrize(
    ("method", "path", "valid"),
    [*((*operation, valid) for operation in BODIES for valid in (True, False)), *((*each, True) for each in OTHERS)],
)
def test_no_request_makes_the_service_fail(fuzzed: Running, method: str, path: str, valid: bool) -> None:
    mode = schemathesis.GenerationMode.POSITIVE if valid else schemathesis.GenerationMode.NEGATIVE
    schema = schemathesis.openapi.from_url(fuzzed.url + "/openapi.json")
    schema.config.generation.update(modes=[mode])
    operation = schema[path][method]
    known = {int(status) for status in operation.definition.raw["responses"]} | {405, 415}

    def call(case: Any) -> None:
        response = case.call(timeout=20)
        assert response.status_code < 500, response.text
        assert response.status_code in known, response.text

    run = settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(given(operation.as_strategy(generation_mode=mode))(call))
    run()
    assert fuzzed.service.state == "ready"


def test_the_schema_promises_no_422(fuzzed: Running) -> None:
    schema = schemathesis.openapi.from_url(fuzzed.url + "/openapi.json").raw_schema
    for operations in schema["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
    assert "HTTPValidationError" not in schema["components"]["schemas"]
