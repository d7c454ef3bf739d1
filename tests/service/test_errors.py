"""The engine's errors as clients see them."""

from __future__ import annotations

import pytest

from autopipe.core.errors import (
    AutoPipeError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    ModelLoadError,
    QueueFullError,
    TargetDiedError,
)
from autopipe.core.journal import JournalError
from autopipe.service.errors import from_engine


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ConfigError("max_new_tokens", 0, "1 or more"), 400, "invalid_value"),
        (ContextLengthError("too long"), 400, "context_length_exceeded"),
        (QueueFullError(3, 7.0), 429, "queue_full"),
        (EngineClosedError("closed"), 503, "shutting_down"),
        (TargetDiedError("big", "killed"), 503, "target_died"),
        (ModelLoadError("stage 'big': its process ended"), 503, "target_died"),
        (JournalError("disk full"), 503, "journal_failed"),
        (AutoPipeError("NaN logits"), 500, "engine_error"),
        (RuntimeError("secret detail"), 500, "internal_error"),
    ],
)
def test_an_error_has_a_status_and_a_code(error: Exception, status: int, code: str) -> None:
    found = from_engine(error, {"max_new_tokens": "max_tokens"})
    assert (found.status, found.code) == (status, code)
    assert "secret" not in found.message


def test_what_may_work_later_says_when() -> None:
    assert from_engine(QueueFullError(3, 7.0)).headers["Retry-After"] == "7"
    assert "Retry-After" in from_engine(TargetDiedError("big", "killed")).headers


def test_the_engines_keys_become_the_requests_fields() -> None:
    found = from_engine(ConfigError("max_new_tokens", 0, "1 or more"), {"max_new_tokens": "max_tokens"})
    assert found.param == "max_tokens"
    assert found.message.startswith("max_tokens: ")
