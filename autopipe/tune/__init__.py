"""Finds the best plan for a target, a workload and this machine: `autopipe tune`, and

    import autopipe

    result = autopipe.tune("smollm2-135m", workload="humaneval:8", budget="5m")
    print(result.plan.to_yaml(), result.speedup)

The package can be called: `autopipe.tune(...)` is `autopipe.tune.tune(...)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from autopipe.tune.api import tune
from autopipe.tune.objective import Objective
from autopipe.tune.options import TuneOptions
from autopipe.tune.result import Measured, TuneResult
from autopipe.tune.run import tune_plan
from autopipe.tune.samplers import SamplerName

__all__ = ["Measured", "Objective", "SamplerName", "TuneOptions", "TuneResult", "tune", "tune_plan"]


class _CallablePackage(ModuleType):
    """`autopipe.tune` is a package of the map, and the function that users call."""

    def __call__(self, *arguments: Any, **options: Any) -> TuneResult:
        return tune(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
