"""More workers of a search, each in a process of its own (`search_worker.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from types import TracebackType
from typing import Any

from autopipe.core.plan import Plan, StagePlan
from autopipe.profile import Profile
from autopipe.tune.limits import Limits
from autopipe.tune.objective import Goal
from autopipe.tune.predict import PowerModel
from autopipe.tune.samplers import SamplerName
from autopipe.tune.search import SearchSettings
from autopipe.tune.space import Space


class Workers:
    """Processes that help with a study until no trial waits, or time is up.

    Args:
        count: how many.
        storage_url: one that processes can share.
        deadline_s: on the clock of `time.monotonic`, which processes of one machine share.
    """

    def __init__(
        self,
        count: int,
        *,
        storage_url: str,
        study_name: str,
        space: Space,
        profile: Profile,
        power: PowerModel | None,
        settings: SearchSettings,
        endless: bool,
        deadline_s: float,
    ) -> None:
        task = {
            "storage": storage_url,
            "study": study_name,
            "space": _space_data(space),
            "profile": profile.model_dump(mode="json"),
            "power": None if power is None else asdict(power),
            "settings": _settings_data(settings),
            "endless": endless,
            "deadline_s": deadline_s,
        }
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
        }
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "autopipe.tune.search_worker"], stdin=subprocess.PIPE, text=True, env=environment
            )
            for _ in range(count)
        ]
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(task) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                continue  # it has ended; its exit code will say so

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for process in self._processes:
                process.kill()
        self.wait()

    def wait(self) -> int:
        """Wait for all to end; how many of them failed."""
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except BrokenPipeError:
                    continue
        return sum(process.returncode != 0 for process in self._processes)


def _space_data(space: Space) -> dict[str, Any]:
    return {
        "target": space.target.model_dump(mode="json"),
        "drafters": [stage.model_dump(mode="json") for stage in space.drafters],
        "tables": list(space.tables),
        "threads": list(space.threads),
        "cores": list(space.cores),
        "base": None if space.base is None else space.base.model_dump(mode="json"),
    }


def space_of(data: dict[str, Any]) -> Space:
    """The space of a task."""
    return Space(
        target=StagePlan.parse(data["target"]),
        drafters=tuple(StagePlan.parse(stage) for stage in data["drafters"]),
        tables=tuple(data["tables"]),
        threads=tuple(data["threads"]),
        cores=tuple(data["cores"]),
        base=None if data["base"] is None else Plan.parse(data["base"]),
    )


def _settings_data(settings: SearchSettings) -> dict[str, Any]:
    return {
        "goals": [asdict(goal) for goal in settings.goals],
        "sampler": settings.sampler.value,
        "seed": settings.seed,
        "limits": {**asdict(settings.limits), "memory_bytes": dict(settings.limits.memory_bytes)},
        "capacities": dict(settings.capacities),
    }


def settings_of(data: dict[str, Any]) -> SearchSettings:
    """The settings of a task."""
    return SearchSettings(
        goals=tuple(Goal(**goal) for goal in data["goals"]),
        sampler=SamplerName(data["sampler"]),
        seed=data["seed"],
        limits=Limits(**data["limits"]),
        capacities=data["capacities"],
    )
