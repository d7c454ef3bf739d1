"""Plans that ship with AutoPipe."""

from __future__ import annotations

from pathlib import Path

DEFAULT_PLAN_PATH = Path(__file__).parent / "default.yaml"
"""The best pipeline known for the default model."""
