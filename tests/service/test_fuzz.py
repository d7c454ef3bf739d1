"""Schemathesis: whatever the OpenAPI schema allows or forbids, no request makes the service fail."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.service.serving import Running

schemathesis = pytest.importorskip("schemathesis")


def schema_of(running: Running) -> Any:
    return schemathesis.openapi.from_url(running.url + "/openapi.json", headers=credentials(running))


def credentials(running: Running) -> dict[str, str]:
    return {"Authorization": f"Bearer {running.key}"}


BODIES = [("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("PUT", "/v1/autopipe/plan")]
OTHERS = [("GET", "/v1/models/{model}"), ("GET", "/v1/autopipe/requests/{key}"), ("GET", "/v1/autopipe/status")]


@pytest.mark.parametrize(
    ("method", "path", "valid"),
    [*((*operation, valid) for operation in BODIES for valid in (True, False)), *((*each, True) for each in OTHERS)],
)
def test_no_request_makes_the_service_fail(guarded: Running, method: str, path: str, valid: bool) -> None:
    mode = schemathesis.GenerationMode.POSITIVE if valid else schemathesis.GenerationMode.NEGATIVE
    schema = schema_of(guarded)
    schema.config.generation.update(modes=[mode])
    operation = schema[path][method]
    known = {int(status) for status in operation.definition.raw["responses"]} | {405, 415}

    def call(case: Any) -> None:
        response = case.call(timeout=20, headers=credentials(guarded))
        assert response.status_code != 401
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
    assert guarded.service.state == "ready"


def test_the_schema_promises_no_422(guarded: Running) -> None:
    schema = schema_of(guarded).raw_schema
    for operations in schema["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
    assert "HTTPValidationError" not in schema["components"]["schemas"]
