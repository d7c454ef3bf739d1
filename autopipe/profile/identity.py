"""What a profile holds for: machine, models, prompts. All of it goes into the content hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from autopipe.core.plan import StagePlan
from autopipe.core.tuned import Machine
from autopipe.profile.model import Settings


def describe_machine() -> Machine:
    """This machine, as far as it matters to speed."""
    from autopipe.bench.machine import describe_machine as describe

    found = describe()
    facts: dict[str, Any] = {
        "platform": found["platform"],
        "cpu": found["cpu"],
        "cores": found["cores"],
        "memory_bytes": found["memory_bytes"],
        "gpus": [str(gpu["name"]) for gpu in found["gpus"]],
        "libraries": {name: found["libraries"][name] for name in ("torch", "transformers")},
    }
    return Machine.parse({"fingerprint": digest(facts), **facts})


def model_digest(stage: StagePlan) -> str:
    """What identifies a stage's weights: a hash over samples of its files; for an emulated stage over its figures."""
    if stage.emulated is not None:
        return digest(stage.emulated.model_dump(mode="json"))
    from autopipe.core.models.cache import file_digest
    from autopipe.core.models.loading import weight_files
    from autopipe.core.models.shared_base import adapter_folder
    from autopipe.core.models.spec import resolve

    files = weight_files(resolve(stage.model))
    if stage.adapter is not None:
        files = [*files, *sorted(Path(adapter_folder(stage.adapter)).glob("*.safetensors"))]
    return digest([file_digest(file) for file in files])


def content_hash(settings: Settings, machine: Machine) -> str:
    """Equal when a measurement can be taken up where it was interrupted."""
    return digest({"settings": settings.model_dump(mode="json"), "machine": machine.fingerprint})


def digest(data: Any) -> str:
    """Hash of JSON-ready data, 16 hex digits."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
