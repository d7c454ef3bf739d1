"""Every error AutoPipe raises on purpose. Catch `AutoPipeError` to catch them all."""

from __future__ import annotations

from typing import Any


class AutoPipeError(Exception):
    """Base of all AutoPipe errors; the message says what to do next."""


class ConfigError(AutoPipeError):
    """A user's option or plan key has a value that is not allowed.

    Attributes:
        key: the user's key, dotted for nested plan keys (`chain.0.window`).
        value: what the user gave.
        allowed: the allowed values, in words.
    """

    def __init__(self, key: str, value: Any, allowed: str) -> None:
        super().__init__(f"{key}: {value!r} is not allowed; allowed: {allowed}")
        self.key = key
        self.value = value
        self.allowed = allowed


class ModelLoadError(AutoPipeError):
    """A model, tokenizer or adapter could not be found or loaded."""


class UnsupportedModelError(AutoPipeError):
    """A model (or its cache) cannot serve as this stage; the message gives the reason."""


class PlacementError(AutoPipeError):
    """Stages do not fit the devices; the message says by how much, and what would fit."""


class TokenizerMismatchError(AutoPipeError):
    """Two stages of one chain speak different vocabularies; the message names both."""


class ContextLengthError(AutoPipeError):
    """A prompt (or prompt plus max_new_tokens) does not fit the target's context."""


class RollbackError(AutoPipeError):
    """A backend was asked to roll back to a length it does not hold."""


class KVMemoryError(AutoPipeError):
    """There is no room for the keys and values of more tokens."""


class QueueFullError(AutoPipeError):
    """Too many requests wait already. `retry_after_s` estimates when there will be room."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests wait already; try again in {retry_after_s:.0f} s")
        self.waiting = waiting
        self.retry_after_s = retry_after_s


class StageError(AutoPipeError):
    """A stage failed. `stage` is its name."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(f"stage {stage!r}: {message}")
        self.stage = stage


class TargetDiedError(StageError):
    """The target's worker died, so the request cannot go on; the next request restarts it."""


class EngineClosedError(AutoPipeError):
    """The engine was closed while, or before, the request ran."""


class RequestCancelledError(AutoPipeError):
    """The request was cancelled before it finished."""


def rebuild_error(kind: str, message: str) -> AutoPipeError:
    """The error that a worker reported by class name and message, as the same class where a message is all it takes."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, AutoPipeError):
        return found(message) if found.__init__ is AutoPipeError.__init__ else AutoPipeError(message)
    return ModelLoadError(f"{kind}: {message}")
