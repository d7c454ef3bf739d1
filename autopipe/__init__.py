"""AutoPipe: self-configuring pipelined speculative decoding, lossless by construction.

    from autopipe import AutoPipe

    with AutoPipe.from_pretrained("smollm2-135m") as pipe:
        print(pipe.generate("def fibonacci(n):", max_new_tokens=64).text)

Names are imported when first used, so that `import autopipe` is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.api import AutoPipe, GenerationResult, StreamDelta
    from autopipe.core.errors import AutoPipeError, ConfigError
    from autopipe.core.plan import Plan, StagePlan
    from autopipe.core.sampling import SamplingParams
    from autopipe.tune import TuneResult, tune

__version__ = "0.1.0"

_HOMES = {
    "AutoPipe": "autopipe.api",
    "GenerationResult": "autopipe.api",
    "StreamDelta": "autopipe.api",
    "AutoPipeError": "autopipe.core.errors",
    "ConfigError": "autopipe.core.errors",
    "Plan": "autopipe.core.plan",
    "StagePlan": "autopipe.core.plan",
    "SamplingParams": "autopipe.core.sampling",
    "TuneResult": "autopipe.tune",
}
__all__ = [  # noqa: RUF022 - the order a reader meets them in
    "AutoPipe",
    "GenerationResult",
    "StreamDelta",
    "Plan",
    "StagePlan",
    "SamplingParams",
    "tune",
    "TuneResult",
    "AutoPipeError",
    "ConfigError",
]


def __getattr__(name: str) -> Any:
    if name == "tune":  # a package that can be called
        return importlib.import_module("autopipe.tune")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
