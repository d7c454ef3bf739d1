"""Stage backends: one model with a cache that can be rolled back. Import a backend from its own module."""

from autopipe.core.backends.base import CostNotes, StageBackend

__all__ = ["CostNotes", "StageBackend"]
